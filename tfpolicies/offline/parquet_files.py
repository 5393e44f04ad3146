"""Parquet files as a data source: one row per step, one column per observation leaf or number.

A file has the steps of one policy, and the rows of an episode follow each other. Columns have the
names of a batch. Parts of nested spaces are separate columns, `obs.camera` and `obs.arms.0`. An
array is a list of fixed size, in row-major order. The metadata of the file have an entry
`tfpolicies`, JSON::

    {"version": 1, "observation_space": ..., "action_space": ..., "policy_id": "main"}

Spaces and `policy_id` may be missing. Other columns, and files without the entry, can be read with
`input_config={"columns": ...}`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfpolicies.errors import BatchError, MissingPackageError
from tfpolicies.offline.data_source import (
    TRUST_ADVICE,
    Chunk,
    DataSource,
    ReadRequest,
    ReadResult,
    Unit,
)
from tfpolicies.system.installed_distributions import get_install_command

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet

METADATA_KEY = b"tfpolicies"
"""The key of a file's metadata: a JSON object with spaces and policy id."""

_READ_BUFFER_BYTES = 1 << 20  # bytes of a column per read
_MAX_OPEN_FILES = 16
_MAX_CURSORS = 6  # of units that are read in turn, and the next one
_MIN_UNIT_ROWS = 1 << 12  # smaller row groups are read together
_MAX_UNIT_ROWS = 1 << 20
_TEXT_WIDTH = 128  # that a text counts, as each costs time
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # bytes
_MAX_METADATA_BYTES = 1 << 24
_MAX_GROWTH = 1000  # decoded bytes per byte of the file
_MIN_DECODED_BYTES = 64 << 20  # that any file may have


def import_parquet() -> Any:
    """Returns the module `pyarrow.parquet`.

    Raises:
        MissingPackageError: if pyarrow is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingPackageError(
            f"Parquet files are read with pyarrow, which is not installed ({error}). Install it: "
            f"{get_install_command('data')}"
        ) from error
    return parquet


class ParquetFiles(DataSource):
    """Parquet files with the same columns.

    Args:
        paths: the files.
        trusted: whether sizes are not bounded, and columns are decoded in parallel.

    Raises:
        MissingPackageError: if pyarrow is not installed.
        BatchError: if a file is not a Parquet file, has other columns than the first, or claims
            more rows than a file of its size should have and is not trusted.
    """

    def __init__(self, paths: Sequence[Path], *, trusted: bool = True) -> None:
        import_parquet()
        self.tables = [str(path) for path in paths]
        self._use_threads = trusted
        self._files: dict[int, parquet.ParquetFile] = {}
        self._cursors: dict[ReadRequest, _GroupCursor] = {}  # by the request that continues them
        self._groups: list[list[list[int]]] = []  # of each table, row groups that are read together
        self._group_starts: list[np.ndarray] = []
        units: list[Unit] = []
        names: list[str] | None = None
        for table in range(len(paths)):
            file = self._open(table)
            names = self._check_names(table, file, names)
            if not table:
                self.metadata = _read_metadata(self.tables[table], file)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            groups, starts = _merge_groups(sizes)
            self._groups.append(groups)
            self._group_starts.append(starts)
            if not trusted:
                self._check_size(table, file)
            units += [
                Unit(table, first, min(first + _MAX_UNIT_ROWS, int(stop)))
                for start, stop in itertools.pairwise(starts.tolist())
                for first in range(int(start), int(stop), _MAX_UNIT_ROWS)
            ]
        self.units = units
        self._refuse_whole_batches(names or [])
        self.ends = [int(starts[-1]) for starts in self._group_starts]
        self.column_names = tuple(names or ())

    def read(self, request: ReadRequest) -> ReadResult:
        import pyarrow

        table, position = request.table, request.position
        starts = self._group_starts[table]
        group = int(np.searchsorted(starts, position, side="right")) - 1
        cursor = self._cursors.pop(request._replace(stop=group), None)
        try:
            if cursor is None:
                groups = self._groups[table][group]
                cursor = _GroupCursor(self._open(table), groups, request, self._use_threads)
                cursor.skip(position - int(starts[group]))
            batch = cursor.next(request.stop - position)
        except MemoryError:  # some are ArrowExceptions
            raise
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise BatchError(
                f"{self.tables[table]} cannot be read as a Parquet file from row {position} on: "
                f"{_describe(error)}. Record it again, or leave it out."
            ) from error
        chunk = self._to_chunk(table, position, batch)
        end = position + chunk.rows
        if end < int(starts[group + 1]):
            if len(self._cursors) >= _MAX_CURSORS:
                self._cursors.pop(next(iter(self._cursors)))
            self._cursors[request._replace(position=end, stop=group)] = cursor
        return ReadResult([chunk], end)

    def close(self) -> None:
        self._cursors.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, table: int) -> parquet.ParquetFile:
        import pyarrow
        from pyarrow import parquet

        file = self._files.pop(table, None)
        if file is None:
            try:
                # Without these settings pyarrow keeps all data that it has read.
                options: dict[str, Any] = {"pre_buffer": False, "buffer_size": _READ_BUFFER_BYTES}
                file = parquet.ParquetFile(self.tables[table], **options)
                texts = _find_texts(file.schema_arrow)
                if texts:  # without copies of equal texts
                    file.close()
                    options["read_dictionary"] = texts
                    file = parquet.ParquetFile(self.tables[table], **options)
            except MemoryError:
                raise
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                raise BatchError(
                    f"{self.tables[table]} cannot be read as a Parquet file: {_describe(error)}. "
                    "Leave it out: if its writer was killed before it closed it, its rows are lost."
                ) from error
            while len(self._files) >= _MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files)))
        self._files[table] = file
        return file

    def _check_names(
        self, table: int, file: parquet.ParquetFile, expected: list[str] | None
    ) -> list[str]:
        names: list[str] = file.schema_arrow.names
        if len({*names}) < len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise BatchError(
                f"{self.tables[table]} must have columns with different names, but has two named "
                f"{double!r:.100}. Rename one."
            )
        if expected is not None and set(names) != set(expected):
            different = sorted({*names} ^ {*expected})
            raise BatchError(
                f"{self.tables[table]} must have the columns of {self.tables[0]}, but they differ "
                f"in {different!s:.200}. Read the files one by one."
            )
        return names

    def _refuse_whole_batches(self, names: Sequence[str]) -> None:
        """Refuses files of RLlib's `DatasetWriter`, whose rows are whole batches."""
        if "type" not in names or not self.units:
            return
        (chunk,), _ = self.read(
            ReadRequest(0, self.units[0].start, self.units[0].stop, 1, ("type",))
        )
        kind = chunk.columns["type"][0]
        if isinstance(kind, str) and kind in ("SampleBatch", "MultiAgentBatch"):
            raise BatchError(
                f"{self.tables[0]} must have a step in each row, but has whole batches, as RLlib "
                "writes them with output_config={'format': 'parquet'}. Record with 'format': "
                "'json', which is read."
            )

    def _check_size(self, table: int, file: parquet.ParquetFile) -> None:
        """Bounds the size of decoded columns before anything is allocated."""
        size = Path(self.tables[table]).stat().st_size
        limit = max(_MIN_DECODED_BYTES, _MAX_GROWTH * size)
        decoded_size = _get_decoded_size(file.metadata, file.schema_arrow)
        if decoded_size > limit:
            raise BatchError(
                f"{self.tables[table]} must not have more than {_MAX_GROWTH} bytes of rows per "
                f"byte of the file, but claims {decoded_size} in {size} bytes. "
                f"{TRUST_ADVICE}"
            )

    def _to_chunk(self, table: int, position: int, batch: pyarrow.RecordBatch) -> Chunk:
        columns = {
            name: to_numpy(name, batch.column(i), self.tables[table], position)
            for i, name in enumerate(batch.schema.names)
        }
        policy_id = self.metadata.get("policy_id")
        return Chunk(
            columns,
            batch.num_rows,
            self.tables[table],
            position,
            policy_id=policy_id if isinstance(policy_id, str) else None,
        )


