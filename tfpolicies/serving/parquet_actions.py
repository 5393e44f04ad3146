"""Computes actions for the rows of Parquet files, in batches, with pyarrow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfpolicies.base.finite_checks import is_finite
from tfpolicies.errors import (
    BatchError,
    ExportError,
    MissingColumnError,
    MissingPackageError,
    ObservationError,
    UsageError,
    show_value,
    suggest_similar_names,
)
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.serving.tensor_checks import TensorMetadata
from tfpolicies.system.atomic import replace_on_success, sync_folder
from tfpolicies.system.installed_distributions import get_install_command

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet

_BATCH_BYTES, _MAX_BATCH_ROWS = 16_000_000, 65_536
_READ_BUFFER_BYTES = 1 << 20  # bytes of a column per read


def write_actions(
    policy: OnnxPolicy,
    data: Path,
    target: Path,
    *,
    columns: Sequence[str] | None = None,
    keep: Sequence[str] | None = None,
    batch_rows: int | None = None,
    seed: int = 0,
) -> int:
    """Writes a Parquet file with the actions for each row of another one.

    Rows are independent observations. Each input of the policy is read from the column of the same
    name: a number, or a list of the numbers of an array in row-major order. The actions become the
    column `action`, or `action_<path>` for each part of a Dict or Tuple, with lists for arrays.
    Memory does not grow with the number of rows, and `target` is either complete or unchanged.

    Args:
        policy: acts, greedily or by noise if it samples.
        data: the file with observations, which must be trusted.
        target: the file to write.
        columns: other columns to read: one for each input, or one for each number of a single
            input.
        keep: the columns of `data` to copy; None for all.
        batch_rows: rows per batch; None for 16 MB of observations, and at most 65,536.
        seed: of the noise.

    Returns:
        The number of rows.

    Raises:
        MissingPackageError: if pyarrow is not installed.
        ExportError: if the policy reads earlier steps, or exceeds its limits.
        MissingColumnError: if `data` lacks a column.
        BatchError: if it is not a Parquet file, or has two columns of one name.
        ObservationError: for a column of another type, or a row that is not in the space.
        UsageError: if the number of `columns` is wrong, or a column would be written twice.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingPackageError(
            f"Parquet files are read with pyarrow, which is not installed ({error}). Install it: "
            f"{get_install_command('data')}"
        ) from error
    if policy.make_initial_carry(0):
        raise ExportError(
            f"{policy.file} has a policy that reads earlier steps, so its actions depend "
            "on the order of rows in episodes, which a table does not have. Serve it with "
            "`tfpolicies serve`, and give each episode a sequence_id."
        )
    try:
        # Without these settings pyarrow keeps all data that it has read.
        with parquet.ParquetFile(data, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES) as source:
            input_schema = _InputSchema(source.schema_arrow)
            inputs = input_schema.find_inputs(
                [TensorMetadata.from_spec(record) for record in policy.observation_ports], columns
            )
            kept_columns = input_schema.find_kept_columns(keep)
            outputs = _make_action_fields(policy)
            schema = input_schema.make_schema(kept_columns, outputs)
            rng, first_row = np.random.default_rng(seed), 0
            with replace_on_success(target) as temporary:
                with parquet.ParquetWriter(temporary, schema) as writer:
                    for batch in _iter_batches(source, inputs, kept_columns, batch_rows):
                        actions = _compute_actions(policy, inputs, batch, first_row, rng)
                        arrays = [batch.column(name) for name in kept_columns]
                        arrays += map(_to_arrow, actions, outputs)
                        writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
                        first_row += batch.num_rows
                with open(temporary, "rb") as output_file:
                    os.fsync(output_file.fileno())
            sync_folder(target.parent)
            return first_row
    except pyarrow.ArrowException as error:
        raise BatchError(f"{data} cannot be read as a Parquet file: {error!s:.200}") from error


class _PolicyInput(NamedTuple):
    """An input of the policy and the columns that it is read from."""

    tensor: TensorMetadata
    columns: Sequence[str]

    @property
    def column_shape(self) -> tuple[int, ...]:
        return self.tensor.row_shape if len(self.columns) == 1 else ()

    def read(self, batch: pyarrow.RecordBatch, first_row: int) -> np.ndarray:
        """Returns the input `[rows, ...]` for a batch; `first_row` is the number of its first row.

        Raises:
            ObservationError: if a row is not in the space.
        """
        parts = [
            _ColumnReader(name, self.tensor, self.column_shape, first_row).read(batch)
            for name in self.columns
        ]
        return np.stack(parts, axis=1).reshape(batch.num_rows, *self.tensor.row_shape)


