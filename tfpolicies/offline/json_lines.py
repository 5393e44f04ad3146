"""JSON lines as a data source: each line is a batch of steps, as RLlib writes them.

A line is `{"type": "SampleBatch", column: values, ...}`, or `{"type": "MultiAgentBatch", "count":
n, "policy_batches": {policy_id: {column: values, ...}}}`. Values are lists, or packed texts.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from tfpolicies.errors import BatchError
from tfpolicies.offline.data_source import (
    Chunk,
    Columns,
    DataSource,
    ReadRequest,
    ReadResult,
    Unit,
)
from tfpolicies.offline.packed_columns import unpack_column

_MAX_LINE_BYTES = 64 << 20
_UNIT_BYTES = 16 << 20  # a file that is larger consists of several units
_MAX_LEAVES = 1000  # of a nested column
_IGNORED = ("type", "count")
SEPARATOR = "."
"""Joins the names of nested columns: `obs.camera`."""


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
        self.ends = [Path(path).stat().st_size for path in paths]
        self.units = [
            Unit(table, start, min(start + _UNIT_BYTES, size))
            for table, size in enumerate(self.ends)
            for start in range(0, size, _UNIT_BYTES)
        ]
        names: dict[str, None] = {}
        for table, size in enumerate(self.ends):
            if size:
                chunks = self.read(ReadRequest(table, 0, size, 1, None)).chunks
                names = {name: None for chunk in chunks for name in chunk.columns}
            if names:
                break
        if not names:
            raise BatchError(f"There is no row in {self.tables!s:.200}.")
        self.column_names = tuple(names)

    def read(self, request: ReadRequest) -> ReadResult:
        table, collected = request.table, dict[str | None, list[Chunk]]()
        rows, end = 0, request.stop
        for start, line in self._iter_lines(table, request.position):
            if start >= request.stop:
                break
            end = start + len(line)
            for policy_id, columns in self._parse(table, start, line, request.names):
                count = _count_rows(columns, self._describe_line(table, start))
                if count:
                    offsets = np.full(count, start, np.int64)
                    chunk = Chunk(columns, count, self.tables[table], -1, offsets, policy_id)
                    collected.setdefault(policy_id, []).append(chunk)
                    rows += count
            if rows >= request.max_rows:
                break
        return ReadResult([join_chunks(parts) for parts in collected.values()], end)

    def _iter_lines(self, table: int, position: int) -> Iterator[tuple[int, bytes]]:
        """Yields the byte offset and the content of lines that start at a position or later."""
        with open(self.tables[table], "rb") as file:
            if position:
                file.seek(position - 1)
                position += len(file.readline(_MAX_LINE_BYTES)) - 1
            while line := file.readline(_MAX_LINE_BYTES + 1):
                if len(line) > _MAX_LINE_BYTES:
                    raise BatchError(
                        f"{self._describe_line(table, position)} has more than {_MAX_LINE_BYTES} "
                        "bytes. Write shorter batches."
                    )
                yield position, line
                position += len(line)

    def _describe_line(self, table: int, offset: int) -> str:
        with open(self.tables[table], "rb") as file:
            number = 1 + _read_at_most(file, offset).count(b"\n")
        return f"Line {number} of {self.tables[table]}"

    def _parse(
        self, table: int, start: int, line: bytes, names: Sequence[str] | None
    ) -> Iterator[tuple[str | None, Columns]]:
        if not line.strip():
            return
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                self.truncated_tables.add(self.tables[table])
                return
            raise BatchError(
                f"{self._describe_line(table, start)} cannot be parsed as JSON: {error!s:.200}"
            ) from error
        try:
            yield from _read_batches(record, names)
        except BatchError as error:
            raise BatchError(f"{self._describe_line(table, start)}: {error}") from error


def _read_at_most(file: IO[bytes], size: int) -> bytes:
    return io.BytesIO(file.read(size)).getvalue()


def _read_batches(record: Any, names: Sequence[str] | None) -> Iterator[tuple[str | None, Columns]]:
    kind = record.get("type") if isinstance(record, dict) else None
    if kind == "SampleBatch":
        yield None, _read_columns(record, names)
    elif kind == "MultiAgentBatch" and isinstance(record.get("policy_batches"), dict):
        for policy_id, batch in record["policy_batches"].items():
            if not isinstance(batch, dict):
                raise BatchError(f"the batch of policy {policy_id!r:.50} must be an object.")
            yield policy_id, _read_columns(batch, names)
    else:
        raise BatchError(
            "it must be an object with a 'type' of 'SampleBatch', or 'MultiAgentBatch' with "
            f"'policy_batches', got {kind!r:.50}."
        )


def _read_columns(batch: Mapping[str, Any], names: Sequence[str] | None) -> Columns:
    columns: Columns = {}
    for name, value in batch.items():
        if name in _IGNORED or not _is_needed(name, names):
            continue
        for leaf_name, array in _iter_leaves(name, value):
            if names is None or leaf_name in names:
                columns[leaf_name] = array
            if len(columns) > _MAX_LEAVES:
                raise BatchError(f"it has more than {_MAX_LEAVES} columns.")
    if "terminateds" not in columns and "dones" in batch and _is_needed("terminateds", names):
        columns["terminateds"] = _to_array("dones", batch["dones"])
    return columns


def _is_needed(name: str, names: Sequence[str] | None) -> bool:
    if names is None:
        return name != "infos"
    return any(x == name or x.startswith(name + SEPARATOR) for x in names)


def _iter_leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a column, with the path of each part of a nested one in its name."""
    if depth > 10:
        raise BatchError(f"column {name!r:.100} is nested too deeply.")
    if isinstance(value, str):
        try:
            value = unpack_column(value)
        except BatchError as error:
            raise BatchError(f"the packed column {name!r:.50} was refused: {error}.") from error
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _iter_leaves(f"{name}{SEPARATOR}{key}", part, depth + 1)
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _iter_leaves(f"{name}{SEPARATOR}{i}", part, depth + 1)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        keys = value[0].keys()
        if any(not isinstance(row, dict) or row.keys() != keys for row in value):
            raise BatchError(f"column {name!r:.100} must have objects with the same keys.")
        for key in keys:
            parts = [row[key] for row in value]
            yield from _iter_leaves(f"{name}{SEPARATOR}{key}", parts, depth + 1)
    elif isinstance(value, list) and value and isinstance(value[0], str):
        rows = [list(_iter_leaves(name, row, depth + 1)) for row in value]
        yield name, _stack([array for row in rows for _, array in row], name)
    else:
        yield name, _to_array(name, value)


