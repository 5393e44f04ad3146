"""Connections of HTTP: how many there may be, how long they may wait, and how long heads may be."""

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

from tfpolicies.serving.logs import REFUSED, AnsweredRequest

_LONGEST_HEAD = 65_536  # bytes of an address, or of all headers
_HEAD_SECONDS = 20.0  # that a connection or a begun request may go without complete headers
_BODY_SECONDS = 60.0  # that a request may go without a byte of its body
_IDLE_SECONDS = 200.0  # from a request to the next one; uvicorn's limit counts from the answer
_CLOSING_SECONDS = 10.0  # that a client may take to read its last answer
_LAST_SECONDS = 1.0  # that a connection without a request may stay when the server stops
_PAUSE_SECONDS = 0.1  # after a connection could not be accepted
_EVERY = 1.0  # seconds between two looks at all connections
_SPARED = 64  # descriptors for models' files, gRPC's own and what else opens
_MOST, _FEWEST = 4096, 4  # connections, whatever the number of descriptors

_SO_ATTACH_FILTER = 26  # of Linux; `socket` has no name for it
_DROP_SYN = (  # instructions of BPF: code, jumps if true and false, operand
    (0x30, 0, 0, 13),  # load the byte with the flags of TCP
    (0x45, 0, 1, 0x02),  # is SYN set, with which clients begin a connection?
    (0x06, 0, 0, 0),  # then drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # else take it whole
)

_REASONS = {
    400: "Invalid HTTP request received.",
    408: "The request did not arrive in time.",
    414: f"The address may have {_LONGEST_HEAD} bytes.",
    431: f"The headers may have {_LONGEST_HEAD} bytes.",
}


