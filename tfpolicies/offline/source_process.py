"""The child process that parses untrusted files, with limits of memory and time.

Parquet and LZ4 are parsed by C libraries. Here a damaged or hostile file can only end this process.
Requests and answers are JSON; arrays are in shared memory.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.errors import BatchError, TfPoliciesError
from tfpolicies.offline.data_source import TRUST_ADVICE, Chunk, DataSource, ReadRequest

MAX_MEGABYTES = 320  # that a request may allocate
SECONDS, SECONDS_PER_MEGABYTE = 1.2, 0.15  # CPU time of a request, and per megabyte of the tables
MAX_ANSWER_BYTES = 256 << 20  # of the arrays of one answer
_MEMORY_PROBLEM = f"reading it takes more than {MAX_MEGABYTES} MB. {TRUST_ADVICE}"
_MAX_TEXTS = 1 << 16
_MAX_TEXT_CHARACTERS = 4 << 20
_ALIGNMENT = 64


def open_files(kind: str, paths: Sequence[str], *, trusted: bool = True) -> DataSource:
    """Returns the source of files of a kind, "parquet" or "json".

    Args:
        kind: of all files.
        paths: of the files.
        trusted: whether sizes are not bounded.
    """
    if kind == "parquet":
        from tfpolicies.offline.parquet_files import ParquetFiles

        return ParquetFiles([Path(path) for path in paths], trusted=trusted)
    from tfpolicies.offline.json_lines import JsonLines

    return JsonLines([Path(path) for path in paths])


class SharedMemory:
    """A file in memory that grows with the arrays of answers.

    Args:
        file: its descriptor.
        is_writable: whether this process writes it.
    """

    def __init__(self, file: int, *, is_writable: bool) -> None:
        self.file = file
        self._access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
        self._view: mmap.mmap | None = None

    def map(self) -> mmap.mmap | bytes:
        """Returns the content; arrays on it must be gone before the next call."""
        size = os.fstat(self.file).st_size
        if self._view is not None and len(self._view) != size:
            self._view.close()
            self._view = None
        if self._view is None and size:
            self._view = mmap.mmap(self.file, size, access=self._access)
        return b"" if self._view is None else self._view

    def grow(self, size: int) -> None:
        """Makes it at least that large."""
        if os.fstat(self.file).st_size < size:
            os.ftruncate(self.file, size)

    def close(self) -> None:
        """Ends the mapping and closes the file."""
        if self._view is not None:
            self._view.close()
        os.close(self.file)


def serve(connection_file: int, memory_files: Sequence[int]) -> None:
    """Answers requests until the connection ends.

    Args:
        connection_file: a socket.
        memory_files: the files of the shared memory of each slot.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(connection_file)
    source: DataSource | None = None
    slots = [SharedMemory(file, is_writable=True) for file in memory_files]
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        if message["kind"] == "open":
            kind, paths = message["format"], message["paths"]
            _import_parser(kind)
            _limit_memory()
            answer, source = _answer(lambda: _open(kind, paths), paths)  # noqa: B023
        else:
            request = ReadRequest(*message["request"])
            names = None if request.names is None else tuple(request.names)
            memory = slots[message["slot"]]
            answer, _ = _answer(
                lambda: (_read(source, request._replace(names=names), memory), None),  # noqa: B023
                [],
                message["megabytes"],
            )
        try:
            connection.send_bytes(json.dumps(answer).encode())
        except OSError:  # the other process ended
            return


def _import_parser(kind: str) -> None:
    try:
        if kind == "parquet":
            sys.modules["pandas"] = None  # type: ignore[assignment]  # pyarrow imports it: seconds
            import pyarrow.parquet  # noqa: F401
        else:
            import lz4.frame  # noqa: F401
    except ImportError:
        pass  # opening the files, or unpacking a column, says so


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + (MAX_MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_ANSWER_BYTES, MAX_ANSWER_BYTES))


