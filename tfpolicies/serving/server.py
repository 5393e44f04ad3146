"""A process that serves policies by HTTP and gRPC until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import uvicorn
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

from tfpolicies.errors import UsageError
from tfpolicies.serving.repository import Repository
from tfpolicies.serving.rest import application
from tfpolicies.serving.rpc import Rpc

_GRACE = 30.0  # seconds that running requests have when the server ends
_SWITCH = 0.0001  # seconds after which a thread lets another one run
_BACKLOG = 2048
_GARBAGE = 20_000  # objects made before the youngest are searched for garbage
_OLDER = 20, 20  # such searches before those that lived longer are searched, too
_OWN = ("127.0.0.1", "localhost", "::1")


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
    say: Callable[[str], object] = print,
) -> None:
    """Serves until SIGTERM or SIGINT; then finishes what runs, and returns.

    Args:
        repository: the models.
        address: where to listen.
        say: is told, in a line each, where the server listens and what it serves.

    Raises:
        UsageError: if a port is taken, or the host is none of this computer.
        ExportError: if a model cannot be loaded.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sys.setswitchinterval(_SWITCH)
    listening = _listening(address)
    rpc, rpc_port = _rpc(repository, address)
    async with repository.running():
        http = _Http(_config(repository))
        serving = loop.create_task(http.serve([listening]))
        await rpc.start()
        _leave_to_rest()
        say(f"HTTP at http://{address.host}:{listening.getsockname()[1]}")
        say(f"gRPC at {address.host}:{rpc_port}")
        if address.host not in _OWN:
            say("Others reach these addresses, too, and nobody is asked who they are.")
        stopping = loop.create_task(stop.wait())
        await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
        http.should_exit = True
        await asyncio.gather(serving, rpc.stop(_GRACE))


def run(repository: Repository, address: Address, say: Callable[[str], object] = print) -> None:
    """Serves in this process, by the fastest event loop that is installed; see `serve`."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(repository, address, say))
    else:
        uvloop.run(serve(repository, address, say))


def _leave_to_rest() -> None:
    """Spares what was loaded the search for garbage, which stops all requests; makes it rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE, *_OLDER)


def _config(repository: Repository) -> uvicorn.Config:
    return uvicorn.Config(
        application(repository),
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


def _rpc(repository: Repository, address: Address) -> tuple[Any, int]:
    most = repository.limits.max_body
    options = [
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options)
    add_GRPCInferenceServiceServicer_to_server(Rpc(repository), server)
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
