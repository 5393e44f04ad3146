"""The Open Inference Protocol over HTTP, as an ASGI application."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
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
from tfpolicies.serving.texts import quote

_JSON_LENGTH = JSON_LENGTH.encode()
_PATIENCE, _SLOWEST = 60.0, 10_000  # seconds that a body may take, and bytes of one second more
_LONGEST = 2000  # characters of an error
LARGE = 1_000_000
"""Bytes of a request above which it is parsed in another thread."""

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


def application(
    repository: Repository,
    access: Access | None = None,
    *,
    loads: bool = False,
    record: Callable[[AnsweredRequest], object] | None = None,
) -> ASGIApp:
    """Returns an application that answers for the models of a repository.

    Args:
        repository: the models.
        access: who may ask; None for all, without control of the models.
        loads: whether it loads the models when it starts, and watches them while it runs.
        record: is called with each request that was answered; None for none.
    """
    bodies = _Bodies(repository)
    rest = _Rest(repository, bodies, access or Access("0.0.0.0"))
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
    app: ASGIApp = _Inference(repository, bodies, others, access)
    if access is not None and access.origins:
        app = CORSMiddleware(app, access.origins, allow_methods=["*"], allow_headers=["*"])
    return app if record is None else _Recorded(app, record)


class _Recorded:
    """An application whose requests are recorded once they are answered."""

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
            seconds, now = time.perf_counter() - began, time.time()
            sent, status = ("http", client, scope["method"], path, ""), scope.get(REFUSED, status)
            self._record(AnsweredRequest(*sent, status, seconds, size, now))


_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer/?")


class _Inference:
    """Answers requests for actions, and hands all others to an application with routes.

    Routes, middleware and request objects take as long as a small policy.
    """

    def __init__(
        self, repository: Repository, bodies: _Bodies, others: ASGIApp, access: Access | None
    ) -> None:
        self._repository, self._bodies, self._others = repository, bodies, others
        self._access, self._most = access, repository.limits.max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        asked, headers = _INFER.fullmatch(path), dict(scope["headers"])
        try:
            if self._access is not None:
                _admit(self._access, path, headers)
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
        """Returns the headers and the body of an answer."""
        if method != "POST":
            raise RequestError(f"Actions are asked for by POST, got {method}.", 405)
        name, metrics = asked["model"], self._repository.metrics
        model = self._repository[name]
        with metrics.measure(name, "http", gone=ClientDisconnect):
            with self._repository.arrivals.begin() as arrival:
                content = await self._bodies.read(headers, receive, arrival)
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


def _admit(access: Access, path: str, headers: Mapping[bytes, bytes]) -> None:
    try:
        access.check_http(path, headers)
    except RequestError as error:
        raise _UnreadBodyError(str(error), error.status) from error


class _Bodies:
    """Reads the bodies of requests; those that have not arrived whole share a limit."""

    def __init__(self, repository: Repository) -> None:
        self._most = repository.limits.max_body

    async def read(
        self, headers: Mapping[bytes, bytes], receive: Receive, arrival: Arrival
    ) -> bytes:
        """Returns the body of a request.

        Args:
            headers: of the request.
            receive: gives the parts of the body.
            arrival: counts its bytes, if it does not come in one part or is large.

        Raises:
            RequestError: if it is compressed, too large or too slow, or gives way to others.
            ClientDisconnect: if the client hangs up before its end.
        """
        if b"content-encoding" in headers:
            told = "The body must not be compressed: send no Content-Encoding."
            raise _UnreadBodyError(told, 415)
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and (len(declared) > DIGITS or int(declared) > self._most):
            raise self._too_large(declared[:DIGITS].decode())
        message = await receive()  # before anything came, waiting costs no memory
        if not message.get("more_body", False) and message["type"] == "http.request":
            body: bytes = message.get("body", b"")
            if len(body) <= min(LARGE, self._most):
                return body
        until = time.monotonic() + _PATIENCE
        gives_way = asyncio.get_running_loop().create_future()
        arrival.give_up = gives_way.cancel
        parts: list[bytes] = []
        size = 0
        while message["type"] != "http.disconnect":
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_large("more")
            is_whole = not message.get("more_body", False)
            if size > SMALL:
                _count(arrival, size)
            if is_whole:
                arrival.can_give_way = False
                return b"".join(parts)
            message = await _next_part(receive, until + size / _SLOWEST, gives_way)
        raise ClientDisconnect

    def _too_large(self, size: str) -> RequestError:
        told = f"The body may have {self._most} bytes (--max-body), got {size}."
        return _UnreadBodyError(told, 413)


def _count(arrival: Arrival, size: int) -> None:
    try:
        arrival.grow(size - arrival.size)
    except RequestError as error:
        raise _UnreadBodyError(str(error), error.status) from error


async def _next_part(receive: Receive, until: float, gives_way: asyncio.Future[None]) -> Message:
    """Returns another part of a body that has begun.

    Raises:
        RequestError: if it has not come at that time, or is to give way to others.
    """
    part = asyncio.ensure_future(receive())
    try:
        await asyncio.wait(
            {part, gives_way},
            timeout=until - time.monotonic(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if gives_way.done():
            raise _UnreadBodyError(
                "The body was the largest of those that have not arrived whole, and others need "
                "its memory. Try again later.",
                503,
            )
        if not part.done():
            raise _UnreadBodyError(
                f"The body is incomplete. It may take {_PATIENCE:.0f} seconds, and one more for "
                f"each {_SLOWEST} bytes.",
                408,
            )
        return part.result()
    finally:
        part.cancel()


class _Rest:
    def __init__(self, repository: Repository, bodies: _Bodies, access: Access) -> None:
        self._repository, self._bodies, self._access = repository, bodies, access

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
            headers = dict(request.scope["headers"])
            body = await self._bodies.read(headers, request.receive, arrival)
        if len(body) > SMALL:
            raise RequestError(f"The body may have {SMALL} bytes here, got {len(body)}.", 413)
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

    def _model(self, request: Request) -> Any:
        model = self._repository[request.path_params["model"]]
        model.require_version(request.path_params.get("version", ""))
        return model


def _json(record: Mapping[str, Any] | Sequence[Mapping[str, Any]], status: int = 200) -> Response:
    return Response(orjson.dumps(record), status, media_type="application/json")


async def _refused(request: Request, error: RequestError) -> Response:
    response = _json({"error": str(error)[:_LONGEST]}, error.status)
    if isinstance(error, _UnreadBodyError):  # what comes cannot be told from another request
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
