"""Layout of the columns of a batch, and checks that columns fit together.

Functions over dicts of columns; the classes that own such dicts are in `column_batch.py` and
`sample_batch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.batch.leaves import (
    Column,
    Columns,
    Leaf,
    LeafFunction,
    count_rows,
    get_padded_positions,
    is_number,
    iterate_leaves,
    map_leaves,
    to_leaf,
)
from tfpolicies.errors import BatchError, BatchUsageError, MissingColumnError

SEQ_LENS = "seq_lens"
INFOS = "infos"
TERMINATEDS = "terminateds"
TRUNCATEDS = "truncateds"
DONES = "dones"
STATE_IN = "state_in_"
STATE_OUT = "state_out_"


class Layout(NamedTuple):
    """Positions of the rows of a batch in its columns."""

    time_major: bool = False  # columns are [T, B, ...] instead of [B * T, ...]
    zero_padded: bool = False  # every sequence takes `max_seq_len` rows
    max_seq_len: int | None = None  # None: the longest sequence's length

    @property
    def is_rectangular(self) -> bool:
        """Whether every sequence has the same number of stored rows."""
        return self.time_major or self.zero_padded

    def width(self, lengths: np.ndarray) -> int:
        """Returns the number of stored rows per padded sequence."""
        return int(lengths.max()) if self.max_seq_len is None else self.max_seq_len

    def as_keywords(self) -> dict[str, Any]:
        """Returns the private keyword arguments that give a new batch this layout."""
        return {f"_{name}": value for name, value in self._asdict().items()}


def to_columns(raw: Columns) -> dict[str, Any]:
    """Returns `raw` with numbers and lists converted to arrays; arrays and tensors are not copied.

    `infos` stays a list. `seq_lens` becomes int32 [num_seqs], also from [num_seqs, 1]; an empty one
    is dropped. A list of rows of different shapes becomes an array of objects.

    Raises:
        BatchUsageError: if a key is not a string.
        MissingColumnError: for the key `"dones"`.
        BatchError: if a value is None.
    """
    columns = {}
    for key, value in raw.items():
        if not isinstance(key, str):
            raise BatchUsageError(
                f"Columns of a batch are named by strings, but got {key!r} of type "
                f"{type(key).__name__}. Name the column."
            )
        if key == DONES:
            raise MissingColumnError(
                f"{DONES!r} can only be read: it is {TERMINATEDS!r} or {TRUNCATEDS!r}. "
                "Set those two instead."
            )
        column = value
        if key == SEQ_LENS:
            column = _to_seq_lens(value)
        elif type(value) is not np.ndarray:
            column = _to_column(key, value)
        if column is not None:
            columns[key] = column
    return columns


def _to_column(name: str, value: Column | None) -> Any:
    if name == INFOS and isinstance(value, list):
        return value
    if value is None:
        raise BatchError(
            f"A column must hold one value per row, but {name!r} is None. Leave it out instead."
        )
    return map_leaves(to_leaf, value)


def _to_seq_lens(value: Column | None) -> Any:
    if hasattr(value, "shape") and not isinstance(value, np.ndarray):
        return value  # a tensor
    lengths = np.asarray([] if value is None else value)
    if lengths.ndim == 2 and lengths.shape[1] == 1:
        lengths = lengths[:, 0]
    if lengths.shape == (0,):
        return None
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise BatchError(
            f"{SEQ_LENS!r} must be integers >= 0, one per sequence, but got {value!r}."
        )
    return lengths.astype(np.int32, copy=False)


def count_valid_rows(columns: Columns, layout: Layout) -> int | None:
    """Returns the number of rows, without padding; None if unknown inside a trace.

    Infos and states do not count as rows without other columns, and a number applies to all rows.
    """
    rows = _count_array_rows(columns, layout)
    if rows is not None:
        return rows
    lengths = columns.get(SEQ_LENS)
    expected, source, total = None, "", None
    if isinstance(lengths, np.ndarray):
        total = int(lengths.sum())
        expected, source = _count_stored_rows(lengths, layout), SEQ_LENS
    for name in sorted(columns, key=_get_count_priority):
        if name == SEQ_LENS or (
            name.startswith(STATE_IN) and _has_states_per_sequence(columns, name)
        ):
            continue
        for leaf in _get_row_leaves(columns[name]):
            rows = _count_leaf_rows(name, leaf, layout)
            if rows is not None and expected is None:
                expected, source = rows, name
            elif rows is not None and rows != expected:
                raise BatchError(
                    f"All columns of a batch must have the same number of rows, but {name!r} has "
                    f"{rows} and {source!r} requires {expected} ({layout}). Cut or pad the "
                    "column; `update` replaces several columns at once."
                )
    if total is not None or (SEQ_LENS in columns and layout.is_rectangular):
        return total
    has_rows = any(
        _get_row_leaves(x) for name, x in columns.items() if not _get_count_priority(name)
    )
    return expected if has_rows else 0


def _count_array_rows(columns: Columns, layout: Layout) -> int | None:
    """Returns the common length of plain arrays; None if a full check is needed.

    A fast path: it covers most batches.
    """
    if SEQ_LENS in columns or layout.time_major:
        return None
    lengths: set[Any] = {
        len(column) if type(column) is np.ndarray and column.ndim else None
        for column in columns.values()
    }
    if len(lengths) != 1 or all(map(_get_count_priority, columns)):
        return None
    return lengths.pop()


def _get_row_leaves(column: Column) -> list[Any]:
    return [leaf for leaf in iterate_leaves(column) if not is_number(leaf)]


def _get_count_priority(name: str) -> int:
    """Returns the rank of a column: columns of lower rank determine the expected length."""
    if name == INFOS or name.startswith(STATE_OUT):
        return 1
    return 2 if name.startswith(STATE_IN) else 0


def _count_stored_rows(lengths: np.ndarray, layout: Layout) -> int:
    if not layout.is_rectangular:
        return int(lengths.sum())
    longest, width = int(lengths.max()), layout.width(lengths)
    if longest > width:
        raise BatchError(
            f"No sequence may be longer than `max_seq_len`, but {SEQ_LENS!r} has {longest} and "
            f"max_seq_len is {width}. Chop the sequences, or raise max_seq_len."
        )
    return len(lengths) * width


def _has_states_per_sequence(columns: Columns, name: str) -> bool:
    """Whether the column has one state per sequence, not one per row."""
    lengths = columns.get(SEQ_LENS)
    if lengths is None or not isinstance(lengths, np.ndarray):
        return lengths is not None
    return all(count_rows(leaf) in (None, len(lengths)) for leaf in iterate_leaves(columns[name]))


def _count_leaf_rows(name: str, leaf: np.ndarray, layout: Layout) -> int | None:
    rows = count_rows(leaf)
    if not layout.time_major or rows is None:
        return rows
    if len(getattr(leaf, "shape", ())) < 2:
        raise BatchError(
            f"Columns of a time-major batch must be arrays [T, B, ...], but {name!r} is not. "
            "Leave the column out, or use batch-major columns."
        )
    return None if leaf.shape[1] is None else rows * leaf.shape[1]


def iterate_columns(columns: Columns) -> Iterator[tuple[str, Any, bool]]:
    """Yields each column's name, value and whether it has one entry per sequence, not per row."""
    columns = dict(columns)  # reading from a batch would be recorded and intercepted
    for name, column in columns.items():
        per_sequence = name == SEQ_LENS or (
            name.startswith(STATE_IN) and _has_states_per_sequence(columns, name)
        )
        yield name, column, per_sequence


