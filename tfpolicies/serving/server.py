"""Serves policies over HTTP and gRPC until a signal arrives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import grpc
import uvicorn
from starlette.types import ASGIApp

from tfpolicies.errors import ExportError, UsageError
from tfpolicies.serving.access import AccessRules, is_loopback
from tfpolicies.serving.connections import (
    ConnectionLimiter,
    HttpConnection,
    accept_tls,
    get_connection_limit,
    refuse_new_connections,
)
from tfpolicies.serving.grpc_service import GrpcHandler
from tfpolicies.serving.repository import ModelRepository
from tfpolicies.serving.rest import make_app
from tfpolicies.serving.server_log import AccessLogEntry
from tfpolicies.serving.shutdown import GRACE_SECONDS, Shutdown
from tfpolicies.serving.tls import TlsCredentials
from tfpolicies.system.signal_handling import SignalInterrupt

_SWITCH_INTERVAL = 0.0001  # thread switch interval of the interpreter, in seconds
_BACKLOG = 2048
_GC_THRESHOLD = 20_000  # threshold of the garbage collector's youngest generation
_GC_OLDER_THRESHOLDS = 20, 20  # thresholds of its older generations
_MAX_GRPC_STREAMS = 100  # simultaneous calls of one gRPC connection
_IDLE_SECONDS = 600  # after which an idle gRPC connection is closed
_HANDSHAKE_SECONDS = 20
_CONNECTING_SECONDS = 0.1  # time to accept connections that were made just before the end
_ACCEPT_LOOP_TURNS = 3  # turns of the event loop in which pending connections are accepted
DRAIN_SECONDS = 5.0
"""Default of `--drain-seconds`."""


class ServerAddress(NamedTuple):
    """Host and ports of a server; port 0 is any free one."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001


class _HttpServer(uvicorn.Server):
    """uvicorn's server, without signal handlers, and without losing connections when it stops."""

    def __init__(
        self,
        config: uvicorn.Config,
        connections: ConnectionLimiter,
        listener: socket.socket,
        tls: TlsCredentials | None,
    ) -> None:
        super().__init__(config)
        self._connections, self._listener, self._tls = connections, listener, tls
        self._accepting: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening; with TLS, accepts connections here, so that handshakes are counted."""
        if self._tls is None:
            await super().startup([self._listener])
            return
        await super().startup([])
        accepting = accept_tls(
            self._listener, self._connections, self._make_connection, self._tls.context
        )
        self._accepting = asyncio.get_running_loop().create_task(accepting)

    def _make_connection(self) -> HttpConnection:
        connection: HttpConnection = self.config.http_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops after accepting all connections that clients have opened.

        The kernel would reset them when their socket closes, so new ones are refused first.
        """
        refuse_new_connections(self._listener)
        await asyncio.sleep(_CONNECTING_SECONDS)
        for _ in range(_ACCEPT_LOOP_TURNS):  # the loop may have been blocked during the sleep
            await asyncio.sleep(0)
        if self._accepting is not None:
            self._accepting.cancel()
        await super().shutdown([self._listener])


