"""HTTP connections, with limits on their number, waiting time and header size."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tfpolicies.serving.server_log import REFUSED_STATUS_KEY, AccessLogEntry

_MAX_HEAD_BYTES = 65_536  # bytes of a URL, or of all headers
_HEAD_SECONDS = 20.0  # time limit for complete headers
_BODY_SECONDS = 60.0  # time limit between two parts of a body
_IDLE_SECONDS = 200.0  # from a request to the next one; uvicorn's limit counts from the response
_CLOSING_SECONDS = 10.0  # time limit for a client to read its last response
_STOPPING_SECONDS = 1.0  # how long connections without a request stay open when the server stops
_ACCEPT_RETRY_SECONDS = 0.1  # pause after a connection could not be accepted
_CHECK_SECONDS = 1.0  # seconds between two checks of all connections
_RESERVED_DESCRIPTORS = 64  # descriptors reserved for models' files, gRPC and others
_MAX_CONNECTIONS, _MIN_CONNECTIONS = 4096, 4  # connections, for any number of descriptors

_SO_ATTACH_FILTER = 26  # of Linux; `socket` has no name for it
_DROP_SYN = (  # instructions of BPF: code, jumps if true and false, operand
    (0x30, 0, 0, 13),  # load the byte with the flags of TCP
    (0x45, 0, 1, 0x02),  # is SYN set, which opens a connection?
    (0x06, 0, 0, 0),  # then drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # else accept all of it
)

_ERROR_MESSAGES = {
    400: "Invalid HTTP request received.",
    408: "The request did not arrive in time.",
    414: f"The URL may have at most {_MAX_HEAD_BYTES} bytes.",
    431: f"The headers may have at most {_MAX_HEAD_BYTES} bytes.",
}


def get_connection_limit() -> int:
    """Returns how many connections HTTP and gRPC may have each, given the free file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    folder = Path("/proc/self/fd")
    # Reading the folder opens one more for a moment.
    num_open = len([*folder.iterdir()]) - 1 if folder.exists() else _RESERVED_DESCRIPTORS
    return min(
        _MAX_CONNECTIONS, max(_MIN_CONNECTIONS, (soft - num_open - _RESERVED_DESCRIPTORS) // 2)
    )


def refuse_new_connections(listener: socket.socket) -> None:
    """Makes the kernel drop new connection attempts; those that have begun may complete.

    Clients retry after a second, when the socket is closed, and are refused. Only Linux has such
    filters; elsewhere this does nothing.
    """
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in _DROP_SYN)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HP", len(_DROP_SYN), ctypes.addressof(buffer))
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid them
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


