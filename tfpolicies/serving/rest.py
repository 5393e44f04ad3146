"""The Open Inference Protocol over HTTP, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tfpolicies._version import __version__
from tfpolicies.errors import RequestError
from tfpolicies.serving.access import AccessRules
from tfpolicies.serving.repository import ModelRepository
from tfpolicies.serving.request_texts import quote
from tfpolicies.serving.rest_codec import (
    JSON_LENGTH_HEADER,
    MAX_LENGTH_DIGITS,
    decode_request,
    encode_response,
)
from tfpolicies.serving.served_model import ServedModel
from tfpolicies.serving.server_log import REFUSED_STATUS_KEY, AccessLogEntry
from tfpolicies.serving.server_metrics import CLIENT_CLOSED_REQUEST
from tfpolicies.serving.upload_budget import UNCOUNTED_BYTES, Upload

_JSON_LENGTH_HEADER = JSON_LENGTH_HEADER.encode()
_BODY_SECONDS, _MIN_BYTES_PER_SECOND = (
    60.0,
    10_000,
)  # a body may take 60 s, and a second more per 10,000 bytes
_MAX_ERROR_LENGTH = 2000  # characters of an error
LARGE_REQUEST_BYTES = 1_000_000
"""Size in bytes above which a request is parsed in another thread."""

_EXTENSIONS = "binary_tensor_data model_configuration model_repository parameters sequence"
SERVER_METADATA = {"name": "tfpolicies", "version": __version__, "extensions": _EXTENSIONS.split()}
"""The protocol's metadata of this server."""


def make_app(
    repository: ModelRepository,
    access: AccessRules | None = None,
    *,
    manage_models: bool = False,
    record: Callable[[AccessLogEntry], object] | None = None,
) -> ASGIApp:
    """Returns an ASGI application for the models of a repository.

    Args:
        repository: the models.
        access: the access rules; None to accept all requests, without control of the models.
        manage_models: whether it loads the models when it starts, and checks for new versions while
            it runs.
        record: called with each answered request; None for none.
    """
    rest_handlers = _RestHandlers(repository, access or AccessRules("0.0.0.0"))
    model = "/v2/models/{model}"
    version_parts = ("", "/versions/{version}")
    routes = [
        *(Route(f"{model}{part}", rest_handlers.metadata) for part in version_parts),
        *(Route(f"{model}{part}/ready", rest_handlers.model_ready) for part in version_parts),
        *(Route(f"{model}{part}/config", rest_handlers.config) for part in version_parts),
        Route("/v2", rest_handlers.server),
        Route("/v2/health/live", rest_handlers.live),
        Route("/v2/health/ready", rest_handlers.ready),
        Route("/v2/repository/index", rest_handlers.index, methods=["POST"]),
        Route("/v2/repository/models/{model}/load", rest_handlers.load, methods=["POST"]),
        Route("/v2/repository/models/{model}/unload", rest_handlers.unload, methods=["POST"]),
        Route("/metrics", rest_handlers.metrics),
    ]
    handlers: dict[Any, Any] = {
        RequestError: _handle_request_error,
        HTTPException: _handle_http_error,
        Exception: _handle_server_error,
    }
    lifespan = (lambda app: repository.run()) if manage_models else None
    router = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app: ASGIApp = _InferenceApp(repository, router, access)
    if access is not None and access.origins:
        app = CORSMiddleware(app, access.origins, allow_methods=["*"], allow_headers=["*"])
    return app if record is None else _RecordingApp(app, record)


