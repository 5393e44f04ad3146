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
from tfpolicies.serving.access import Access
from tfpolicies.serving.arrivals import SMALL, Arrival
from tfpolicies.serving.logs import REFUSED, AnsweredRequest
from tfpolicies.serving.metrics import GONE
from tfpolicies.serving.repository import Repository
from tfpolicies.serving.rest_tensors import DIGITS, JSON_LENGTH, read, written
from tfpolicies.serving.served import ServedModel
from tfpolicies.serving.texts import quote

_JSON_LENGTH = JSON_LENGTH.encode()
_PATIENCE, _SLOWEST = 60.0, 10_000  # a body may take 60 s, and a second more per 10,000 bytes
_LONGEST = 2000  # characters of an error
LARGE = 1_000_000
"""Size in bytes above which a request is parsed in another thread."""

_EXTENSIONS = "binary_tensor_data model_configuration model_repository parameters sequence"
SERVER = {"name": "tfpolicies", "version": __version__, "extensions": _EXTENSIONS.split()}
"""The protocol's metadata of this server."""


def application(
    repository: Repository,
    access: Access | None = None,
    *,
    loads: bool = False,
    record: Callable[[AnsweredRequest], object] | None = None,
) -> ASGIApp:
    """Returns an ASGI application for the models of a repository.

    Args:
        repository: the models.
        access: the access rules; None to accept all requests, without control of the models.
        manage_models: whether it loads the models when it starts, and checks for new versions while it
        runs.
        record: called with each answered request; None for none.
    """
    rest = _Rest(repository, access or Access("0.0.0.0"))
    model = "/v2/models/{model}"
    versions = ("", "/versions/{version}")
    routes = [
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
    others = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app: ASGIApp = _Inference(repository, others, access)
    if access is not None and access.origins:
        app = CORSMiddleware(app, access.origins, allow_methods=["*"], allow_headers=["*"])
    return app if record is None else _Recorded(app, record)


class _Recorded:
    """An application whose requests are logged after their response."""

    def __init__(self, app: ASGIApp, record: Callable[[AnsweredRequest], object]) -> None:
        self._app, self._record = app, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, size = time.perf_counter(), GONE, 0

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
            sent, status = ("http", client, scope["method"], path, ""), scope.get(REFUSED, status)
            seconds = time.perf_counter() - began
            self._record(AnsweredRequest(*sent, status, seconds, size, time.time()))


_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer/?")


class _Inference:
    """Answers requests for actions, and passes all others to an application with routes.

    Routing, middleware and request objects would take as long as a small policy.
    """

    def __init__(self, repository: Repository, others: ASGIApp, access: Access | None) -> None:
        self._repository, self._others, self._access = repository, others, access
        self._most = repository.limits.max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        asked, headers = _INFER.fullmatch(path), dict(scope["headers"])
        try:
            if self._access is not None:
                with _body_is_unread():
                    self._access.check_http(path, headers)
            if asked is not None:
                headers, body = await self._infer(scope["method"], headers, asked, receive)
        except ClientDisconnect:
            pass
        except RequestError as error:
            response = await _refused(Request(scope), error)
            await response(scope, receive, send)
        except Exception as error:
            response = await _broken(Request(scope), error)
            await response(scope, receive, send)
            raise
        else:
            if asked is None:
                await self._others(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _infer(
        self, method: str, headers: dict[bytes, bytes], asked: re.Match[str], receive: Receive
    ) -> Any:
        """Returns the headers and the body of a response."""
        if method != "POST":
            raise RequestError(f"Requests for actions must use POST, got {method}.", 405)
        name, metrics = asked["model"], self._repository.metrics
        model = self._repository[name]
        with metrics.measure(name, "http", gone=ClientDisconnect):
            with self._repository.arrivals.begin() as arrival:
                content = await _read_body(headers, receive, arrival, self._most)
                parsing = headers.get(_JSON_LENGTH), asked["version"] or "", self._most
                if len(content) <= LARGE:
                    request = read(content, *parsing)
                else:
                    request = await self._repository.parse(read, content, *parsing)
            body, length = written(name, request, await model.infer(request.call))
        found = [(b"content-length", b"%d" % len(body))]
        if length is None:
            return [*found, (b"content-type", b"application/json")], body
        found.append((_JSON_LENGTH, b"%d" % length))
        return [*found, (b"content-type", b"application/octet-stream")], body


class _UnreadBodyError(RequestError):
    """The body of a request was not read to its end."""


@contextlib.contextmanager
def _body_is_unread() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise _UnreadBodyError(str(error), error.status) from error


async def _read_body(
    headers: Mapping[bytes, bytes], receive: Receive, arrival: Arrival, most: int
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
    with _body_is_unread():
        if b"content-encoding" in headers:
            told = "The body must not be compressed: send no Content-Encoding."
            raise RequestError(told, 415)
        if declared.isdigit() and (len(declared) > DIGITS or int(declared) > most):
            raise _too_large(declared[:DIGITS].decode(), most)
        message = await receive()  # before the first bytes, waiting needs no memory
        if not message.get("more_body", False) and message["type"] == "http.request":
            body: bytes = message.get("body", b"")
            if len(body) <= min(LARGE, most):
                return body
        return await _read_parts(message, receive, arrival, most)


async def _read_parts(first: Message, receive: Receive, arrival: Arrival, most: int) -> bytes:
    """Returns a body of several parts, or a large one."""
    message, until = first, time.monotonic() + _PATIENCE
    gives_way = asyncio.get_running_loop().create_future()
    arrival.give_up = gives_way.cancel
    parts: list[bytes] = []
    size = 0
    while message["type"] != "http.disconnect":
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise _too_large("more", most)
        if size > SMALL:
            arrival.grow(size - arrival.size)
        if not message.get("more_body", False):
            arrival.can_give_way = False
            return b"".join(parts)
        message = await _next_part(receive, until + size / _SLOWEST, gives_way)
    raise ClientDisconnect


def _too_large(size: str, most: int) -> RequestError:
    return RequestError(f"The body may have at most {most} bytes (--max-body), got {size}.", 413)


async def _next_part(receive: Receive, until: float, gives_way: asyncio.Future[None]) -> Message:
    """Returns the next part of a body.

    Raises:
        RequestError: if it has not arrived at that time, or is aborted for others.
    """
    part = asyncio.ensure_future(receive())
    try:
        await asyncio.wait(
            {part, gives_way},
            timeout=until - time.monotonic(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if gives_way.done():
            raise RequestError(
                "The body was the largest incomplete one, and other requests need its memory. Try "
                "again later.",
                503,
            )
        if not part.done():
            raise RequestError(
                f"The body is incomplete. It may take {_PATIENCE:.0f} seconds, and one more for "
                f"each {_SLOWEST} bytes.",
                408,
            )
        return part.result()
    finally:
        part.cancel()


class _Rest:
    def __init__(self, repository: Repository, access: Access) -> None:
        self._repository, self._access = repository, access

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
        with self._repository.arrivals.begin() as arrival:
            headers, most = dict(request.scope["headers"]), self._repository.limits.max_body
            body = await _read_body(headers, request.receive, arrival, most)
        if len(body) > SMALL:
            raise RequestError(f"The body may have at most {SMALL} bytes, got {len(body)}.", 413)
        try:
            asked = orjson.loads(body or b"{}")
        except orjson.JSONDecodeError as error:
            raise RequestError(f"The body is not JSON: {error}.") from error
        only_ready = isinstance(asked, dict) and asked.get("ready") is True
        return _json(self._repository.index(ready=only_ready))

    async def load(self, request: Request) -> Response:
        self._access.require_control()
        await self._repository[request.path_params["model"]].load()
        return _json({})

    async def unload(self, request: Request) -> Response:
        self._access.require_control()
        self._repository[request.path_params["model"]].unload()
        return _json({})

    async def metrics(self, request: Request) -> Response:
        return Response(self._repository.metrics.text(), media_type="text/plain; version=0.0.4")

    def _model(self, request: Request) -> ServedModel:
        parameters = request.path_params
        return self._repository.find(parameters["model"], parameters.get("version", ""))


def _json(record: Mapping[str, Any] | Sequence[Mapping[str, Any]], status: int = 200) -> Response:
    return Response(orjson.dumps(record), status, media_type="application/json")


async def _refused(request: Request, error: RequestError) -> Response:
    response = _json({"error": str(error)[:_LONGEST]}, error.status)
    if isinstance(error, _UnreadBodyError):  # the rest would be parsed as another request
        response.headers["connection"] = "close"
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.status == 405:
        response.headers["allow"] = "POST"
    return response


async def _no_such_address(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {quote(request.scope['path'])}"
    return _json({"error": f"There is nothing at {what}: {error.detail}."}, error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    reason = f"The server failed: {type(error).__name__}: {error}"
    return _json({"error": reason[:_LONGEST]}, 500)
