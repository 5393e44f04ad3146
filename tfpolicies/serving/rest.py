"""The Open Inference Protocol over HTTP, as an ASGI application."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tfpolicies._version import __version__
from tfpolicies.errors import RequestError
from tfpolicies.serving.repository import Repository
from tfpolicies.serving.rest_tensors import JSON_LENGTH, read, written

SERVER = {
    "name": "tfpolicies",
    "version": __version__,
    "extensions": [
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "parameters",
        "sequence",
    ],
}
"""What the protocol says of this server."""


def application(repository: Repository, *, loads: bool = False) -> Starlette:
    """Returns an application that answers for the models of a repository.

    Args:
        repository: likewise.
        loads: whether it loads the models when it starts, and watches them while it runs.
    """
    rest = _Rest(repository)
    model = "/v2/models/{model}"
    versions = ("", "/versions/{version}")
    routes = [
        *(Route(f"{model}{part}/infer", rest.infer, methods=["POST"]) for part in versions),
        *(Route(f"{model}{part}", rest.metadata) for part in versions),
        *(Route(f"{model}{part}/ready", rest.model_ready) for part in versions),
        *(Route(f"{model}{part}/config", rest.config) for part in versions),
        Route("/v2", rest.server),
        Route("/v2/health/live", rest.live),
        Route("/v2/health/ready", rest.ready),
        Route("/v2/repository/index", rest.index, methods=["POST"]),
        Route("/v2/repository/models/{model}/load", rest.load, methods=["POST"]),
        Route("/v2/repository/models/{model}/unload", rest.unload, methods=["POST"]),
        Route("/metrics", rest.metrics),
    ]
    handlers: dict[Any, Any] = {
        RequestError: _refused,
        HTTPException: _no_such_address,
        Exception: _broken,
    }
    lifespan = (lambda app: repository.running()) if loads else None
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


class _Rest:
    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def infer(self, request: Request) -> Response:
        name, metrics = request.path_params["model"], self._repository.metrics
        began = time.perf_counter()
        model = self._repository[name]
        status = 500
        try:
            body = await _body(request, self._repository.limits.max_body)
            version = request.path_params.get("version", "")
            asked = read(body, request.headers.get(JSON_LENGTH), version)
            content, length = written(name, asked, await model.infer(asked.call))
            status = 200
        except RequestError as error:
            status = error.status
            raise
        finally:
            metrics.requests.labels(name, "http", status).inc()
            metrics.seconds.labels(name).observe(time.perf_counter() - began)
        if length is None:
            return Response(content, media_type="application/json")
        headers = {JSON_LENGTH: str(length)}
        return Response(content, headers=headers, media_type="application/octet-stream")

    async def metadata(self, request: Request) -> Response:
        return _json(self._model(request).metadata())

    async def config(self, request: Request) -> Response:
        return _json(self._model(request).config())

    async def model_ready(self, request: Request) -> Response:
        model = self._model(request)
        return _json({"name": model.name, "ready": True})

    async def server(self, request: Request) -> Response:
        return _json(SERVER)

    async def live(self, request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        ready = self._repository.is_ready
        return _json({"ready": ready}, 200 if ready else 503)

    async def index(self, request: Request) -> Response:
        body = await _body(request, self._repository.limits.max_body)
        try:
            asked = orjson.loads(body or b"{}")
        except orjson.JSONDecodeError as error:
            raise RequestError(f"The body is not JSON: {error}.") from error
        only_ready = isinstance(asked, dict) and asked.get("ready") is True
        return _json(self._repository.index(ready=only_ready))

    async def load(self, request: Request) -> Response:
        await self._repository[request.path_params["model"]].load()
        return _json({})

    async def unload(self, request: Request) -> Response:
        self._repository[request.path_params["model"]].unload()
        return _json({})

    async def metrics(self, request: Request) -> Response:
        return Response(self._repository.metrics.text(), media_type="text/plain; version=0.0.4")

    def _model(self, request: Request) -> Any:
        model = self._repository[request.path_params["model"]]
        model.require_version(request.path_params.get("version", ""))
        return model


async def _body(request: Request, most: int) -> bytes:
    """Returns the body of a request, of which no more than `most` bytes are read."""
    if "content-encoding" in request.headers:
        raise RequestError("The body must not be compressed: send no Content-Encoding.", 415)
    size, parts = 0, []
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(declared, most)
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large("more", most)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(size: str, most: int) -> RequestError:
    return RequestError(f"The body may have {most} bytes (--max-body), got {size}.", 413)


def _json(record: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(record), status, media_type="application/json")


async def _refused(request: Request, error: Any) -> Response:
    response = _json({"error": str(error)}, error.status)
    if error.status == 413:  # what was not read cannot be told from another request
        response.headers["connection"] = "close"
    return response


async def _no_such_address(request: Request, error: Any) -> Response:
    what = f"{request.method} {request.url.path}"
    return _json({"error": f"There is nothing at {what}: {error.detail}."}, error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    return _json({"error": f"The server failed: {type(error).__name__}: {error}"}, 500)