async def serve(
    repository: ModelRepository,
    address: ServerAddress,
    access: AccessRules | None = None,
    log: Callable[[str], object] = print,
    *,
    drain_seconds: float = DRAIN_SECONDS,
    tls: TlsCredentials | None = None,
    record: Callable[[AccessLogEntry], object] | None = None,
) -> int | None:
    """Serves until SIGTERM or SIGINT; then finishes running requests, and returns.

    Args:
        repository: the models.
        address: host and ports.
        access: the access rules; None for the defaults of the host.
        log: called with log lines: the addresses, and the beginning of draining.
        drain_seconds: how long it keeps answering after SIGTERM while it is not ready.
        record: called with each request that was answered or refused; None for none.
        tls: a certificate, to encrypt both protocols; None for clear text.

    Returns:
        The number of a second signal, which ended it without finishing; None if there was none.

    Raises:
        UsageError: if a port is in use, or the host is not an address of this computer.
        ExportError: if a model cannot be loaded.
    """
    access = access or AccessRules(address.host)
    limit = get_connection_limit()
    connections = ConnectionLimiter(limit, record)
    shutdown = Shutdown(repository, connections, drain_seconds, log)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.begin, number)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    listener = _make_listener(address)
    handler = GrpcHandler(repository, access, record)
    grpc_server, grpc_port = _make_grpc_server(
        handler, repository.limits.max_body, address, limit, tls
    )
    try:
        async with repository.run():
            shutdown.is_loaded = True
            config = _make_uvicorn_config(make_app(repository, access, record=record), connections)
            http = _HttpServer(config, connections, listener, tls)
            serving = loop.create_task(http.serve())
            watching = loop.create_task(connections.close_late_connections())
            await grpc_server.start()
            _tune_garbage_collector()
            scheme, with_tls = ("https", ", with TLS") if tls else ("http", "")
            log(f"HTTP at {scheme}://{address.host}:{listener.getsockname()[1]}")
            log(f"gRPC at {address.host}:{grpc_port}{with_tls}")
            if not (is_loopback(address.host) or access.requires_token):
                log("Other computers can use these addresses without a token (see --token-file).")
            stopping = loop.create_task(shutdown.stopping.wait())
            await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
            http.should_exit = True
            finishing: asyncio.Future[Any] = asyncio.gather(
                serving, handler.stop(grpc_server, GRACE_SECONDS)
            )
            aborting: asyncio.Future[Any] = loop.create_task(shutdown.aborting.wait())
            await asyncio.wait([finishing, aborting], return_when=asyncio.FIRST_COMPLETED)
            if shutdown.aborting.is_set():
                http.force_exit = True
                await grpc_server.stop(None)
            await finishing
            watching.cancel()
    except ExportError:
        if not shutdown.stopping.is_set():  # otherwise a signal ended the loading
            raise
    return shutdown.aborted_by


def run(*args: Any, **settings: Any) -> None:
    """Serves in this process, with uvloop if it is installed.

    Args:
        *args: of `serve`.
        **settings: of `serve`.
    """
    try:
        from uvloop import run as run_loop
    except ImportError:
        run_loop = asyncio.run
    number = run_loop(serve(*args, **settings))
    if number is not None:
        raise SignalInterrupt(number)


def _tune_garbage_collector() -> None:
    """Excludes loaded objects from garbage collection, which blocks all requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *_GC_OLDER_THRESHOLDS)


def _make_uvicorn_config(app: ASGIApp, connections: ConnectionLimiter) -> uvicorn.Config:
    disabled: dict[str, Any] = {"access_log": False, "server_header": False, "proxy_headers": False}
    disabled |= {"lifespan": "off", "ws": "none"}
    timeouts = {"timeout_graceful_shutdown": int(GRACE_SECONDS), "timeout_keep_alive": 75}
    http = partial(HttpConnection, connections)
    return uvicorn.Config(app, http=http, log_level="error", **disabled, **timeouts)


def _make_listener(address: ServerAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server(
            (address.host, address.port), family=family, backlog=_BACKLOG
        )
    except OSError as error:
        raise _make_address_error(address.host, address.port, "--port") from error
    listener.setblocking(False)
    return listener


def _make_grpc_server(
    handler: GrpcHandler,
    max_body: int,
    address: ServerAddress,
    max_connections: int,
    tls: TlsCredentials | None,
) -> tuple[Any, int]:
    options = [
        ("grpc.max_receive_message_length", max_body),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.bdp_probe", 0),  # otherwise a call may send megabytes before it is read
        ("grpc.max_concurrent_streams", _MAX_GRPC_STREAMS),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", 1000 * _IDLE_SECONDS),
        ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_SECONDS),
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((handler,))
    host = f"[{address.host}]" if ":" in address.host else address.host
    target = f"{host}:{address.grpc_port}"
    try:
        if tls is None:
            return server, server.add_insecure_port(target)
        credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)])
        return server, server.add_secure_port(target, credentials)
    except RuntimeError as error:
        raise _make_address_error(address.host, address.grpc_port, "--grpc-port") from error


def _make_address_error(host: str, port: int, option: str) -> UsageError:
    return UsageError(
        f"The server cannot listen at {host}:{port}. The port is in use, or this computer has no "
        f"such address. Give another {option}; 0 chooses a free one."
    )
