"""Log lines of a server on standard output: about itself, and optionally one per request."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from datetime import datetime, timezone
from typing import Any, NamedTuple, TextIO

import orjson

from tfpolicies.system.stdio import discard_output

REFUSED_STATUS_KEY = "tfpolicies.refused"
"""Key in an ASGI scope: the status with which the connection refused the rest of the request."""

_MODEL_PATTERN = re.compile(r"/v2/(?:repository/)?models/([^/]+)")
_MAX_PATH_LENGTH = 200  # characters
_MAX_WAITING = 10_000  # most requests whose lines are not written yet
_WRITE_INTERVAL = 0.1  # seconds between two writes


class AccessLogEntry(NamedTuple):
    """A request that was answered or refused.

    Attributes:
        protocol: "http" or "grpc".
        client: its address.
        method: of HTTP, such as "POST", or of gRPC, such as "ModelInfer"; "" if it was refused
            before that was read.
        path: without the query, as it was sent.
        model: the model in the request; "" for none, and over HTTP for the one in the path.
        status: the HTTP status, also for gRPC; 499 if the client disconnected.
        seconds: from the request's headers to the end of the response.
        bytes: size of the response, without headers.
        time: when it ended, in seconds since 1970.
    """

    protocol: str
    client: str
    method: str
    path: str
    model: str
    status: int
    seconds: float
    bytes: int
    time: float


class ServerLog:
    """Writes lines, as text or as one JSON object each.

    A thread formats and writes lines about requests, ten times a second, so that a slow reader does
    not delay requests. If too many wait, further ones are dropped and counted. Once standard output
    is closed, lines are discarded.

    Args:
        as_json: whether lines are JSON.
        output: the stream; None for standard output.
    """

    def __init__(self, *, as_json: bool = False, output: TextIO | None = None) -> None:
        self._as_json, self._output = as_json, output
        self._waiting: deque[AccessLogEntry] = deque()
        self._num_dropped = 0
        self._is_closed = threading.Event()
        self._writer: threading.Thread | None = None

    def __call__(self, message: str) -> None:
        """Writes a line about the server."""
        if self._as_json:
            record = {"time": _format_time(time.time()), "kind": "server", "message": message}
            message = orjson.dumps(record).decode()
        self._write([message])

    def record(self, request: AccessLogEntry) -> None:
        """Queues a line about a request."""
        if len(self._waiting) >= _MAX_WAITING:
            self._num_dropped += 1
            return
        self._waiting.append(request)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_requests, name="log", daemon=True)
            self._writer.start()

    def close(self) -> None:
        self._is_closed.set()
        if self._writer is not None:
            self._writer.join(10 * _WRITE_INTERVAL)  # reached only if the output is not read

    def _write_requests(self) -> None:
        is_closed = False
        while not is_closed:
            is_closed = self._is_closed.wait(_WRITE_INTERVAL)
            requests = [self._waiting.popleft() for _ in range(len(self._waiting))]
            num_dropped, self._num_dropped = self._num_dropped, 0
            self._write([self._format(request) for request in requests])
            if num_dropped:
                self(f"{num_dropped} requests were not logged: the log was not read fast enough.")

    def _format(self, request: AccessLogEntry) -> str:
        path = request.path[:_MAX_PATH_LENGTH]
        if not self._as_json:
            text = f"{request.protocol} {request.client} {request.method} {path or '-'}"
            printable = text.encode("unicode_escape").decode()
            return (
                f"{_format_time(request.time)} {printable} {request.status} {request.seconds:.6f} "
                f"s {request.bytes} bytes"
            )
        model = request.model or next(iter(_MODEL_PATTERN.findall(path)), "")
        record: dict[str, Any] = {"time": _format_time(request.time), "kind": "request"}
        record |= {**request._asdict(), "time": record["time"], "path": path, "model": model}
        record["seconds"] = round(request.seconds, 6)
        return orjson.dumps(record).decode()

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        output = self._output or sys.stdout
        try:
            output.write("".join(f"{line}\n" for line in lines))  # one call: two threads write
            output.flush()
        except (OSError, ValueError) as error:  # a closed output does not stop the server
            if self._output is None and isinstance(error, BrokenPipeError):
                discard_output()


def _format_time(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
