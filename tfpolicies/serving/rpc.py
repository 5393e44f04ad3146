"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2 as pb

from tfpolicies.errors import RequestError
from tfpolicies.serving.access import Access
from tfpolicies.serving.arrivals import Arrival
from tfpolicies.serving.calls import Answer, Call, Options
from tfpolicies.serving.logs import AnsweredRequest
from tfpolicies.serving.metrics import GONE
from tfpolicies.serving.repository import Repository
from tfpolicies.serving.rest import LARGE, SERVER
from tfpolicies.serving.tensors import MOST_AXES, datatype_of, from_bytes, from_values
from tfpolicies.serving.texts import LONGEST_NAME, quote, require_few, require_short

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CONTENTS = {
    "BOOL": "bool_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}

SERVICE = "inference.GRPCInferenceService"

_LONGEST = 2000  # characters of an error, which is sent in a header
_QUICK = 0.05  # seconds after which an incomplete message is counted
_PATIENCE = 60.0  # time limit of a message
_SIZE_IN_MEMORY = 2  # bytes that gRPC buffers for each byte of an incoming message
_OPEN = ("ServerLive", "ServerReady")  # methods that need no token
_HOLD = 0.1  # seconds in which busy clients send a further request, before the GOAWAY


class _Message:
    """A message that is being received: a slow one is counted, and may be aborted for others.

    gRPC does not report how much of a message has arrived, so the largest size is counted.
    """

    def __init__(self, arrival: Arrival, size: int) -> None:
        self._arrival, self._size = arrival, size
        self._problem: RequestError | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, context: grpc.aio.ServicerContext) -> bytes:
        """Returns the message.

        Raises:
            RequestError: if it takes too long, or is aborted for others.
        """
        self._reading = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_QUICK, self._count)
        try:
            content = await context.read()
        except asyncio.CancelledError:
            if self._problem is None:  # the client has disconnected
                raise
            raise self._problem from None
        finally:
            self._timer.cancel()
        return b"" if content is grpc.aio.EOF else content

    def _count(self) -> None:
        self._arrival.give_up = self._give_way
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE, self._end_late)
        try:
            self._arrival.grow(self._size)
        except RequestError as error:
            self._end(error)

    def _give_way(self) -> None:
        reason = "Others need the memory of this message, which arrives slowly. Try again later."
        self._end(RequestError(reason, 503))

    def _end_late(self) -> None:
        self._end(RequestError(f"The message did not arrive within {_PATIENCE:.0f} seconds.", 408))

    def _end(self, problem: RequestError) -> None:
        if self._reading is not None and self._problem is None:
            self._problem = problem
            self._reading.cancel()


class Method(NamedTuple):
    """A method of the service.

    Attributes:
        name: in the protocol.
        handle: returns the response to a request.
        parse: parses a message, given the number of values that it may have.
    """

    name: str
    answer: Callable[[Any], Awaitable[Any]]
    parse: Callable[[bytes, int], Any]


