"""Data sources in memory: dicts of arrays, pandas data frames, `tf.data` and Ray datasets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
from tfpolicies.offline.step_columns import iter_parts

_UNIT_ROWS = 1 << 14
_END_OF_STREAM = 1 << 62  # a position after any row


class ArrayData(DataSource):
    """Columns in memory.

    Args:
        data: arrays `[rows, ...]` by name; those of nested columns in dicts or tuples.
        name: for messages.

    Raises:
        BatchError: if columns have different lengths, or no rows.
    """

    def __init__(self, data: Mapping[str, Any], name: str = "the data") -> None:
        self.tables = [name]
        self._columns: Columns = _flatten(data)
        sizes = {x: len(column) for x, column in self._columns.items()}
        if len({*sizes.values()}) != 1 or not next(iter(sizes.values())):
            raise BatchError(
                f"{name} must have columns with the same number of rows, at least 1, got "
                f"{sizes!s:.300}. Cut or fill up the columns."
            )
        rows = next(iter(sizes.values()))
        self.ends = [rows]
        self.column_names = tuple(self._columns)
        self.units = [
            Unit(0, start, min(start + _UNIT_ROWS, rows)) for start in range(0, rows, _UNIT_ROWS)
        ]

    def read(self, request: ReadRequest) -> ReadResult:
        position, names = request.position, request.names
        stop = min(position + request.max_rows, request.stop)
        columns = {
            name: column[position:stop]
            for name, column in self._columns.items()
            if names is None or name in names
        }
        return ReadResult([Chunk(columns, stop - position, self.tables[0], position)], stop)


def _flatten(data: Mapping[str, Any]) -> Columns:
    """Returns the leaves of nested columns by name, as arrays `[rows, ...]`."""
    return {
        leaf_name: _to_rows(leaf_name, leaf)
        for name, column in data.items()
        for leaf_name, leaf in iter_parts(str(name), column)
    }


def _to_rows(name: str, column: Any) -> np.ndarray:
    try:
        array = np.asarray(column)
        if array.ndim and array.dtype == object and len(array) and np.ndim(array[0]):
            array = np.stack([np.asarray(row) for row in array])
    except ValueError as error:
        raise BatchError(
            f"Column {name!r:.100} must have rows of one shape: {error!s:.100}. Fill them up, or "
            "leave the column out."
        ) from error
    if array.dtype.kind == "M":
        array = array.astype(np.int64)
    if not array.ndim:
        raise BatchError(
            f"Column {name!r:.100} must be an array [rows, ...], got {column!r:.50}. Give a value "
            "for each row."
        )
    return array


class StreamData(DataSource):
    """A stream of batches, such as a `tf.data.Dataset` or a shard of a Ray dataset.

    It is read from its start once per epoch. A stream cannot seek, so its rows are not read again
    after they were handed out, also if the worker that got them fails: each is read at most once
    per epoch.

    Args:
        make_batches: starts the stream: returns an iterable of dicts of arrays `[rows, ...]`.
        name: for messages.

    Raises:
        BatchError: if it has no batch.
    """

    can_seek = False

    def __init__(self, make_batches: Any, name: str) -> None:
        self.tables = [name]
        self._make_batches = make_batches
        self._iterator: Iterator[Mapping[str, Any]] = iter(())
        self._position = -1
        self._rest: Chunk | None = None
        first = next(iter(make_batches()), None)
        if first is None:
            raise BatchError(f"{name} must have rows, but has none. Give other data.")
        self.column_names = tuple(_flatten(first))
        self.ends = [_END_OF_STREAM]
        self.units = [Unit(0, 0, _END_OF_STREAM)]

    def read(self, request: ReadRequest) -> ReadResult:
        if request.position != self._position:
            self._start(request.position)
        chunk, names = self._next_chunk(), request.names
        if chunk is None:
            self._position = -1
            return ReadResult([], request.stop)
        max_rows = request.max_rows
        if chunk.rows > max_rows:
            self._rest, chunk = chunk.take(slice(max_rows, None)), chunk.take(slice(max_rows))
        self._position = request.position + chunk.rows
        columns = chunk.columns
        chunk.columns = {x: columns[x] for x in columns if names is None or x in names}
        return ReadResult([chunk], self._position)

    def _start(self, position: int) -> None:
        self._iterator, self._rest, self._position = iter(self._make_batches()), None, 0
        while self._position < position:
            chunk = self._next_chunk()
            if chunk is None:
                break
            skipped = min(chunk.rows, position - self._position)
            self._position += skipped
            self._rest = chunk.take(slice(skipped, None)) if skipped < chunk.rows else None

    def _next_chunk(self) -> Chunk | None:
        if self._rest is not None:
            chunk, self._rest = self._rest, None
            return chunk
        for batch in self._iterator:
            columns = _flatten(batch)
            rows = {len(column) for column in columns.values()}
            if len(rows) > 1:
                sizes = {name: len(column) for name, column in columns.items()}
                raise BatchError(
                    f"{self.tables[0]} must have batches whose columns have one length, got "
                    f"{sizes!s:.300}. Mend the function that makes them."
                )
            if rows and (count := rows.pop()):
                return Chunk(columns, count, self.tables[0], self._position)
        return None


def make_frame_data(frame: Any) -> ArrayData:
    """Returns a pandas data frame as a data source."""
    columns = {str(name): frame[name].to_numpy() for name in frame.columns}
    return ArrayData(columns, "the data frame")


def make_tf_data(dataset: Any, batch_rows: int = 4096) -> StreamData:
    """Returns a `tf.data.Dataset` of dicts, of single rows or of batches, as a data source.

    Raises:
        BatchError: if its elements are not dicts.
    """
    spec = dataset.element_spec
    if not isinstance(spec, Mapping):
        raise BatchError(
            "The elements of a tf.data.Dataset must be dicts of columns, such as {'obs': ..., "
            f"'actions': ...}}, got {type(spec).__name__}."
        )
    batched = dataset if "rewards" in spec and spec["rewards"].shape.rank else None
    if batched is None:
        ranks = [x.shape.rank for x in spec.values() if hasattr(x, "shape")]
        batched = dataset.batch(batch_rows) if 0 in ranks else dataset
    return StreamData(batched.as_numpy_iterator, "the tf.data.Dataset")


def make_ray_data(shard: Any, batch_rows: int = 4096) -> StreamData:
    """Returns a shard of a Ray dataset as a data source."""

    def make_batches() -> Iterable[Mapping[str, Any]]:
        batches: Iterable[Mapping[str, Any]] = shard.iter_batches(
            batch_size=batch_rows, batch_format="numpy"
        )
        return batches

    return StreamData(make_batches, "the dataset shard")
