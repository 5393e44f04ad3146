"""JSON lines as a data source: each line is a batch of steps, as RLlib writes them.

A line is `{"type": "SampleBatch", column: values, ...}`, or `{"type": "MultiAgentBatch", "count":
n, "policy_batches": {policy_id: {column: values, ...}}}`. Values are lists, or packed texts.

Batches of recurrent policies have two columns with an entry per sequence: `seq_lens`, and
`state_in_<i>`, the state before its first step. Here each step has its own `state_in_<i>`, which is
the `state_out_<i>` of the step before; `seq_lens` is left out, as sequences are cut again.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tfpolicies.errors import BatchError
from tfpolicies.offline.data_source import (
    Chunk,
    Columns,
    DataSource,
    ReadRequest,
    ReadResult,
    Unit,
    count_lines,
    join_chunks,
)
from tfpolicies.offline.packed_columns import MAX_UNPACKED_BYTES, is_packed_column, unpack_column
from tfpolicies.offline.step_columns import SEPARATOR

_MAX_LINE_BYTES = 24 << 20  # about a second of parsing
_MAX_BLANK_LINES = 1000  # one after the other
_MAX_LINE_ARRAY_BYTES = 192 << 20  # of its columns
_UNIT_BYTES = 16 << 20  # a file that is larger consists of several units
_MAX_LEAVES = 1000  # of a nested column
_MAX_DEPTH = 10
_MAX_GROWTH = 100  # extracted bytes per byte of a zip archive
_MIN_EXTRACTED_BYTES = 64 << 20  # that any archive may have
_MAX_ENTRIES = 10_000
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    struct.error,
)
_IGNORED = ("type", "count", "infos")


class JsonLines(DataSource):
    """Files of JSON lines.

    A line that cannot be parsed is an error, except the last one of a file, which a killed writer
    may have left: it is skipped, and listed in `truncated_tables`.

    Args:
        paths: the files.

    Attributes:
        truncated_tables: the files whose last line is incomplete, as far as they were read.

    Raises:
        BatchError: if there is no row in the first file.
    """

    has_contiguous_episodes = False

    def __init__(self, paths: Sequence[Path]) -> None:
        self.tables = [str(path) for path in paths]
        self.truncated_tables: set[str] = set()
        self.ends = [_get_size(path) for path in paths]
        self.units = [
            Unit(table, start, min(start + _UNIT_BYTES, size))
            for table, size in enumerate(self.ends)
            for start in range(0, size, _UNIT_BYTES)
        ]
        self.column_names = next(filter(None, map(self._find_names, range(len(paths)))), ())
        if not self.column_names:
            raise BatchError(
                f"There is no row in {self.tables!s:.300}. Check that its writer recorded steps."
            )

    def _find_names(self, table: int) -> tuple[str, ...]:
        """Returns the columns of the first line that has rows."""
        for start, line in self._iter_lines(table, 0):
            names: dict[str, None] = {}
            for batch in self._parse(table, start, line):
                names |= dict.fromkeys(_list_columns(batch.values))
            if names:
                return tuple(names)
        return ()

    def read(self, request: ReadRequest) -> ReadResult:
        table, collected = request.table, dict[str | None, list[Chunk]]()
        rows, end = 0, request.stop
        for start, line in self._iter_lines(table, request.position):
            if start >= request.stop:
                break
            end = start + len(line)
            for batch in self._parse(table, start, line):
                chunk = self._make_chunk(table, start, batch, request.names)
                if chunk.rows:
                    collected.setdefault(batch.policy_id, []).append(chunk)
                    rows += chunk.rows
            if rows >= request.max_rows:
                break
        return ReadResult([join_chunks(parts) for parts in collected.values()], end)

    def _iter_lines(self, table: int, position: int) -> Iterator[tuple[int, bytes]]:
        """Yields the byte offset and the content of lines that start at a position or later."""
        with _open(self.tables[table]) as file:
            if position:
                file.seek(position - 1)
                position += len(file.readline(_MAX_LINE_BYTES)) - 1
            blank_lines = 0
            while line := file.readline(_MAX_LINE_BYTES + 1):
                blank_lines = 0 if len(line) > 2 or line.strip() else blank_lines + 1
                if blank_lines > _MAX_BLANK_LINES:
                    raise BatchError(
                        f"{self._describe_line(table, position)} is empty, as are the "
                        f"{_MAX_BLANK_LINES} lines before it. Remove them."
                    )
                if len(line) > _MAX_LINE_BYTES:
                    raise BatchError(
                        f"{self._describe_line(table, position)} has more than {_MAX_LINE_BYTES} "
                        "bytes. Write shorter batches."
                    )
                yield position, line
                position += len(line)

    def _describe_line(self, table: int, offset: int) -> str:
        return f"Line {count_lines(self.tables[table], offset)} of {self.tables[table]}"

    def _parse(self, table: int, start: int, line: bytes) -> list[_Batch]:
        if not line.strip():
            return []
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                self.truncated_tables.add(self.tables[table])
                return []
            raise BatchError(
                f"{self._describe_line(table, start)} cannot be parsed as JSON: {error!s:.200}. "
                "Remove the line."
            ) from error
        try:
            return _get_batches(record)
        except BatchError as error:
            raise BatchError(f"{self._describe_line(table, start)}: {error}") from error

    def _make_chunk(
        self, table: int, start: int, batch: _Batch, names: Sequence[str] | None
    ) -> Chunk:
        try:
            columns = _read_columns(batch.values, names)
            rows = _count_rows(columns)
        except BatchError as error:
            raise BatchError(f"{self._describe_line(table, start)}: {error}") from error
        offsets = np.full(rows, start, np.int64)
        return Chunk(columns, rows, self.tables[table], -1, offsets, batch.policy_id)


def _get_size(path: Path) -> int:
    with _open(str(path)) as file:
        return os.fstat(file.fileno()).st_size


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise BatchError(
            f"{path} cannot be opened: {error.strerror}. Check that it exists and may be read."
        ) from error


class _Batch(NamedTuple):
    policy_id: str | None
    values: Mapping[str, Any]


def _get_batches(record: Any) -> list[_Batch]:
    kind = record.get("type") if isinstance(record, dict) else None
    if kind == "SampleBatch":
        return [_Batch(None, record)]
    if kind == "MultiAgentBatch" and isinstance(record.get("policy_batches"), dict):
        batches = [
            _Batch(policy_id, values) for policy_id, values in record["policy_batches"].items()
        ]
        for policy_id, values in batches:
            if not isinstance(values, dict):
                raise BatchError(
                    f"the batch of policy {policy_id!r:.50} must be an object with columns, got "
                    f"{values!r:.50}."
                )
        return batches
    raise BatchError(
        "it must be an object with a 'type' of 'SampleBatch', or 'MultiAgentBatch' with "
        f"'policy_batches', got {kind!r:.50}. Record with output=..., or RLlib."
    )


def _list_columns(values: Mapping[str, Any]) -> list[str]:
    """Returns the names of a batch's columns with rows, also of those that cannot be read."""
    result: list[str] = []
    size = 0
    for name, value in values.items():
        if name in _IGNORED or _is_per_sequence(name, values):
            continue
        try:
            for leaf, array in _iter_leaves(name, value):
                size += array.nbytes
                result += [leaf] * bool(len(array))
        except BatchError:
            result.append(name)
        _require_size(size)
        if len(result) > _MAX_LEAVES:
            raise BatchError(f"it has more than {_MAX_LEAVES} columns.")
    if "dones" in result and "terminateds" not in result:
        result[result.index("dones")] = "terminateds"
    return result


