"""A source of untrusted files, which a child process parses."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tfpolicies.errors import BatchError, MissingPackageError, TfPoliciesError
from tfpolicies.offline.data_source import (
    TRUST_ADVICE,
    Chunk,
    DataSource,
    ReadRequest,
    ReadResult,
    Unit,
)
from tfpolicies.offline.source_process import (
    SECONDS,
    SECONDS_PER_MEGABYTE,
    SharedMemory,
    get_megabytes,
)

_PROGRAM = (
    "import sys; connection, *memory = map(int, sys.argv[1].split(',')); "
    "sys.path[:] = sys.argv[2:]; from tfpolicies.offline.source_process import serve; "
    "serve(connection, memory)"
)
_MAX_MESSAGE_BYTES = 64 << 20  # without the arrays
_SLOTS = 8  # answers that may wait: of units that are read in turn, the next one, and two more
_ENV = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "2",
}
_WALL_SECONDS = 120.0  # for an answer, on a busy machine
_ERRORS = {x.__name__: x for x in (BatchError, MissingPackageError)}  # of sources of files


class IsolatedFiles(DataSource):
    """Files that a child process parses, with limits of memory and time.

    Reading ahead makes the process parse while this one learns.

    Args:
        kind: "parquet" or "json".
        paths: the files.

    Raises:
        BatchError: if a file is damaged, or exceeds the limits.
        MissingPackageError: if pyarrow is not installed.
    """

    def __init__(self, kind: str, paths: Sequence[str]) -> None:
        self.tables = list(paths)
        self._kind = kind
        self._pending: dict[ReadRequest, int] = {}  # slots by request, in the order sent
        self._answers: dict[ReadRequest, dict[str, Any]] = {}
        self._child: _Child | None = None
        answer = self._start()
        self.units = [Unit(*map(int, unit)) for unit in answer["units"]]
        self.ends = [int(end) for end in answer["ends"]]
        self.column_names = tuple(map(str, answer["names"]))
        self.has_contiguous_episodes = bool(answer["contiguous"])
        self.metadata = dict(answer["metadata"])

    def read(self, request: ReadRequest) -> ReadResult:
        if request not in self._pending and request not in self._answers:
            self._send(request)
        while request not in self._answers:
            self._receive()
        answer = self._answers.pop(request)
        slot = self._pending.pop(request)
        if "error" in answer:
            raise self._make_error(answer["error"], request)
        memory = self._require_child().memory[slot]
        try:
            arrays = _copy_arrays(memory, answer["arrays"])
            chunks = [_decode_chunk(record, arrays) for record in answer["chunks"]]
            return ReadResult(chunks, int(answer["position"]))
        except (ValueError, TypeError, LookupError, OSError) as error:
            raise BatchError(
                f"{self.tables[request.table]} was refused: its reader gave a wrong answer "
                f"({error!s:.100})."
            ) from error

    def prefetch(self, request: ReadRequest) -> None:
        if request in self._pending:
            return
        while len(self._pending) >= _SLOTS - 1:  # some are from before a change of position
            self._drop_oldest()
        self._send(request)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None
        self._pending.clear()
        self._answers.clear()

    # -- the process --------------------------------------------------------------------------

    def _start(self) -> dict[str, Any]:
        self._child = _Child()
        self._child.send({"kind": "open", "format": self._kind, "paths": self.tables})
        answer = self._wait(self.tables)
        if "error" in answer:
            self.close()
            raise self._make_error(answer["error"], None)
        return answer

    def _require_child(self) -> _Child:
        if self._child is None:  # closed, or ended by a limit
            self._start()
        child = self._child
        if child is None:
            raise BatchError(f"The reader of {self.tables!s:.200} cannot be started.")
        return child

    def _send(self, request: ReadRequest) -> None:
        child = self._require_child()
        while len(self._pending) >= _SLOTS:
            self._drop_oldest()
        slot = next(i for i in range(_SLOTS) if i not in self._pending.values())
        self._pending[request] = slot
        size = get_megabytes(self.tables[request.table])
        child.send(
            {"kind": "read", "request": list(request), "slot": slot, "megabytes": min(size, 1000)}
        )

    def _drop_oldest(self) -> None:
        """Drops the answer of a request that was announced and is not needed any more."""
        oldest = next(iter(self._pending))
        while oldest not in self._answers:
            self._receive()
        del self._answers[oldest], self._pending[oldest]

    def _receive(self) -> None:
        waiting = next(request for request in self._pending if request not in self._answers)
        self._answers[waiting] = self._wait(self.tables[waiting.table])

    def _wait(self, place: object) -> dict[str, Any]:
        child = self._require_child()
        try:
            if not child.connection.poll(_WALL_SECONDS):
                raise EOFError("it did not answer")
            answer = json.loads(child.connection.recv_bytes(_MAX_MESSAGE_BYTES))
            if not isinstance(answer, dict):
                raise ValueError("no object")
            return answer
        except (EOFError, OSError, ValueError, RecursionError) as error:
            reason = child.describe_end() or str(error)
            self.close()
            raise BatchError(
                f"{place!s:.300} was refused: its reader ended ({reason}). Nothing in it was "
                f"executed. {TRUST_ADVICE}"
            ) from error

    def _make_error(self, record: Any, request: ReadRequest | None) -> TfPoliciesError:
        name, message = (str(part) for part in record)
        place = self.tables if request is None else self.tables[request.table]
        if str(place if request is not None else self.tables[0]) not in message:
            message = f"{place!s:.300} was refused: {message}"
        return _ERRORS.get(name, BatchError)(message)


class _Child:
    """A child process, its socket and the shared memory of its answers."""

    def __init__(self) -> None:
        parent_socket, child_socket = socket.socketpair()
        self.memory = [SharedMemory(_make_memory(), is_writable=False) for _ in range(_SLOTS)]
        files = [child_socket.fileno(), *(memory.file for memory in self.memory)]
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, ",".join(map(str, files)), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
                env={**os.environ, **_ENV},
                start_new_session=True,  # Ctrl-C is for this process
            )
        self.connection = Connection(parent_socket.detach())
        self._finalize = weakref.finalize(
            self, _end, self._process, self.connection, self.memory, os.getpid()
        )

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # `recv_bytes` reports a process that ended
            self.connection.send_bytes(json.dumps(message).encode())

    def close(self) -> None:
        """Ends the process."""
        self._finalize()

    def describe_end(self) -> str:
        """Returns why the process ended by itself, or ""."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        status = self._process.poll()
        if status is None or status == 0:
            return ""
        if status == -signal.SIGPROF:
            return f"it takes more than {SECONDS:g} s and {SECONDS_PER_MEGABYTE:g} s per megabyte"
        return f"it ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def _make_memory() -> int:
    memory = os.memfd_create("tfpolicies", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # mapped pages stay
    return memory


def _end(
    process: subprocess.Popen[bytes],
    connection: Connection,
    slots: Sequence[SharedMemory],
    owner: int,
) -> None:
    if os.getpid() != owner:  # a fork
        return
    connection.close()
    process.kill()
    process.wait()
    for memory in slots:
        memory.close()


def _copy_arrays(memory: SharedMemory, records: Sequence[Any]) -> list[np.ndarray]:
    """Copies arrays from shared memory; their records are not trusted."""
    view = memory.map()
    arrays = []
    for dtype_name, shape, offset in records:
        dtype = np.dtype(str(dtype_name))
        sizes = tuple(map(int, shape))
        end = int(offset) + math.prod(sizes) * dtype.itemsize
        if dtype.kind not in "biuf" or min((*sizes, offset)) < 0 or end > len(view):
            raise ValueError(f"an array {sizes} of {dtype} at {offset}")
        mapped: np.ndarray = np.ndarray(sizes, dtype, view, offset)
        arrays.append(mapped.copy())
        del mapped
    return arrays


def _decode_chunk(record: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Chunk:
    columns = {str(name): arrays[int(i)] for name, i in record["columns"].items()}
    for name, texts in record["texts"].items():
        columns[name] = np.array(texts, object)[columns[name]]
    rows, offsets, policy_id = int(record["rows"]), record["line_offsets"], record["policy_id"]
    if any(len(column) != rows for column in columns.values()):
        raise ValueError("columns of different lengths")
    return Chunk(
        columns,
        rows,
        str(record["table"]),
        int(record["first_row"]),
        None if offsets is None else arrays[int(offsets)],
        None if policy_id is None else str(policy_id),
    )
