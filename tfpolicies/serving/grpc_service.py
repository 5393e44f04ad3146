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
from tfpolicies.serving.access import AccessRules
from tfpolicies.serving.infer_requests import InferOptions, InferRequest, InferResponse
from tfpolicies.serving.repository import ModelRepository
from tfpolicies.serving.request_texts import MAX_NAME_LENGTH, quote, require_few, require_short
from tfpolicies.serving.rest import LARGE_REQUEST_BYTES, SERVER_METADATA
from tfpolicies.serving.server_log import AccessLogEntry
from tfpolicies.serving.server_metrics import CLIENT_CLOSED_REQUEST
from tfpolicies.serving.tensor_checks import MAX_AXES, decode_bytes, decode_values, get_datatype
from tfpolicies.serving.upload_budget import Upload

_GRPC_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CONTENT_FIELDS = {
    "BOOL": "bool_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}

SERVICE = "inference.GRPCInferenceService"

_MAX_ERROR_LENGTH = 2000  # characters of an error, which is sent in a header
_UNCOUNTED_SECONDS = 0.05  # seconds after which an incomplete message is counted
_MESSAGE_SECONDS = 60.0  # time limit of a message
_MEMORY_PER_BYTE = 2  # bytes that gRPC buffers for each byte of an incoming message
_TOKEN_FREE_METHODS = ("ServerLive", "ServerReady")  # methods that need no token
_HOLD_SECONDS = 0.1  # seconds in which busy clients send a further request, before the GOAWAY


class _IncomingMessage:
    """A message that is being received: a slow one is counted, and may be aborted for others.

    gRPC does not report how much of a message has arrived, so the largest size is counted.
    """

    def __init__(self, upload: Upload, size: int) -> None:
        self._upload, self._size = upload, size
        self._error: RequestError | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, context: grpc.aio.ServicerContext) -> bytes:
        """Returns the message.

        Raises:
            RequestError: if it takes too long, or is aborted for others.
        """
        self._reading_task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_UNCOUNTED_SECONDS, self._count_bytes)
        try:
            content = await context.read()
        except asyncio.CancelledError:
            if self._error is None:  # the client has disconnected
                raise
            raise self._error from None
        finally:
            self._timer.cancel()
        return b"" if content is grpc.aio.EOF else content

    def _count_bytes(self) -> None:
        self._upload.abort = self._abort_for_memory
        self._timer = asyncio.get_running_loop().call_later(_MESSAGE_SECONDS, self._abort_late)
        try:
            self._upload.add_bytes(self._size)
        except RequestError as error:
            self._abort(error)

    def _abort_for_memory(self) -> None:
        reason = "Others need the memory of this message, which arrives slowly. Try again later."
        self._abort(RequestError(reason, 503))

    def _abort_late(self) -> None:
        self._abort(
            RequestError(f"The message did not arrive within {_MESSAGE_SECONDS:.0f} seconds.", 408)
        )

    def _abort(self, error: RequestError) -> None:
        if self._reading_task is not None and self._error is None:
            self._error = error
            self._reading_task.cancel()


class RpcMethod(NamedTuple):
    """A method of the service.

    Attributes:
        name: in the protocol.
        handle: returns the response to a request.
        parse: parses a message, given the number of values that it may have.
    """

    name: str
    handle: Callable[[Any], Awaitable[Any]]
    parse: Callable[[bytes, int], Any]