def get_connection_limit() -> int:
    """Returns how many connections each of HTTP and gRPC may have, given the descriptors left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    folder = Path("/proc/self/fd")
    is_open = len([*folder.iterdir()]) if folder.exists() else _SPARED
    return min(_MOST, max(_FEWEST, (soft - is_open - _SPARED) // 2))


def refuse_new_connections(listening: socket.socket) -> None:
    """Lets no client begin a connection any more; those that have begun one may complete it.

    Clients try again after a second, when the socket is closed, and are refused. Other systems
    than Linux have no such filters, and nothing happens there.
    """
    instructions = b"".join(struct.pack("HBBI", *each) for each in _DROP_SYN)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HP", len(_DROP_SYN), ctypes.addressof(buffer))
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid them
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


class Connections:
    """All connections of HTTP, bounded in number, for each address and in all.

    Attributes:
        is_draining: whether each closes after its next answer, which says so.
        is_stopping: whether those without a request close soon.

    Args:
        most: connections in all; one address may have all but a quarter of them.
        record: is called with each request that is refused before it is read; None for none.
    """

    def __init__(
        self, most: int, record: Callable[[AnsweredRequest], object] | None = None
    ) -> None:
        self._record = record
        self._most, self._most_of_address = most, most - most // 4
        self.is_draining = self.is_stopping = False
        self._all: dict[Connection | TlsHandshake, None] = {}  # those that wait longest first
        self._count: Counter[str] = Counter()

    def add(self, connection: Connection | TlsHandshake) -> None:
        """Admits a connection; one that waits for its client gives way if there are too many."""
        address = connection.address
        if self._count[address] >= self._most_of_address:
            self._close_one([x for x in self._all if x.address == address])
        elif len(self._all) >= self._most:
            self._close_one([*self._all])
        if self._count[address] >= self._most_of_address or len(self._all) >= self._most:
            connection.abort()
            return
        self._all[connection] = None
        self._count[address] += 1

    def remove(self, connection: Connection | TlsHandshake) -> None:
        """Counts a connection no longer."""
        if self._all.pop(connection, connection) is None:
            self._count[connection.address] -= 1
            if not self._count[connection.address]:
                del self._count[connection.address]

    def record_refused(self, connection: Connection, status: int) -> None:
        """Records a request that is refused before it is read."""
        if self._record is not None:
            waited = time.monotonic() - connection.since
            sent = "http", connection.address, "", "", ""
            self._record(AnsweredRequest(*sent, status, waited, 0, time.time()))

    def drain(self) -> None:
        """Lets each connection, and those to come, close after its next answer."""
        self.is_draining = True
        for connection in self._all:
            connection.close_after_answer()

    def abort(self) -> None:
        """Closes all connections at once."""
        for connection in [*self._all]:
            connection.abort()

    def _close_one(self, connections: list[Connection | TlsHandshake]) -> None:
        """Closes a connection that waits, first of those that never sent a whole request."""
        waiting = [x for x in connections if x.is_waiting]
        if waiting:
            found = min(waiting, key=lambda x: (x.is_used, x.since))
            found.abort()
            self.remove(found)

    async def watch(self) -> None:
        """Ends connections that wait for too long, until it is cancelled."""
        while True:
            await asyncio.sleep(_EVERY)
            now = time.monotonic()
            for connection in [*self._all]:
                connection.end_if_late(now)


class _Refused(Exception):
    """Ends the parsing of a request."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits of time and length.

    Attributes:
        address: of the client.
        since: when the client last did what it was waited for, in seconds of `time.monotonic`.
        handshake: what it takes the place of when it is made; None without TLS.

    Args:
        connections: all of them.
        settings: of uvicorn.
    """

    def __init__(self, connections: Connections, **settings: object) -> None:
        super().__init__(**settings)
        self.url: bytes = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self._connections = connections
        self.address, self.since = "", time.monotonic()
        self.handshake: TlsHandshake | None = None
        self._chunk = 0  # bytes of what is parsed now
        self._unparsed = 0  # bytes that came without an end of a head, or a part of a body
        self._is_body = False  # whether what is parsed now has a part of a body
        self._status = 400  # of what the parser refuses

    @property
    def is_used(self) -> bool:
        """Whether it got an answer, or is to get one."""
        return self.cycle is not None

    @property
    def is_waiting(self) -> bool:
        """Whether its client is to send something before anything else happens."""
        return self._is_answered or self.cycle.more_body

    @property
    def _is_answered(self) -> bool:
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
        """Closes it at once, whatever is left to send."""
        self.transport.abort()

    def close_after_answer(self) -> None:
        """Closes it after the answer that is due, if one is; its headers say so."""
        if not self._is_answered:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """Closes it when the server stops, unless a request is due; see `end_if_late`."""
        if not self._is_answered:
            self.close_after_answer()
        elif self.is_used and not self._unparsed:
            self.transport.close()

    def end_if_late(self, now: float) -> None:
        """Ends it if its client takes too long."""
        waited = now - self.since
        if self.transport.is_closing():
            if waited > _CLOSING_SECONDS:
                self.abort()
        elif not self._is_answered:
            if waited > _BODY_SECONDS and self.cycle.more_body:
                self._refuse(408)
            elif waited > _BODY_SECONDS and self.flow.write_paused:
                self.abort()
        elif self.cycle is None or self._unparsed:
            if waited > _HEAD_SECONDS:
                self._refuse(408)
            elif self._connections.is_stopping and not self._unparsed and waited > _LAST_SECONDS:
                self.transport.close()
        elif waited > _IDLE_SECONDS:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        before, self._is_body, self._chunk = self.cycle, False, len(data)
        super().data_received(data)
        if self._is_body or self.cycle is not before:
            self._unparsed, self.since = 0, time.monotonic()
            return
        if not self._unparsed and before is not None:
            self.since = time.monotonic()
        self._unparsed += self._chunk
        if self._unparsed > _LONGEST_HEAD and not self.transport.is_closing():
            in_address = not self.headers and len(self.url) > _LONGEST_HEAD // 2
            self._refuse(414 if in_address else 431)

    def on_headers_complete(self) -> None:
        if self._unparsed + self._chunk > _LONGEST_HEAD:
            self._require_short_head()
        super().on_headers_complete()
        if self._connections.is_draining:
            self.close_after_answer()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._is_body = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._status)

    def _require_short_head(self) -> None:
        if len(self.url) > _LONGEST_HEAD:
            self._status = 414
            raise _Refused
        if sum(len(name) + len(value) for name, value in self.headers) > _LONGEST_HEAD:
            self._status = 431
            raise _Refused

    def _refuse(self, status: int) -> None:
        """Answers that the request is not taken, unless an answer has begun; closes."""
        if self._is_answered or not self.cycle.response_started:
            body = f'{{"error":"{_REASONS[status]}"}}'.encode()
            lines = [
                STATUS_LINE[status].rstrip(),
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"connection: close",
            ]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
            if self._is_answered:
                self._connections.record_refused(self, status)
            else:  # the application records it when it notices
                self.cycle.scope[REFUSED] = status
        self.since = time.monotonic()
        self.transport.close()


class TlsHandshake:
    """A connection until TLS is agreed upon, when a `Connection` takes its place.

    It counts as a connection that waits. (asyncio's servers do not show theirs before the handshake
    is over, so clients that leave it out would take all descriptors.)

    Attributes:
        address: of the client.
        since: when it was made, in seconds of `time.monotonic`.
        is_used: False.
        is_waiting: True.

    Args:
        accepted: its socket.
        address: likewise.
    """

    is_used, is_waiting = False, True

    def __init__(self, accepted: socket.socket, address: str) -> None:
        self.address, self.since = address, time.monotonic()
        self._accepted = accepted

    async def complete(
        self, make_connection: Callable[[], Connection], context: ssl.SSLContext
    ) -> None:
        """Lets a connection take its place, or closes it if what comes is not TLS."""
        connection = make_connection()
        connection.handshake = self
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                self._accepted,
                ssl=context,
                ssl_handshake_timeout=_HEAD_SECONDS,
            )

    def abort(self) -> None:
        """Closes it at once."""
        with contextlib.suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)

    def close_after_answer(self) -> None:
        """Does nothing: no answer is due."""

    def end_if_late(self, now: float) -> None:
        """Does nothing: a handshake ends by itself."""


async def accept_tls(
    listening: socket.socket,
    connections: Connections,
    make_connection: Callable[[], Connection],
    context: ssl.SSLContext,
) -> None:
    """Accepts connections with TLS until it is cancelled.

    Args:
        listening: a socket that listens.
        connections: counts them from their beginning.
        make_connection: gives what handles one whose handshake is over.
        context: a certificate and its key.
    """
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    while True:
        try:
            accepted, (address, *_) = await loop.sock_accept(listening)
        except OSError:  # the client has gone, or there are no descriptors
            await asyncio.sleep(_PAUSE_SECONDS)
            continue
        handshake = TlsHandshake(accepted, address)
        connections.add(handshake)
        task = loop.create_task(handshake.complete(make_connection, context))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(partial(_remove, connections, handshake))


def _remove(connections: Connections, handshake: TlsHandshake, task: asyncio.Task[None]) -> None:
    connections.remove(handshake)