def _stack(arrays: Sequence[np.ndarray], name: str) -> np.ndarray:
    if len({array.shape for array in arrays}) > 1:
        raise BatchError(f"column {name!r:.100} has rows of different shapes.")
    return np.stack(arrays)


def _to_array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise BatchError(
            f"column {name!r:.100} must have rows of one shape: {error!s:.100}"
        ) from error
    if not array.ndim or array.dtype.kind not in "biuf":
        raise BatchError(
            f"column {name!r:.100} must be a list with a number, or nested lists of numbers, for "
            f"each row, got {value!r:.60}."
        )
    return array


def _count_rows(columns: Columns, place: str) -> int:
    sizes = {name: len(column) for name, column in columns.items()}
    if len({*sizes.values()}) > 1:
        raise BatchError(f"{place} has columns of different lengths: {sizes!s:.200}.")
    return next(iter(sizes.values()), 0)


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Joins chunks of one table and policy.

    Raises:
        BatchError: if their columns differ, or the shapes of rows.
    """
    first = chunks[0]
    if len(chunks) == 1:
        return first
    for chunk in chunks[1:]:
        if chunk.columns.keys() != first.columns.keys():
            different = sorted(chunk.columns.keys() ^ first.columns.keys())
            raise BatchError(
                f"All rows must have the same columns, but {chunk.describe_row(0)} and "
                f"{first.describe_row(0)} differ in {different!s:.200}."
            )
        for name, column in chunk.columns.items():
            expected = first.columns[name].shape[1:]
            if column.shape[1:] != expected:
                raise BatchError(
                    f"Column {name!r:.100} must have the shape {expected} in all rows, but "
                    f"{chunk.describe_row(0)} has {column.shape[1:]}."
                )
    offsets = [chunk.line_offsets for chunk in chunks]
    return Chunk(
        {name: np.concatenate([x.columns[name] for x in chunks]) for name in first.columns},
        sum(chunk.rows for chunk in chunks),
        first.table,
        first.first_row,
        None if first.line_offsets is None else np.concatenate(offsets),  # type: ignore[arg-type]
        first.policy_id,
    )


def extract_json_files(path: Path, folder: Path) -> list[Path]:
    """Extracts the `.json` files of a zip archive into a folder; returns their paths.

    Raises:
        BatchError: if it is not a zip archive, or its files are too large for its size.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".json")]
            size = sum(entry.file_size for entry in entries)
            if size > max(1 << 30, 100 * path.stat().st_size):
                raise BatchError(f"{path} claims {size} bytes of JSON. Extract it yourself.")
            result = []
            for i, entry in enumerate(entries):
                target = folder / f"{i:06d}-{Path(entry.filename).name}"
                with archive.open(entry) as source, open(target, "wb") as file:
                    remaining = entry.file_size
                    while remaining > 0 and (block := source.read(min(remaining, 1 << 20))):
                        file.write(block)
                        remaining -= len(block)
                result.append(target)
            return result
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise BatchError(f"{path} cannot be read as a zip archive: {error!s:.200}") from error