class GrpcHandler(grpc.GenericRpcHandler):
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
        repository: ModelRepository,
        access: AccessRules,
        record: Callable[[AccessLogEntry], object] | None = None,
    ) -> None:
        self._repository, self._access, self._record = repository, access, record
        self._counted_bytes = _MEMORY_PER_BYTE * repository.limits.max_body
        self._responses_allowed = asyncio.Event()
        self._responses_allowed.set()
        self._handlers = {
            f"/{SERVICE}/{method.name}": grpc.stream_unary_rpc_method_handler(
                partial(self._handle, method),
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for method in self._make_methods()
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
        self._responses_allowed.clear()
        await asyncio.sleep(_HOLD_SECONDS)
        stopping = asyncio.ensure_future(server.stop(grace))
        await asyncio.wait([stopping], timeout=_HOLD_SECONDS)
        self._responses_allowed.set()
        await stopping

    def _make_methods(self) -> list[RpcMethod]:
        find = self._repository.find
        field_getters: dict[str, Callable[[Any], dict[str, Any]]] = {
            "ServerLive": lambda request: {"live": True},
            "ServerReady": lambda request: {"ready": self._repository.is_ready},
            "ServerMetadata": lambda request: SERVER_METADATA,
            "ModelReady": self._is_model_ready,
            "ModelMetadata": lambda request: find(request.name, request.version).metadata(),
            "ModelConfig": lambda request: {"config": find(request.name, request.version).config()},
            "RepositoryIndex": lambda request: {
                "models": self._repository.list_models(ready=request.ready)
            },
        }
        return [
            RpcMethod("ModelInfer", self.infer, _parse_infer),
            *(
                _make_simple_method(name, partial(_respond_with_fields, name, get_fields))
                for name, get_fields in field_getters.items()
            ),
            _make_simple_method("RepositoryModelLoad", self.load),
            _make_simple_method("RepositoryModelUnload", self.unload),
        ]

    async def _handle(
        self, method: RpcMethod, messages: object, context: grpc.aio.ServicerContext
    ) -> Any:
        """Answers a call; an error ends it with the corresponding status."""
        start, status, model, size = time.perf_counter(), 500, "", 0
        try:
            if self._access.requires_token and method.name not in _TOKEN_FREE_METHODS:
                self._access.check_token(_get_authorization(context))
            with self._repository.upload_budget.start_upload() as upload:
                content = await _IncomingMessage(upload, self._counted_bytes).read(context)
                upload.can_be_aborted = False
                if (
                    len(content) > LARGE_REQUEST_BYTES and not upload.size
                ):  # large messages queue for parsing
                    upload.add_bytes(len(content))
                request = await self._parse(method, content)
            model = _get_model_name(request) if self._record else ""
            response = await method.handle(request)
            status, size = 200, response.ByteSize() if self._record else 0
            if not self._responses_allowed.is_set():
                await self._responses_allowed.wait()
            return response
        except RequestError as error:
            status = error.status
            code = _GRPC_CODES.get(status, grpc.StatusCode.INVALID_ARGUMENT)
            await context.abort(code, str(error)[:_MAX_ERROR_LENGTH])
        except asyncio.CancelledError:
            status = CLIENT_CLOSED_REQUEST
            raise
        finally:
            if self._record is not None:
                path, seconds = f"/{SERVICE}/{method.name}", time.perf_counter() - start
                call = "grpc", _parse_address(context.peer()), method.name, path, model
                self._record(AccessLogEntry(*call, status, seconds, size, time.time()))

    async def _parse(self, method: RpcMethod, content: bytes) -> Any:
        """Parses a request; large ones in another thread."""
        max_values = self._repository.limits.max_body // 2
        if len(content) <= LARGE_REQUEST_BYTES:
            return method.parse(content, max_values)
        return await self._repository.parse(method.parse, content, max_values)

    async def infer(self, parsed: tuple[Any, InferRequest | RequestError]) -> Any:
        request, infer_request = parsed
        name = request.model_name
        model = self._repository[name]
        with self._repository.metrics.measure(
            name, "grpc", disconnect_error=asyncio.CancelledError
        ):
            if isinstance(infer_request, RequestError):
                raise infer_request
            response = await model.infer(infer_request)
        return _make_response(name, request.id, response)

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
        self._access.require_control()
        self._repository[request.model_name].unload()
        return pb.RepositoryModelUnloadResponse()


def _make_simple_method(name: str, handle: Callable[[Any], Awaitable[Message]]) -> RpcMethod:
    """Returns a method whose requests only need to be parsed."""
    return RpcMethod(name, handle, partial(_parse_message, getattr(pb, f"{name}Request")))


async def _respond_with_fields(
    name: str, get_fields: Callable[[Any], dict[str, Any]], request: Message
) -> Message:
    return getattr(pb, f"{name}Response")(**get_fields(request))


def _get_authorization(context: grpc.aio.ServicerContext) -> bytes:
    values = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    value = values[0] if values else b""
    return value.encode() if isinstance(value, str) else value


def _get_model_name(request: Any) -> str:
    """Returns the name of the model in a request; "" if there is none."""
    message = request[0] if isinstance(request, tuple) else request
    return str(getattr(message, "model_name", getattr(message, "name", "")))[:MAX_NAME_LENGTH]


def _parse_address(peer: str) -> str:
    """Returns the address of a peer without its port.

    >>> _parse_address("ipv4:127.0.0.1:4444"), _parse_address("ipv6:%5B::1%5D:4444")
    ('127.0.0.1', '::1')
    """
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _parse_message(message_class: type[Message], content: bytes, max_values: int) -> Any:
    try:
        return message_class.FromString(content)
    except DecodeError as error:
        raise RequestError(f"The message is not a {message_class.DESCRIPTOR.name}.") from error


def _parse_infer(content: bytes, max_values: int) -> tuple[Any, InferRequest | RequestError]:
    """Parses a request for actions; an error is returned, not raised."""
    request = _parse_message(pb.ModelInferRequest, content, max_values)
    try:
        return request, _make_infer_request(request, max_values)
    except RequestError as error:
        return request, error


def _make_infer_request(request: pb.ModelInferRequest, max_values: int) -> InferRequest:
    require_few("inputs", request.inputs)
    require_few("outputs", request.outputs)
    raw_inputs = request.raw_input_contents
    if raw_inputs and len(raw_inputs) != len(request.inputs):
        raise RequestError(
            f"raw_input_contents must have one part for each of the {len(request.inputs)} inputs, "
            f"got {len(raw_inputs)}."
        )
    inputs: dict[str, np.ndarray] = {}
    for number, tensor in enumerate(request.inputs):
        require_short("an input", tensor.name)
        if tensor.name in inputs:
            raise RequestError(f"Input {quote(tensor.name)} is given twice.")
        inputs[tensor.name] = _make_array(
            tensor, raw_inputs[number] if raw_inputs else None, max_values
        )
    options = InferOptions.from_parameters(_parameters_to_dict(request.parameters))
    names = [output.name for output in request.outputs] or None
    return InferRequest(inputs, options, names, request.id, request.model_version)


def _make_array(
    tensor: pb.ModelInferRequest.InferInputTensor, raw_input: bytes | None, max_values: int
) -> np.ndarray:
    shape = tensor.shape[: MAX_AXES + 1]
    if raw_input is not None:
        return decode_bytes(tensor.name, tensor.datatype, shape, raw_input)
    field = _CONTENT_FIELDS.get(tensor.datatype)
    values = getattr(tensor.contents, field) if field else ()
    if len(values) > max_values:
        raise RequestError(
            f"Input {quote(tensor.name)} may have {max_values} values (half of --max-body), got "
            f"{len(values)}. Send tensors as bytes (raw_input_contents).",
            413,
        )
    return decode_values(tensor.name, tensor.datatype, shape, [*values])


def _parameters_to_dict(parameters: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in parameters.items():
        field = value.WhichOneof("parameter_choice")
        values[name] = getattr(value, field) if field else None
    return values


def _make_response(model: str, id: str, response: InferResponse) -> Any:
    message = pb.ModelInferResponse(model_name=model, model_version=response.version, id=id)
    for name, array in response.outputs.items():
        message.outputs.add(name=name, datatype=get_datatype(array), shape=array.shape)
        message.raw_output_contents.append(array.tobytes())
    return message