class _InputSchema(NamedTuple):
    schema: Any

    def find_inputs(
        self, ports: Sequence[TensorMetadata], columns: Sequence[str] | None
    ) -> list[_PolicyInput]:
        """Returns the columns of each input, after checking their types."""
        names = [port.name for port in ports] if columns is None else columns
        if len(names) == len(ports):
            inputs = [_PolicyInput(port, [name]) for port, name in zip(ports, names, strict=True)]
        elif len(ports) == 1 and len(names) == math.prod(ports[0].row_shape):
            inputs = [_PolicyInput(ports[0], names)]
        else:
            counts = [f"{len(ports)}, for {', '.join(map(str, ports))}"]
            counts += [f"{math.prod(port.row_shape)}, one for each number" for port in ports[:1]]
            raise UsageError(
                f"The number of columns must be {' or '.join(counts[: 3 - len(ports)])}, got "
                f"{len(names)}: {show_value([*names])}."
            )
        if len({*self.schema.names}) < len(self.schema.names):
            raise BatchError(f"The file has two columns of one name: {self.schema.names!s:.200}.")
        for policy_input in inputs:
            for name in policy_input.columns:
                self._require_column(
                    name, " Name others with --columns." if columns is None else ""
                )
                _require_type(name, self.schema.field(name).type, policy_input.column_shape)
        return inputs

    def find_kept_columns(self, keep: Sequence[str] | None) -> list[str]:
        if keep is None:
            return [*self.schema.names]
        for name in keep:
            self._require_column(name)
        return [*keep]

    def make_schema(self, kept_columns: Sequence[str], outputs: Sequence[Any]) -> Any:
        import pyarrow

        duplicates = [field.name for field in outputs if field.name in kept_columns]
        if duplicates:
            raise UsageError(
                f"The file already has a column {duplicates[0]!r}. Name the columns to copy with "
                "--keep."
            )
        metadata = self.schema.metadata if [*kept_columns] == self.schema.names else None
        return pyarrow.schema([*map(self.schema.field, kept_columns), *outputs], metadata=metadata)

    def _require_column(self, name: str, advice: str = "") -> None:
        if name not in self.schema.names:
            raise MissingColumnError(
                "The file has no column "
                f"{name!r:.200}.{suggest_similar_names(name, self.schema.names)} It "
                f"has {self.schema.names!s:.200}.{advice}"
            )