class _GroupCursor:
    """Reads row groups that follow each other from their start."""

    def __init__(
        self,
        file: parquet.ParquetFile,
        groups: Sequence[int],
        request: ReadRequest,
        use_threads: bool,
    ) -> None:
        self._batches: Iterator[Any] = file.iter_batches(
            request.max_rows, row_groups=groups, columns=request.names, use_threads=use_threads
        )
        self._rest: Any = None

    def skip(self, rows: int) -> None:
        while rows:
            rows -= self.next(rows).num_rows

    def next(self, max_rows: int) -> Any:
        """Returns the next rows, at most `max_rows`."""
        batch, self._rest = self._rest, None
        if batch is None:
            batch = next(self._batches, None)
        if batch is None or not batch.num_rows:
            raise ValueError("a row group has fewer rows than the file says.")
        if batch.num_rows > max_rows:
            self._rest = batch.slice(max_rows)
        return batch.slice(0, max_rows)


def _read_metadata(name: str, file: parquet.ParquetFile) -> dict[str, Any]:
    content = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
    if content is None:
        return {}
    try:
        if len(content) > _MAX_METADATA_BYTES:
            raise ValueError(f"it has {len(content)} bytes")
        record = json.loads(content)
        if not isinstance(record, dict):
            raise ValueError(f"it is {record!r:.50}")
        return record
    except (ValueError, RecursionError) as error:
        raise BatchError(
            f"The metadata of {name} are damaged: {_describe(error)}. Write the file again."
        ) from error