def _read_columns(values: Mapping[str, Any], names: Sequence[str] | None) -> Columns:
    columns: Columns = {}
    if "dones" in values and "terminateds" not in values:
        values = {"terminateds" if name == "dones" else name: x for name, x in values.items()}
    for name, value in values.items():
        if not _is_needed(name, names) or _is_per_sequence(name, values):
            continue
        try:
            leaves = dict(_iter_leaves(name, value))
        except BatchError:
            if names is None:  # a function of all columns does without it
                continue
            raise
        columns |= {x: array for x, array in leaves.items() if names is None or x in names}
        _require_size(sum(array.nbytes for array in columns.values()))
        if len(columns) > _MAX_LEAVES:
            raise BatchError(f"it has more than {_MAX_LEAVES} columns.")
    if "seq_lens" in values:
        _expand_states(columns, values)
    return columns


def _require_size(size: int) -> None:
    if size > _MAX_LINE_ARRAY_BYTES:
        raise BatchError(
            f"its columns must have at most {_MAX_LINE_ARRAY_BYTES} bytes. Write shorter batches."
        )


def _is_per_sequence(name: str, values: Mapping[str, Any]) -> bool:
    """Returns whether a column can only have an entry for each sequence, not for each step."""
    if "seq_lens" not in values:
        return False
    return name == "seq_lens" or (
        name.startswith("state_in_") and name.replace("_in_", "_out_", 1) not in values
    )