class _RecordingApp:
    """An application whose requests are logged after their response."""

    def __init__(self, app: ASGIApp, record: Callable[[AccessLogEntry], object]) -> None:
        self._app, self._record = app, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, size = time.perf_counter(), CLIENT_CLOSED_REQUEST, 0

        async def send_counted(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            client = scope["client"][0] if scope.get("client") else ""
            path = scope.get("raw_path", b"").partition(b"?")[0].decode("latin-1")
            request, status = (
                ("http", client, scope["method"], path, ""),
                scope.get(REFUSED_STATUS_KEY, status),
            )
            seconds = time.perf_counter() - start
            self._record(AccessLogEntry(*request, status, seconds, size, time.time()))


_INFER_PATH = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer/?")


class _InferenceApp:
    """Answers requests for actions, and passes all others to an application with routes.

    Routing, middleware and request objects would take as long as a small policy.
    """

    def __init__(
        self, repository: ModelRepository, router: ASGIApp, access: AccessRules | None
    ) -> None:
        self._repository, self._router, self._access = repository, router, access
        self._max_body = repository.limits.max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        infer_path, headers = _INFER_PATH.fullmatch(path), dict(scope["headers"])
        try:
            if self._access is not None:
                with _mark_body_unread():
                    self._access.check_http(path, headers)
            if infer_path is not None:
                headers, body = await self._infer(scope["method"], headers, infer_path, receive)
        except ClientDisconnect:
            pass
        except RequestError as error:
            response = await _handle_request_error(Request(scope), error)
            await response(scope, receive, send)
        except Exception as error:
            response = await _handle_server_error(Request(scope), error)
            await response(scope, receive, send)
            raise
        else:
            if infer_path is None:
                await self._router(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _infer(
        self, method: str, headers: dict[bytes, bytes], infer_path: re.Match[str], receive: Receive
    ) -> Any:
        """Returns the headers and the body of a response."""
        if method != "POST":
            raise RequestError(f"Requests for actions must use POST, got {method}.", 405)
        name, metrics = infer_path["model"], self._repository.metrics
        model = self._repository[name]
        with metrics.measure(name, "http", disconnect_error=ClientDisconnect):
            with self._repository.upload_budget.start_upload() as upload:
                content = await _read_body(headers, receive, upload, self._max_body)
                arguments = (
                    headers.get(_JSON_LENGTH_HEADER),
                    infer_path["version"] or "",
                    self._max_body,
                )
                if len(content) <= LARGE_REQUEST_BYTES:
                    request = decode_request(content, *arguments)
                else:
                    request = await self._repository.parse(decode_request, content, *arguments)
            body, length = encode_response(name, request, await model.infer(request.request))
        response_headers = [(b"content-length", b"%d" % len(body))]
        if length is None:
            return [*response_headers, (b"content-type", b"application/json")], body
        response_headers.append((_JSON_LENGTH_HEADER, b"%d" % length))
        return [*response_headers, (b"content-type", b"application/octet-stream")], body


class _UnreadBodyError(RequestError):
    """The body of a request was not read to its end."""


@contextlib.contextmanager
def _mark_body_unread() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise _UnreadBodyError(str(error), error.status) from error


async def _read_body(
    headers: Mapping[bytes, bytes], receive: Receive, upload: Upload, max_body: int
) -> bytes:
    """Returns the body of a request, within the shared memory budget.

    Args:
        headers: of the request.
        receive: returns the parts of the body.
        upload: counts its bytes, if it has several parts or is large.
        max_body: bytes of a body.

    Raises:
        RequestError: if it is compressed, too large or too slow, or is aborted for others.
        ClientDisconnect: if the client disconnects before its end.
    """
    declared = headers.get(b"content-length", b"0")
    with _mark_body_unread():
        if b"content-encoding" in headers:
            reason = "The body must not be compressed: send no Content-Encoding."
            raise RequestError(reason, 415)
        if declared.isdigit() and (len(declared) > MAX_LENGTH_DIGITS or int(declared) > max_body):
            raise _make_too_large_error(declared[:MAX_LENGTH_DIGITS].decode(), max_body)
        message = await receive()  # before the first bytes, waiting needs no memory
        if not message.get("more_body", False) and message["type"] == "http.request":
            body: bytes = message.get("body", b"")
            if len(body) <= min(LARGE_REQUEST_BYTES, max_body):
                return body
        return await _read_parts(message, receive, upload, max_body)


async def _read_parts(
    first_message: Message, receive: Receive, upload: Upload, max_body: int
) -> bytes:
    """Returns a body of several parts, or a large one."""
    message, deadline = first_message, time.monotonic() + _BODY_SECONDS
    aborted = asyncio.get_running_loop().create_future()
    upload.abort = aborted.cancel
    parts: list[bytes] = []
    size = 0
    while message["type"] != "http.disconnect":
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_body:
            raise _make_too_large_error("more", max_body)
        if size > UNCOUNTED_BYTES:
            upload.add_bytes(size - upload.size)
        if not message.get("more_body", False):
            upload.can_be_aborted = False
            return b"".join(parts)
        message = await _receive_part(receive, deadline + size / _MIN_BYTES_PER_SECOND, aborted)
    raise ClientDisconnect


def _make_too_large_error(size: str, max_body: int) -> RequestError:
    return RequestError(
        f"The body may have at most {max_body} bytes (--max-body), got {size}.", 413
    )


async def _receive_part(
    receive: Receive, deadline: float, aborted: asyncio.Future[None]
) -> Message:
    part = asyncio.ensure_future(receive())
    try:
        await asyncio.wait(
            {part, aborted},
            timeout=deadline - time.monotonic(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if aborted.done():
            raise RequestError(
                "The body was the largest incomplete one, and other requests need its memory. Try "
                "again later.",
                503,
            )
        if not part.done():
            raise RequestError(
                f"The body is incomplete. It may take {_BODY_SECONDS:.0f} seconds, and one more "
                f"for each {_MIN_BYTES_PER_SECOND} bytes.",
                408,
            )
        return part.result()
    finally:
        part.cancel()


class _RestHandlers:
    def __init__(self, repository: ModelRepository, access: AccessRules) -> None:
        self._repository, self._access = repository, access

    async def metadata(self, request: Request) -> Response:
        return _make_json_response(self._find_model(request).metadata())

    async def config(self, request: Request) -> Response:
        return _make_json_response(self._find_model(request).config())

    async def model_ready(self, request: Request) -> Response:
        model = self._find_model(request)
        return _make_json_response({"name": model.name, "ready": True})

    async def server(self, request: Request) -> Response:
        return _make_json_response(SERVER_METADATA)

    async def live(self, request: Request) -> Response:
        return _make_json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        ready = self._repository.is_ready
        return _make_json_response({"ready": ready}, 200 if ready else 503)

    async def index(self, request: Request) -> Response:
        with self._repository.upload_budget.start_upload() as upload:
            headers, max_body = dict(request.scope["headers"]), self._repository.limits.max_body
            body = await _read_body(headers, request.receive, upload, max_body)
        if len(body) > UNCOUNTED_BYTES:
            raise RequestError(
                f"The body may have at most {UNCOUNTED_BYTES} bytes, got {len(body)}.", 413
            )
        try:
            parameters = orjson.loads(body or b"{}")
        except orjson.JSONDecodeError as error:
            raise RequestError(f"The body is not JSON: {error}.") from error
        only_ready = isinstance(parameters, dict) and parameters.get("ready") is True
        return _make_json_response(self._repository.list_models(ready=only_ready))

    async def load(self, request: Request) -> Response:
        self._access.require_control()
        await self._repository[request.path_params["model"]].load()
        return _make_json_response({})

    async def unload(self, request: Request) -> Response:
        self._access.require_control()
        self._repository[request.path_params["model"]].unload()
        return _make_json_response({})

    async def metrics(self, request: Request) -> Response:
        return Response(self._repository.metrics.to_text(), media_type="text/plain; version=0.0.4")

    def _find_model(self, request: Request) -> ServedModel:
        parameters = request.path_params
        return self._repository.find(parameters["model"], parameters.get("version", ""))


def _make_json_response(
    record: Mapping[str, Any] | Sequence[Mapping[str, Any]], status: int = 200
) -> Response:
    return Response(orjson.dumps(record), status, media_type="application/json")


async def _handle_request_error(request: Request, error: RequestError) -> Response:
    response = _make_json_response({"error": str(error)[:_MAX_ERROR_LENGTH]}, error.status)
    if isinstance(error, _UnreadBodyError):  # the rest would be parsed as another request
        response.headers["connection"] = "close"
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.status == 405:
        response.headers["allow"] = "POST"
    return response


async def _handle_http_error(request: Request, error: HTTPException) -> Response:
    target = f"{request.method} {quote(request.scope['path'])}"
    return _make_json_response(
        {"error": f"There is nothing at {target}: {error.detail}."}, error.status_code
    )


async def _handle_server_error(request: Request, error: Exception) -> Response:
    reason = f"The server failed: {type(error).__name__}: {error}"
    return _make_json_response({"error": reason[:_MAX_ERROR_LENGTH]}, 500)