class Rpc(grpc.GenericRpcHandler):
    """Handles gRPC calls for the models of a repository.

    Messages are read here, not by gRPC before a method is called: so a client can be refused before
    its message is received, and incomplete messages are limited.

    Args:
        repository: the models.
        access: the access rules.
        record: called with each answered request; None for none.
    """

    def __init__(
        self,
        repository: Repository,
        access: Access,
        record: Callable[[AnsweredRequest], object] | None = None,
    ) -> None:
        self._repository, self._access, self._record = repository, access, record
        self._size = _SIZE_IN_MEMORY * repository.limits.max_body
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self._handlers = {
            f"/{SERVICE}/{method.name}": grpc.stream_unary_rpc_method_handler(
                partial(self._handle, method),
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for method in self._methods()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Returns the handler of a call, None if there is no such method."""
        return self._handlers.get(handler_call_details.method)

    async def stop(self, server: grpc.aio.Server, grace: float) -> None:
        """Stops the server that calls this handler; returns once all calls have been answered.

        A call that arrives after the server has begun to stop is cancelled, and only then clients
        get the message to reconnect elsewhere (GOAWAY). So responses are held back for a moment, in
        which each busy client has a call here, and are sent after the GOAWAY.

        Args:
            server: the server to stop.
            grace: seconds that calls may take.
        """
        self._may_answer.clear()
        await asyncio.sleep(_HOLD)
        stopping = asyncio.ensure_future(server.stop(grace))
        await asyncio.wait([stopping], timeout=_HOLD)
        self._may_answer.set()
        await stopping

    def _methods(self) -> list[Method]:
        find = self._repository.find
        facts: dict[str, Callable[[Any], dict[str, Any]]] = {
            "ServerLive": lambda request: {"live": True},
            "ServerReady": lambda request: {"ready": self._repository.is_ready},
            "ServerMetadata": lambda request: SERVER,
            "ModelReady": self._is_model_ready,
            "ModelMetadata": lambda request: find(request.name, request.version).metadata(),
            "ModelConfig": lambda request: {"config": find(request.name, request.version).config()},
            "RepositoryIndex": lambda request: {
                "models": self._repository.index(ready=request.ready)
            },
        }
        return [
            Method("ModelInfer", self.infer, _parse_infer),
            *(_plain_method(name, partial(_say, name, each)) for name, each in facts.items()),
            _plain_method("RepositoryModelLoad", self.load),
            _plain_method("RepositoryModelUnload", self.unload),
        ]

    async def _handle(
        self, method: Method, messages: object, context: grpc.aio.ServicerContext
    ) -> Any:
        """Answers a call; an error ends it with the corresponding status."""
        began, status, model, size = time.perf_counter(), 500, "", 0
        try:
            if self._access.asks_for_token and method.name not in _OPEN:
                self._access.check_token(_authorization(context))
            with self._repository.arrivals.begin() as arrival:
                content = await _Message(arrival, self._size).read(context)
                arrival.can_give_way = False
                if len(content) > LARGE and not arrival.size:  # large messages queue for parsing
                    arrival.grow(len(content))
                request = await self._parse(method, content)
            model = _model_name(request) if self._record else ""
            answer = await method.answer(request)
            status, size = 200, answer.ByteSize() if self._record else 0
            if not self._may_answer.is_set():
                await self._may_answer.wait()
            return answer
        except RequestError as error:
            status = error.status
            code = _CODES.get(status, grpc.StatusCode.INVALID_ARGUMENT)
            await context.abort(code, str(error)[:_LONGEST])
        except asyncio.CancelledError:
            status = GONE
            raise
        finally:
            if self._record is not None:
                path, seconds = f"/{SERVICE}/{method.name}", time.perf_counter() - began
                sent = "grpc", _address(context.peer()), method.name, path, model
                self._record(AnsweredRequest(*sent, status, seconds, size, time.time()))

    async def _parse(self, method: Method, content: bytes) -> Any:
        """Parses a request; large ones in another thread."""
        most = self._repository.limits.max_body // 2
        if len(content) <= LARGE:
            return method.parse(content, most)
        return await self._repository.parse(method.parse, content, most)

    async def infer(self, parsed: tuple[Any, Call | RequestError]) -> Any:
        """Answers a request for actions."""
        request, call = parsed
        name = request.model_name
        model = self._repository[name]
        with self._repository.metrics.measure(name, "grpc", gone=asyncio.CancelledError):
            if isinstance(call, RequestError):
                raise call
            answer = await model.infer(call)
        return _response(name, request.id, answer)

    def _is_model_ready(self, request: pb.ModelReadyRequest) -> dict[str, Any]:
        model = self._repository[request.name]
        if model.is_ready:
            model.require_version(request.version)
        return {"ready": model.is_ready}

    async def load(self, request: pb.RepositoryModelLoadRequest) -> Any:
        """Loads the version that is in a model's folder now."""
        self._access.require_control()
        await self._repository[request.model_name].load()
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> Any:
        """Unloads a model."""
        self._access.require_control()
        self._repository[request.model_name].unload()
        return pb.RepositoryModelUnloadResponse()


def _plain_method(name: str, answer: Callable[[Any], Awaitable[Message]]) -> Method:
    """Returns a method whose requests only need to be parsed."""
    return Method(name, answer, partial(_parse, getattr(pb, f"{name}Request")))


async def _say(name: str, get_facts: Callable[[Any], dict[str, Any]], request: Message) -> Message:
    """Answers a method with the fields of its response."""
    return getattr(pb, f"{name}Response")(**get_facts(request))


def _authorization(context: grpc.aio.ServicerContext) -> bytes:
    values = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    value = values[0] if values else b""
    return value.encode() if isinstance(value, str) else value


def _model_name(request: Any) -> str:
    """Returns the name of the model in a request; "" if there is none."""
    message = request[0] if isinstance(request, tuple) else request
    return str(getattr(message, "model_name", getattr(message, "name", "")))[:LONGEST_NAME]


def _address(peer: str) -> str:
    """Returns the address of a peer without its port.

    >>> _address("ipv4:127.0.0.1:4444"), _address("ipv6:%5B::1%5D:4444")
    ('127.0.0.1', '::1')
    """
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _parse(kind: type[Message], content: bytes, most: int) -> Any:
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise RequestError(f"The message is not a {kind.DESCRIPTOR.name}.") from error


def _parse_infer(content: bytes, most: int) -> tuple[Any, Call | RequestError]:
    """Parses a request for actions; an error is returned, not raised."""
    request = _parse(pb.ModelInferRequest, content, most)
    try:
        return request, _call(request, most)
    except RequestError as error:
        return request, error


def _call(request: pb.ModelInferRequest, most: int) -> Call:
    require_few("inputs", request.inputs)
    require_few("outputs", request.outputs)
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError(
            f"raw_input_contents must have one part for each of the {len(request.inputs)} inputs, "
            f"got {len(raw)}."
        )
    inputs: dict[str, np.ndarray] = {}
    for number, tensor in enumerate(request.inputs):
        require_short("an input", tensor.name)
        if tensor.name in inputs:
            raise RequestError(f"Input {quote(tensor.name)} is given twice.")
        inputs[tensor.name] = _array(tensor, raw[number] if raw else None, most)
    options = Options.of(_plain(request.parameters))
    names = [output.name for output in request.outputs] or None
    return Call(inputs, options, names, request.id, request.model_version)


def _array(
    tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None, most: int
) -> np.ndarray:
    shape = tensor.shape[: MOST_AXES + 1]
    if raw is not None:
        return from_bytes(tensor.name, tensor.datatype, shape, raw)
    field = _CONTENTS.get(tensor.datatype)
    values = getattr(tensor.contents, field) if field else ()
    if len(values) > most:
        raise RequestError(
            f"Input {quote(tensor.name)} may have {most} values (half of --max-body), got "
            f"{len(values)}. Send tensors as bytes (raw_input_contents).",
            413,
        )
    return from_values(tensor.name, tensor.datatype, shape, [*values])


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        found[name] = getattr(value, kind) if kind else None
    return found


def _response(model: str, id: str, answer: Answer) -> Any:
    found = pb.ModelInferResponse(model_name=model, model_version=answer.version, id=id)
    for name, array in answer.outputs.items():
        found.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        found.raw_output_contents.append(array.tobytes())
    return found