def _expand_states(columns: Columns, values: Mapping[str, Any]) -> None:
    """Gives each step its own recurrent state, instead of one for each sequence.

    Raises:
        BatchError: if there is not one for each sequence, or the sequences do not have all steps.
    """
    lengths = _to_array("seq_lens", values["seq_lens"])
    for name in [name for name in columns if name.startswith("state_in_")]:
        out_name = name.replace("_in_", "_out_", 1)
        states = np.roll(dict(_iter_leaves(out_name, values[out_name]))[out_name], 1, axis=0)
        state = columns[name]
        if len(state) == len(states):
            continue
        is_valid = lengths.ndim == 1 and bool((lengths > 0).all()) and lengths.sum() == len(states)
        if not is_valid or state.shape != (len(lengths), *states.shape[1:]):
            raise BatchError(
                f"column {name!r:.100} must have a row of {states.shape[1:]} for each sequence, "
                f"whose lengths in 'seq_lens' must add up to {len(states)}, got the shape "
                f"{state.shape} and the lengths {lengths.tolist()!s:.100}. Leave the line out."
            )
        states[np.cumsum(lengths) - lengths] = state
        columns[name] = states


def _is_needed(name: str, names: Sequence[str] | None) -> bool:
    if names is None:
        return name not in _IGNORED
    return any(x == name or x.startswith(name + SEPARATOR) for x in names)


def _iter_leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a column, with the path of each part of a nested one in its name."""
    if depth > _MAX_DEPTH:
        raise BatchError(
            f"column {name!r:.100} is nested more than {_MAX_DEPTH} deep. Write its parts as "
            "columns."
        )
    if isinstance(value, str):
        value = _unpack(name, value)
    elif isinstance(value, list) and value and isinstance(value[0], str):
        if not is_packed_column(value[0]):
            yield name, _to_texts(name, value)
            return
        value = _unpack_rows(name, value)
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _iter_leaves(f"{name}{SEPARATOR}{key}", part, depth + 1)
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _iter_leaves(f"{name}{SEPARATOR}{i}", part, depth + 1)
    elif isinstance(value, list) and value and isinstance(value[0], dict | tuple):
        for key, parts in _transpose(name, value):
            yield from _iter_leaves(f"{name}{SEPARATOR}{key}", parts, depth + 1)
    else:
        yield name, _to_array(name, value)


def _unpack(name: str, text: Any) -> Any:
    try:
        if not isinstance(text, str) or not is_packed_column(text):
            raise BatchError(f"it must be an array that was packed, got {text!r:.50}")
        return unpack_column(text)
    except BatchError as error:
        raise BatchError(f"the packed column {name!r:.100} was refused: {error}.") from error


def _unpack_rows(name: str, texts: Sequence[Any]) -> list[Any]:
    rows, size = [], 0
    for text in texts:
        rows.append(_unpack(name, text))
        size += sum(array.nbytes for _, array in _iter_leaves(name, rows[-1]))
        if size > MAX_UNPACKED_BYTES:
            raise BatchError(
                f"the rows of the packed column {name!r:.100} must have at most "
                f"{MAX_UNPACKED_BYTES} bytes in a line. Write shorter batches."
            )
    return rows


def _transpose(name: str, rows: Sequence[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yields the parts of nested rows, each as a list with an entry for each row."""
    first = rows[0]
    keys = list(first) if isinstance(first, dict) else list(range(len(first)))
    for i, row in enumerate(rows):
        if type(row) is not type(first) or len(row) != len(first):
            raise BatchError(
                f"column {name!r:.100} must have the parts {keys!s:.100} in all rows, but row {i} "
                f"is {row!r:.60}."
            )
    for key in keys:
        try:
            yield key, [row[key] for row in rows]
        except KeyError as error:
            raise BatchError(
                f"column {name!r:.100} must have the part {key!r:.50} in all rows."
            ) from error