def _iter_batches(
    source: parquet.ParquetFile,
    inputs: Sequence[_PolicyInput],
    kept_columns: Sequence[str],
    rows: int | None,
) -> Iterator[Any]:
    """Yields batches of the columns that are read or copied."""
    if rows is None:
        size = sum(
            math.prod(policy_input.tensor.row_shape) * policy_input.tensor.dtype.itemsize
            for policy_input in inputs
        )
        rows = max(1, min(_BATCH_BYTES // max(1, size), _MAX_BATCH_ROWS))
    names = {*kept_columns, *(name for policy_input in inputs for name in policy_input.columns)}
    return iter(source.iter_batches(rows, columns=sorted(names)))


def _compute_actions(
    policy: OnnxPolicy,
    inputs: Sequence[_PolicyInput],
    batch: pyarrow.RecordBatch,
    first_row: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Returns the actions for a batch, one array `[rows, ...]` for each part of the action."""
    observations = {
        policy_input.tensor.name: policy_input.read(batch, first_row) for policy_input in inputs
    }
    try:
        policy.check_observations(observations, first_row=first_row)
    except ValueError as error:
        raise ObservationError(str(error)) from error
    noise = policy.draw_noise(rng, batch.num_rows) if policy.sample else None
    try:
        return policy.get_env_actions(policy.run([*observations.values()], noise))
    except ValueError as error:
        raise ExportError(f"{error} Use fewer rows per batch: --batch.") from error


def _make_action_fields(policy: OnnxPolicy) -> list[Any]:
    """Returns the columns of actions: a number in each row, or a list with an array's numbers."""
    import pyarrow

    fields = []
    for tensor in map(TensorMetadata.from_spec, policy.action_ports):
        shape, element_type = tensor.row_shape, pyarrow.from_numpy_dtype(tensor.dtype)
        name = tensor.name.replace("actions", "action", 1)
        column_type = pyarrow.list_(element_type, math.prod(shape)) if shape else element_type
        fields.append(pyarrow.field(name, column_type))
    return fields


def _to_arrow(array: np.ndarray, field: pyarrow.Field) -> Any:
    import pyarrow

    if array.ndim == 1:
        return pyarrow.array(array, field.type)
    numbers = pyarrow.array(array.reshape(-1), field.type.value_type)
    return pyarrow.FixedSizeListArray.from_arrays(numbers, field.type.list_size)


# -- columns --------------------------------------------------------------------------------------


def _require_type(name: str, column_type: pyarrow.DataType, shape: tuple[int, ...]) -> None:
    """Checks that a column has numbers, or lists of them nested as `shape`."""
    from pyarrow import types

    inner, depth = _unwrap_lists(column_type)
    is_numeric = types.is_boolean(inner) or types.is_integer(inner) or types.is_floating(inner)
    count = math.prod(shape)
    if not is_numeric or not (depth in (1, len(shape)) or (depth == 0 and count == 1)):
        expected = f"lists of {count} numbers" if shape else "numbers"
        raise ObservationError(
            f"Column {name!r:.200} must have {expected} in its rows, but is of the type "
            f"{column_type!s:.200}."
        )


def _unwrap_lists(column_type: pyarrow.DataType) -> tuple[Any, int]:
    """Returns the type of the elements in nested lists, and the nesting depth; 0: no list."""
    from pyarrow import types

    inner, depth = getattr(column_type, "storage_type", column_type), 0
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner, depth = getattr(inner.value_type, "storage_type", inner.value_type), depth + 1
    return inner, depth


class _ColumnReader(NamedTuple):
    """A column of numbers, or of lists of numbers, for an input or for one of its numbers."""

    name: str
    tensor: TensorMetadata
    shape: tuple[int, ...]  # of one row of the column
    first_row: int  # the number of the first row

    def read(self, batch: pyarrow.RecordBatch) -> np.ndarray:
        """Returns the numbers `[rows, count]` in the dtype of the input.

        Raises:
            ObservationError: for an invalid row.
        """
        from pyarrow import compute

        array, count = batch.column(self.name), 1
        sizes = self._get_list_sizes(array.type)
        for size in sizes:
            array = getattr(array, "storage", array)
            self._require_no_null(array, count)
            lengths = compute.list_value_length(array).to_numpy(zero_copy_only=False)
            self._require_all(lengths == size, lengths, count, f"a list of {size}")
            array, count = array.flatten(), count * size
        self._require_no_null(array, count)
        numbers = self._cast(array.to_numpy(zero_copy_only=False), count)
        return numbers.reshape(batch.num_rows, count)

    def _get_list_sizes(self, column_type: pyarrow.DataType) -> tuple[int, ...]:
        _, depth = _unwrap_lists(column_type)
        return self.shape if depth == len(self.shape) else (math.prod(self.shape),) * depth

    def _cast(self, numbers: np.ndarray, count: int) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            result = numbers.astype(self.tensor.dtype, copy=False)
        if result.dtype.kind == "f":
            if not is_finite(result):
                self._require_all(np.isfinite(result), numbers, count, f"finite {result.dtype}")
        elif result.dtype != numbers.dtype:
            self._require_all(result == numbers, numbers, count, f"of {result.dtype}")
        return result

    def _require_no_null(self, array: pyarrow.Array, count: int) -> None:
        if array.null_count:
            row = self.first_row + int(np.flatnonzero(array.is_null().to_numpy(False))[0]) // count
            raise ObservationError(f"Column {self.name!r:.200} has no value in row {row}.")

    def _require_all(
        self, valid: np.ndarray, values: np.ndarray, count: int, expected: str
    ) -> None:
        if not valid.all():
            index = int(np.argmin(valid))
            raise ObservationError(
                f"Column {self.name!r:.200} must be {expected}, got {values[index]} in row "
                f"{self.first_row + index // count}."
            )
