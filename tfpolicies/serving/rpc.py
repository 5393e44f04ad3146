"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer

from tfpolicies.errors import RequestError
from tfpolicies.serving.calls import Answer, Call, Options
from tfpolicies.serving.repository import Repository
from tfpolicies.serving.rest import GONE, SERVER
from tfpolicies.serving.tensors import datatype_of, from_bytes, from_values

_CODES = {
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
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

_LONGEST = 2000  # characters of an error, which travels in a header

_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Any]])


def _answered(method: _Method) -> _Method:
    """Makes a method end with the status that an error means."""

    @wraps(method)
    async def answering(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request, context)
        except RequestError as error:
            code = _CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT)
            await context.abort(code, str(error)[:_LONGEST])

    return answering  # type: ignore[return-value]


class Rpc(GRPCInferenceServiceServicer):
    """Answers for the models of a repository."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    @_answered
    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Answers a request for actions."""
        name, metrics = request.model_name, self._repository.metrics
        began = time.perf_counter()
        model = self._repository[name]
        status = 500
        try:
            answer = await model.infer(_call(request))
            status = 200
        except RequestError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = GONE
            raise
        finally:
            metrics.requests.labels(name, "grpc", status).inc()
            metrics.seconds.labels(name).observe(time.perf_counter() - began)
        return _response(name, request.id, answer)

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """Says that the server runs."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """Says whether all models answer."""
        return pb.ServerReadyResponse(ready=self._repository.is_ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Says what this server is."""
        return pb.ServerMetadataResponse(**SERVER)

    @_answered
    async def ModelReady(self, request: Any, context: Any) -> Any:
        """Says whether a model answers."""
        model = self._repository[request.name]
        if model.is_ready:
            model.require_version(request.version)
        return pb.ModelReadyResponse(ready=model.is_ready)

    @_answered
    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Says what a model takes and gives."""
        model = self._repository[request.name]
        model.require_version(request.version)
        return pb.ModelMetadataResponse(**model.metadata())

    @_answered
    async def ModelConfig(self, request: Any, context: Any) -> Any:
        """Says how a model is served."""
        model = self._repository[request.name]
        model.require_version(request.version)
        return pb.ModelConfigResponse(config=model_config_pb2.ModelConfig(**model.config()))

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """Says what models there are."""
        found = self._repository.index(ready=request.ready)
        return pb.RepositoryIndexResponse(models=found)

    @_answered
    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        """Loads what is in a model's folder now."""
        await self._repository[request.model_name].load()
        return pb.RepositoryModelLoadResponse()

    @_answered
    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        """Makes a model answer no more."""
        self._repository[request.model_name].unload()
        return pb.RepositoryModelUnloadResponse()


def _call(request: Any) -> Call:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError(
            f"raw_input_contents must have one part for each of the {len(request.inputs)} inputs, "
            f"got {len(raw)}."
        )
    inputs: dict[str, np.ndarray] = {}
    for number, tensor in enumerate(request.inputs):
        if tensor.name in inputs:
            raise RequestError(f"Input {tensor.name!r} is given twice.")
        inputs[tensor.name] = _array(tensor, raw[number] if raw else None)
    return Call(
        inputs,
        Options.of(_plain(request.parameters)),
        [output.name for output in request.outputs] or None,
        request.id,
        request.model_version,
    )


def _array(tensor: Any, raw: bytes | None) -> np.ndarray:
    if raw is not None:
        return from_bytes(tensor.name, tensor.datatype, [*tensor.shape], raw)
    field = _CONTENTS.get(tensor.datatype)
    values = getattr(tensor.contents, field) if field else ()
    return from_values(tensor.name, tensor.datatype, [*tensor.shape], [*values])


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
