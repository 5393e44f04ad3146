"""A process that serves policies by HTTP and gRPC until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import grpc
import uvicorn

from tfpolicies.errors import ExportError, UsageError
from tfpolicies.serving.access import Access, is_loopback
from tfpolicies.serving.connections import Connection, Connections, get_connection_limit
from tfpolicies.serving.repository import Repository
from tfpolicies.serving.rest import application
from tfpolicies.serving.rpc import Rpc

_GRACE = 30.0  # seconds that running requests have when the server ends
_SWITCH = 0.0001  # seconds after which a thread lets another one run
_LATEST_END = 10.0  # seconds more, after which the process ends whatever still runs
_BACKLOG = 2048
_GARBAGE = 20_000  # objects made before the youngest are searched for garbage
_OLDER = 20, 20  # such searches before those that lived longer are searched, too
_MOST_CALLS = 100  # of one connection of gRPC at once
_IDLE_SECONDS = 600  # after which a connection of gRPC without calls is closed
_HANDSHAKE_SECONDS = 20


class Address(NamedTuple):
    """Where a server listens; the port 0 is any that is free."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001


class _Http(uvicorn.Server):
    """uvicorn's server, where signals are left to others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    repository: Repository,
    address: Address,
    access: Access | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Serves until SIGTERM or SIGINT; then finishes what runs, and returns.

    Args:
        repository: the models.
        address: where to listen.
        access: who may ask; None for what is usual where the server listens.
        say: is told, in a line each, where the server listens and what it serves.

    Raises:
        UsageError: if a port is taken, or the host is none of this computer.
        ExportError: if a model cannot be loaded.
    """
    access = access or Access(address.host)
    end = _End(repository)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.begin)
    sys.setswitchinterval(_SWITCH)
    listening = _listening(address)
    limit = get_connection_limit()
    rpc, rpc_port = _rpc(repository, address, access, limit)
    connections = Connections(limit)
    try:
        async with repository.running():
            end.is_loaded = True
            http = _Http(_config(repository, access, connections))
            serving = loop.create_task(http.serve([listening]))
            watching = loop.create_task(connections.watch())
            await rpc.start()
            _leave_to_rest()
            say(f"HTTP at http://{address.host}:{listening.getsockname()[1]}")
            say(f"gRPC at {address.host}:{rpc_port}")
            if not (is_loopback(address.host) or access.asks_for_token):
                say("Others can reach these addresses, and need no token (see --token-file).")
            stopping = loop.create_task(end.event.wait())
            await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
            http.should_exit = True
            await asyncio.gather(serving, rpc.stop(_GRACE))
            watching.cancel()
    except ExportError:
        if not end.event.is_set():  # else the load was ended
            raise


def run(
    repository: Repository,
    address: Address,
    access: Access | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Serves in this process, by the fastest event loop that is installed; see `serve`."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(repository, address, access, say))
    else:
        uvloop.run(serve(repository, address, access, say))


class _End:
    """The end of a server, which a signal begins and which takes a bounded time.

    Attributes:
        event: set once it has begun.
        is_loaded: whether the models are loaded; before, loading is ended.

    Args:
        repository: the models.
    """

    def __init__(self, repository: Repository) -> None:
        self.event, self.is_loaded = asyncio.Event(), False
        self._repository = repository

    def begin(self) -> None:
        """Lets the server finish what runs; later, what does not come to an end is left."""
        self.event.set()
        if not self.is_loaded:
            self._repository.time_limits.stop()
        latest = threading.Timer(_GRACE + _LATEST_END, os._exit, [1])
        latest.daemon = True
        latest.start()


def _leave_to_rest() -> None:
    """Spares what was loaded the search for garbage, which stops all requests; makes it rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE, *_OLDER)


def _config(repository: Repository, access: Access, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        application(repository, access),
        http=partial(Connection, connections),
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=int(_GRACE),
        timeout_keep_alive=75,
    )


def _listening(address: Address) -> socket.socket:
    """Returns a socket that listens where HTTP is spoken."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        found = socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise _not_there(address.host, address.port, "--port") from error
    found.setblocking(False)
    return found


def _rpc(
    repository: Repository, address: Address, access: Access, connections: int
) -> tuple[Any, int]:
    options = [
        ("grpc.max_receive_message_length", repository.limits.max_body),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.bdp_probe", 0),  # else a call may send megabytes before it is read
        ("grpc.max_concurrent_streams", _MOST_CALLS),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", 1000 * _IDLE_SECONDS),
        ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_SECONDS),
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((Rpc(repository, access),))
    host = f"[{address.host}]" if ":" in address.host else address.host
    try:
        return server, server.add_insecure_port(f"{host}:{address.grpc_port}")
    except RuntimeError as error:
        raise _not_there(address.host, address.grpc_port, "--grpc-port") from error


def _not_there(host: str, port: int, option: str) -> UsageError:
    return UsageError(
        f"The server cannot listen at {host}:{port}. The port is taken, or this computer has no "
        f"such address. Give another {option}; 0 picks a free one."
    )