def map_columns(
    on_rows: LeafFunction, on_sequences: LeafFunction, columns: Columns
) -> dict[str, Any]:
    """Applies one function to the leaves with an entry per row, another to those per sequence.

    Single numbers are unchanged.
    """

    def skip_numbers(function: LeafFunction) -> LeafFunction:
        return lambda leaf: leaf if is_number(leaf) else function(leaf)

    return {
        name: map_leaves(skip_numbers(on_sequences if per_sequence else on_rows), column)
        for name, column, per_sequence in iterate_columns(columns)
    }


def get_row_positions(lengths: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns the positions of the rows that are not padding, in a batch-major batch."""
    if not layout.is_rectangular:
        return np.arange(lengths.sum())
    return get_padded_positions(lengths, layout.width(lengths))


def to_batch_major(leaf: Leaf) -> Any:
    """Returns a leaf [T, B, ...] as [B * T, ...]."""
    array = np.asarray(leaf)
    return np.swapaxes(array, 0, 1).reshape(-1, *array.shape[2:])


def slice_sequences(columns: Columns, layout: Layout, first: int, last: int) -> dict[str, Any]:
    """Returns views of the whole sequences `first` to `last - 1`."""
    if layout.time_major:
        return map_columns(lambda leaf: leaf[:, first:last], lambda leaf: leaf[first:last], columns)
    lengths = columns[SEQ_LENS]
    if layout.zero_padded:
        width = layout.width(lengths)
        start, stop = first * width, last * width
    else:
        start, stop = int(lengths[:first].sum()), int(lengths[:last].sum())
    return map_columns(lambda leaf: leaf[start:stop], lambda leaf: leaf[first:last], columns)


def cut_sequences(columns: Columns, start: int, stop: int, states: slice | None) -> dict[str, Any]:
    """Returns rows `start` to `stop - 1` of an unpadded batch, cutting its sequences.

    A negative `start` adds that many rows of zeros (None in lists) in front. `states` selects the
    sequences whose states are kept; None means those that contain the rows.
    """
    lengths = columns[SEQ_LENS]
    ends = np.cumsum(lengths, dtype=np.int64)
    padding, low = max(-start, 0), max(start, 0)
    high = max(min(stop, int(ends[-1])), low)
    num_rows = high - low + padding
    if states is None:
        first = int(np.searchsorted(ends, low, side="right"))
        last = max(int(np.searchsorted(ends, high, side="left")), first) + 1
        states = slice(first, last if num_rows else first)
        new_lengths = np.minimum(ends[states], high) - np.maximum((ends - lengths)[states], low)
        new_lengths[:1] += padding
    else:
        new_lengths = lengths[states].astype(np.int64)
        new_lengths[-1:] = num_rows - new_lengths[:-1].sum()
        if (
            new_lengths.sum() != num_rows
            or (new_lengths < 0).any()
            or (new_lengths > lengths[states]).any()
        ):
            raise BatchUsageError(
                f"The sequences [{states.start}:{states.stop}] must cover the {num_rows} rows "
                f"[{start}:{stop}], but their lengths are {lengths[states].tolist()}. Leave "
                "`state_start` and `state_end` out to compute them."
            )
    result = map_columns(
        lambda leaf: _pad_left(leaf[low:high], padding), lambda leaf: leaf[states], columns
    )
    result[SEQ_LENS] = new_lengths.astype(np.int32)
    return result


def _pad_left(leaf: np.ndarray | list[Any], padding: int) -> Any:
    if not padding:
        return leaf
    if isinstance(leaf, list):
        return [None] * padding + leaf
    blank = np.zeros((padding, *leaf.shape[1:]), dtype=leaf.dtype)
    return np.concatenate([blank, leaf])