def get_megabytes(path: str) -> float:
    """Returns the size of a file; 0 if it does not exist, which reading it reports."""
    try:
        return os.stat(path).st_size / (1 << 20)
    except OSError:
        return 0.0


def _answer(
    function: Callable[[], tuple[dict[str, Any], Any]],
    paths: Sequence[str],
    megabytes: float = 0.0,
) -> tuple[dict[str, Any], Any]:
    """Returns the result of a function within the limits, or its error as a dict."""
    megabytes += sum(map(get_megabytes, paths))
    signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_PER_MEGABYTE * megabytes)
    try:
        return function()
    except TfPoliciesError as error:
        return {"error": [type(error).__name__, str(error)]}, None
    except MemoryError:
        return {"error": ["BatchError", _MEMORY_PROBLEM]}, None
    except Exception as error:  # parsers raise whatever they like
        if "malloc" in str(error) or "memory" in str(error):
            return {"error": ["BatchError", _MEMORY_PROBLEM]}, None
        text = "".join(traceback.format_exception_only(error)).strip()
        problem = f"it cannot be parsed: {text:.300}. Record it again."
        return {"error": ["BatchError", problem]}, None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _open(kind: str, paths: Sequence[str]) -> tuple[dict[str, Any], DataSource]:
    source = open_files(kind, paths, trusted=False)
    answer = {
        "units": [list(unit) for unit in source.units],
        "ends": list(source.ends),
        "names": list(source.column_names),
        "contiguous": source.has_contiguous_episodes,
        "metadata": dict(source.metadata),
    }
    return answer, source


def _read(source: DataSource | None, request: ReadRequest, memory: SharedMemory) -> dict[str, Any]:
    if source is None:
        raise BatchError("no file is open")
    chunks, position = source.read(request)
    arrays: list[np.ndarray] = []
    records = [_encode_chunk(chunk, arrays) for chunk in chunks]
    offsets = np.cumsum([0, *(_align(array.nbytes) for array in arrays)]).tolist()
    size = max(offsets[-1], 1)
    if size > MAX_ANSWER_BYTES:
        raise BatchError(
            f"{request.max_rows} rows must not have more than {MAX_ANSWER_BYTES} bytes, but have "
            f"{size}. {TRUST_ADVICE}"
        )
    memory.grow(size)
    view = memory.map()
    for array, offset in zip(arrays, offsets, strict=False):
        target: np.ndarray = np.ndarray(array.shape, array.dtype, view, offset)
        target[...] = array
        del target
    return {
        "chunks": records,
        "position": position,
        "arrays": [
            [array.dtype.str, list(array.shape), offset]
            for array, offset in zip(arrays, offsets, strict=False)
        ],
    }


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _encode_chunk(chunk: Chunk, arrays: list[np.ndarray]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    texts: dict[str, list[str]] = {}
    for name, column in chunk.columns.items():
        if column.dtype == object:  # texts: their numbers in a list of different ones
            values: list[str] = column.tolist()
            numbers = {text: i for i, text in enumerate(dict.fromkeys(values))}
            if len(numbers) > _MAX_TEXTS or sum(map(len, numbers)) > _MAX_TEXT_CHARACTERS:
                raise BatchError(
                    f"Column {name!r:.100} must have at most {_MAX_TEXTS} different texts, of "
                    f"{_MAX_TEXT_CHARACTERS} characters, in {chunk.rows} rows. {TRUST_ADVICE}"
                )
            texts[name] = [*numbers]
            column = np.fromiter(map(numbers.__getitem__, values), np.int32, len(values))
        columns[name] = len(arrays)
        arrays.append(column)
    offsets = None
    if chunk.line_offsets is not None:
        offsets = len(arrays)
        arrays.append(chunk.line_offsets)
    return {
        "columns": columns,
        "texts": texts,
        "rows": chunk.rows,
        "table": chunk.table,
        "first_row": chunk.first_row,
        "line_offsets": offsets,
        "policy_id": chunk.policy_id,
    }