def _to_texts(name: str, rows: Sequence[Any]) -> np.ndarray:
    for i, row in enumerate(rows):
        if not isinstance(row, str):
            raise BatchError(
                f"column {name!r:.100} must have texts in all rows, but row {i} is {row!r:.60}."
            )
    return np.array(rows, object)


def _to_array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise BatchError(
            f"column {name!r:.100} must have rows of one shape: {error!s:.100}. Leave it out, or "
            "fill its rows up."
        ) from error
    if array.ndim and array.dtype.kind in "biuf":
        return array.astype(np.int32) if name == "seq_lens" else array
    problem = f"got {value!r:.60}"
    if array.ndim:
        for i, row in enumerate(value):
            if np.asarray(row).dtype.kind not in "biuf":
                problem = f"but row {i} is {row!r:.60}"
                break
    raise BatchError(
        f"column {name!r:.100} must be a list with a number, or nested lists of numbers, for each "
        f"row, {problem}."
    )


def _count_rows(columns: Columns) -> int:
    sizes = {name: len(column) for name, column in columns.items()}
    if len({*sizes.values()}) > 1:
        most = max(sizes.values(), key=[*sizes.values()].count)
        different = {name: size for name, size in sizes.items() if size != most}
        raise BatchError(
            f"all columns must have the same number of rows, but most have {most}, and these "
            f"{different!s:.200}."
        )
    return next(iter(sizes.values()), 0)


def extract_json_files(path: Path, folder: Path) -> list[Path]:
    """Extracts the `.json` files of a zip archive into a folder; returns their paths.

    Raises:
        BatchError: if it is not a zip archive, or its files are too large for its size.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [x for x in archive.infolist() if x.filename.endswith((".json", ".jsonl"))]
            if len(entries) > _MAX_ENTRIES:
                raise BatchError(
                    f"{path} must have at most {_MAX_ENTRIES} files, but has {len(entries)}. If it "
                    "is yours, extract it, and read the folder."
                )
            size = sum(entry.file_size for entry in entries)
            if size > max(_MIN_EXTRACTED_BYTES, _MAX_GROWTH * path.stat().st_size):
                raise BatchError(
                    f"{path} must not have more than {_MAX_GROWTH} bytes of JSON per byte, but "
                    f"claims {size}. If it is yours, extract it, and read the folder."
                )
            result = []
            for i, entry in enumerate(entries):
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise BatchError(
                        f"{path} must be compressed by deflate, got the method "
                        f"{entry.compress_type}. If it is yours, extract it, and read the folder."
                    )
                target = folder / f"{i:06d}-{Path(entry.filename).name}"
                with archive.open(entry) as source, open(target, "wb") as file:
                    remaining = entry.file_size
                    while remaining > 0 and (block := source.read(min(remaining, 1 << 20))):
                        file.write(block)
                        remaining -= len(block)
                result.append(target)
            return result
    except BatchError:
        raise
    except _ZIP_ERRORS as error:
        raise BatchError(
            f"{path} cannot be read as a zip archive: {error!s:.200}. Pack it again, or give the "
            "path of its .json files."
        ) from error