class ConnectionLimiter:
    """All HTTP connections, with limits in total and per address.

    Attributes:
        is_draining: whether each connection closes after its next response, whose headers say so.
        is_stopping: whether idle connections close soon.

    Args:
        max_connections: connections in total; one address may have three quarters of them.
        record: called with each request that is refused before it is read; None for none.
    """

    def __init__(
        self, max_connections: int, record: Callable[[AccessLogEntry], object] | None = None
    ) -> None:
        self._record = record
        self._max_connections, self._max_per_address = (
            max_connections,
            max_connections - max_connections // 4,
        )
        self.is_draining = self.is_stopping = False
        self._connections: dict[HttpConnection | TlsHandshake, None] = {}  # the oldest first
        self._count_by_address: Counter[str] = Counter()

    def add(self, connection: HttpConnection | TlsHandshake) -> None:
        """Registers a connection; if there are too many, closes one that waits for its client."""
        address = connection.address
        if self._count_by_address[address] >= self._max_per_address:
            self._close_waiting([x for x in self._connections if x.address == address])
        elif len(self._connections) >= self._max_connections:
            self._close_waiting([*self._connections])
        if (
            self._count_by_address[address] >= self._max_per_address
            or len(self._connections) >= self._max_connections
        ):
            connection.abort()
            return
        self._connections[connection] = None
        self._count_by_address[address] += 1

    def remove(self, connection: HttpConnection | TlsHandshake) -> None:
        if self._connections.pop(connection, connection) is None:
            self._count_by_address[connection.address] -= 1
            if not self._count_by_address[connection.address]:
                del self._count_by_address[connection.address]

    def record_refused(self, connection: HttpConnection, status: int) -> None:
        """Logs a request that is refused before it is read."""
        if self._record is not None:
            waited = time.monotonic() - connection.last_activity
            request = "http", connection.address, "", "", ""
            self._record(AccessLogEntry(*request, status, waited, 0, time.time()))

    def drain(self) -> None:
        """Makes each connection, including later ones, close after its next response."""
        self.is_draining = True
        for connection in self._connections:
            connection.close_after_response()

    def abort(self) -> None:
        for connection in [*self._connections]:
            connection.abort()

    def _close_waiting(self, connections: list[HttpConnection | TlsHandshake]) -> None:
        """Closes a waiting connection, preferably one that never sent a complete request."""
        waiting = [x for x in connections if x.is_waiting]
        if waiting:
            candidate = min(waiting, key=lambda x: (x.has_request, x.last_activity))
            candidate.abort()
            self.remove(candidate)

    async def close_late_connections(self) -> None:
        """Closes connections that wait for too long, until it is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = time.monotonic()
            for connection in [*self._connections]:
                connection.close_if_late(now)


class _RefusedError(Exception):
    """Aborts the parsing of a request."""


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection, with limits on time and size.

    Attributes:
        address: of the client.
        last_activity: when the client last sent expected data, in seconds of `time.monotonic`.
        handshake: the TLS handshake that it replaces when it is made; None without TLS.

    Args:
        connections: the registry of all connections.
        settings: of uvicorn.
    """

    def __init__(self, connections: ConnectionLimiter, **settings: object) -> None:
        super().__init__(**settings)
        self.url: bytes = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self._connections = connections
        self.address, self.last_activity = "", time.monotonic()
        self.handshake: TlsHandshake | None = None
        self._chunk_bytes = 0  # size of the data that is being parsed
        self._unparsed_bytes = 0  # bytes received since the last complete headers or part of a body
        self._is_body = False  # whether the data that is being parsed has a part of a body
        self._refusal_status = 400  # status if the parser refuses the request

    @property
    def has_request(self) -> bool:
        return self.cycle is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its client to send something."""
        return self._is_idle or self.cycle.more_body

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self.handshake is not None:
            self._connections.remove(self.handshake)
            self.handshake = None
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Closes it at once, discarding unsent data."""
        self.transport.abort()

    def close_after_response(self) -> None:
        """Closes it after the pending response, if there is one; its headers say so."""
        if not self._is_idle:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """Closes it when the server stops, unless a request is pending; see `close_if_late`."""
        if not self._is_idle:
            self.close_after_response()
        elif self.has_request and not self._unparsed_bytes:
            self.transport.close()

    def close_if_late(self, now: float) -> None:
        """Closes it if its client takes too long."""
        waited = now - self.last_activity
        if self.transport.is_closing():
            if waited > _CLOSING_SECONDS:
                self.abort()
        elif not self._is_idle:
            if waited > _BODY_SECONDS and self.cycle.more_body:
                self._refuse(408)
            elif waited > _BODY_SECONDS and self.flow.write_paused:
                self.abort()
        elif self.cycle is None or self._unparsed_bytes:
            if waited > _HEAD_SECONDS:
                self._refuse(408)
            elif (
                self._connections.is_stopping
                and not self._unparsed_bytes
                and waited > _STOPPING_SECONDS
            ):
                self.transport.close()
        elif waited > _IDLE_SECONDS:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        previous_cycle, self._is_body, self._chunk_bytes = self.cycle, False, len(data)
        super().data_received(data)
        if self._is_body or self.cycle is not previous_cycle:
            self._unparsed_bytes, self.last_activity = 0, time.monotonic()
            return
        if not self._unparsed_bytes and previous_cycle is not None:
            self.last_activity = time.monotonic()
        self._unparsed_bytes += self._chunk_bytes
        if self._unparsed_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            in_url = not self.headers and len(self.url) > _MAX_HEAD_BYTES // 2
            self._refuse(414 if in_url else 431)

    def on_headers_complete(self) -> None:
        if self._unparsed_bytes + self._chunk_bytes > _MAX_HEAD_BYTES:
            self._require_short_head()
        super().on_headers_complete()
        if self._connections.is_draining:
            self.close_after_response()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._is_body = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal_status)

    def _require_short_head(self) -> None:
        if len(self.url) > _MAX_HEAD_BYTES:
            self._refusal_status = 414
            raise _RefusedError
        if sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEAD_BYTES:
            self._refusal_status = 431
            raise _RefusedError

    def _refuse(self, status: int) -> None:
        """Sends an error response, unless a response has begun; closes."""
        if self._is_idle or not self.cycle.response_started:
            body = f'{{"error":"{_ERROR_MESSAGES[status]}"}}'.encode()
            lines = [
                STATUS_LINE[status].rstrip(),
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"connection: close",
            ]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
            if self._is_idle:
                self._connections.record_refused(self, status)
            else:  # the application records it when it notices
                self.cycle.scope[REFUSED_STATUS_KEY] = status
        self.last_activity = time.monotonic()
        self.transport.close()


class TlsHandshake:
    """A connection during its TLS handshake; a `Connection` replaces it afterwards.

    It counts as a waiting connection. (asyncio's servers report connections only after the
    handshake, so clients that never complete it could use up all descriptors.)

    Attributes:
        address: of the client.
        last_activity: when it was made, in seconds of `time.monotonic`.
        has_request: False.
        is_waiting: True.

    Args:
        client_socket: its socket.
        address: of the client.
    """

    has_request, is_waiting = False, True

    def __init__(self, client_socket: socket.socket, address: str) -> None:
        self.address, self.last_activity = address, time.monotonic()
        self._client_socket = client_socket

    async def complete(
        self, make_connection: Callable[[], HttpConnection], context: ssl.SSLContext
    ) -> None:
        """Replaces it by a connection, or closes it if the client does not speak TLS."""
        connection = make_connection()
        connection.handshake = self
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                self._client_socket,
                ssl=context,
                ssl_handshake_timeout=_HEAD_SECONDS,
            )

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._client_socket.shutdown(socket.SHUT_RDWR)

    def close_after_response(self) -> None:
        """No-op: there is no pending response."""

    def close_if_late(self, now: float) -> None:
        """No-op: a handshake has its own time limit."""


async def accept_tls(
    listener: socket.socket,
    connections: ConnectionLimiter,
    make_connection: Callable[[], HttpConnection],
    context: ssl.SSLContext,
) -> None:
    """Accepts connections with TLS until it is cancelled.

    Args:
        listener: a listening socket.
        connections: counts connections from the beginning of their handshake.
        make_connection: returns the protocol for a connection after its handshake.
        context: a certificate and its key.
    """
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    while True:
        try:
            client_socket, (address, *_) = await loop.sock_accept(listener)
        except OSError:  # the client has disconnected, or there are no descriptors
            await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
            continue
        handshake = TlsHandshake(client_socket, address)
        connections.add(handshake)
        task = loop.create_task(handshake.complete(make_connection, context))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(partial(_remove_handshake, connections, handshake))


def _remove_handshake(
    connections: ConnectionLimiter, handshake: TlsHandshake, task: asyncio.Task[None]
) -> None:
    connections.remove(handshake)