def _describe(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def _merge_groups(sizes: Sequence[int]) -> tuple[list[list[int]], np.ndarray]:
    """Returns row groups that are read together, and the number of the first row of each.

    >>> groups, starts = _merge_groups([5000, 10, 0, 4090, 3])
    >>> groups, starts.tolist()
    ([[0], [1, 2, 3], [4]], [0, 5000, 9100, 9103])
    """
    groups: list[list[int]] = []
    counts: list[int] = []
    for group, size in enumerate(sizes):
        if groups and counts[-1] < _MIN_UNIT_ROWS:
            groups[-1].append(group)
            counts[-1] += size
        else:
            groups.append([group])
            counts.append(size)
    return groups, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _find_texts(schema: pyarrow.Schema) -> list[str]:
    from pyarrow import types

    return [
        field.name
        for field in schema
        if types.is_string(field.type) or types.is_large_string(field.type)
    ]


def _get_decoded_size(metadata: parquet.FileMetaData, schema: pyarrow.Schema) -> int:
    """Returns how many bytes all numbers and codes of texts have, as the metadata claim."""
    widths = [
        max(_WIDTHS.get(column.physical_type, _TEXT_WIDTH), column.length or 0)
        for column in map(metadata.schema.column, range(metadata.num_columns))
    ]
    in_chunks = sum(
        group.column(i).num_values * width
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for i, width in enumerate(widths)
    )
    in_rows = metadata.num_rows * sum(_get_least_width(field.type) for field in schema)
    return max(in_chunks, in_rows)


def _get_least_width(column_type: pyarrow.DataType) -> int:
    """Returns the least number of bytes that a row of a type has in memory."""
    from pyarrow import types

    if types.is_fixed_size_list(column_type):
        return int(column_type.list_size) * _get_least_width(column_type.value_type)
    try:
        return max(1, int(column_type.bit_width) // 8)
    except ValueError:
        return 1


def to_numpy(name: str, array: pyarrow.Array, table: str, first_row: int = 0) -> np.ndarray:
    """Returns a column as an array `[rows]`, or `[rows, ...]` for lists of equal lengths.

    Args:
        name: of the column.
        array: numbers, texts, dates, or lists of numbers.
        table: its table, for messages.
        first_row: the number of the first row, for messages.

    Raises:
        BatchError: for a missing value, lists of different lengths, or another type.
    """
    import pyarrow
    from pyarrow import compute, types

    shape: tuple[int, ...] = ()
    rows = len(array)
    array = getattr(array, "storage", array)

    def describe_row(index: int) -> str:
        return f"row {first_row + index // max(1, math.prod(shape))} of {table}"

    while types.is_nested(array.type):
        _require_no_null(name, array, describe_row)
        if types.is_fixed_size_list(array.type):
            size = int(array.type.list_size)
        elif types.is_list(array.type) or types.is_large_list(array.type):
            lengths = compute.list_value_length(array).to_numpy(zero_copy_only=False)
            size = int(lengths[0]) if len(lengths) else 0
            if (lengths != size).any():
                index = int(np.argmax(lengths != size))
                raise BatchError(
                    f"Column {name!r:.100} must have lists of equal lengths, but {describe_row(0)} "
                    f"has one of {size} and {describe_row(index)} one of {lengths[index]}. Fill "
                    "them up, or leave the column out."
                )
        else:
            raise BatchError(
                f"Column {name!r:.100} must have numbers or lists of numbers, but is of the type "
                f"{array.type!s:.100}. Write each part as a column of its own."
            )
        shape = (*shape, size)
        array = array.flatten()
        array = getattr(array, "storage", array)
    _require_no_null(name, array, describe_row)
    if types.is_dictionary(array.type):
        if _is_text(array.dictionary.type) and not shape:
            return _decode_texts(array)
        array = array.dictionary_decode()
    is_number = types.is_integer(array.type) or types.is_floating(array.type)
    is_label = _is_text(array.type) or types.is_date(array.type) or types.is_timestamp(array.type)
    if not (is_number or types.is_boolean(array.type) or (is_label and not shape)):
        raise BatchError(
            f"Column {name!r:.100} must have numbers, lists of numbers or texts, but is of the "
            f"type {array.type!s:.100}. Convert it, or leave it out."
        )
    if is_label and types.is_date(array.type):
        array = array.cast(pyarrow.date64()).cast(pyarrow.int64())
    elif is_label and types.is_timestamp(array.type):
        array = array.cast(pyarrow.int64())
    result = array.to_numpy(zero_copy_only=False)
    return result.reshape(rows, *shape) if shape else result


def _is_text(column_type: pyarrow.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_string(column_type) or types.is_large_string(column_type))


def _decode_texts(array: pyarrow.DictionaryArray) -> np.ndarray:
    """Returns texts as objects; equal ones are one object."""
    texts = np.array(array.dictionary.to_pylist(), object)
    result: np.ndarray = texts[array.indices.to_numpy(zero_copy_only=False)]
    return result


def _require_no_null(name: str, array: pyarrow.Array, describe_row: Callable[[int], str]) -> None:
    if array.null_count:
        index = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise BatchError(
            f"Column {name!r:.100} must have a value in each row, but {describe_row(index)} has "
            "none. Fill it in, or leave the row out."
        )
