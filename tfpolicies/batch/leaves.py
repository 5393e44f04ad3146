"""Functions for the arrays inside of columns.

A column is one array, or a dict or tuple of columns (observations of a Dict or Tuple space). Its
arrays are the *leaves*. A list is also a leaf (`infos` is one). Leaves that are neither NumPy
arrays nor lists (tensors) are passed through unchanged where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.compression import PackedColumn
from tfpolicies.errors import BatchError

if TYPE_CHECKING:
    import tensorflow as tf

Leaf: TypeAlias = Union[np.ndarray, list[Any], PackedColumn, "tf.Tensor"]
Column: TypeAlias = Leaf | dict[str, "Column"] | tuple["Column", ...]
Columns: TypeAlias = Mapping[str, Any]
"""Columns by name."""
LeafFunction: TypeAlias = Callable[[Any], Any]


def map_leaves(function: LeafFunction, column: Column) -> Any:
    """Returns `column` with `function` applied to each leaf.

    >>> map_leaves(len, {"a": [1, 2], "b": ([3], [])})
    {'a': 2, 'b': (1, 0)}
    """
    if isinstance(column, dict):
        return {key: map_leaves(function, part) for key, part in column.items()}
    if isinstance(column, tuple):
        return tuple(map_leaves(function, part) for part in column)
    return function(column)


def split_rows(column: Column) -> list[Any]:
    """Returns the rows of a column as a list, each with the same nesting.

    >>> split_rows({"a": np.array([1, 2])})
    [{'a': np.int64(1)}, {'a': np.int64(2)}]
    """
    rows = count_rows(next(iterate_leaves(column))) or 0
    return [map_leaves(itemgetter(i), column) for i in range(rows)]


def expand_batch_axis(value: Structure) -> Any:
    """Returns one observation or action, possibly nested, as a batch of one row.

    >>> expand_batch_axis({"a": 3})
    {'a': array([3])}
    """
    if isinstance(value, Mapping):
        return {key: expand_batch_axis(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(expand_batch_axis(part) for part in value)
    return np.asarray(value)[None]


def get_first_row(value: Structure) -> Any:
    """Returns the first row of a batch, possibly nested.

    >>> get_first_row(([7, 8], {"a": [9, 10]}))
    (7, {'a': 9})
    """
    return map_leaves(itemgetter(0), value)


def iterate_leaves(column: Column) -> Iterator[Any]:
    if isinstance(column, dict):
        column = tuple(column.values())
    if isinstance(column, tuple):
        for part in column:
            yield from iterate_leaves(part)
    else:
        yield column


def to_leaf(value: Any) -> Any:
    """Returns `value` itself if it is an array or a tensor, otherwise as a NumPy array.

    A list of rows of different shapes becomes an array of objects, one per row.
    """
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return value
    try:
        return np.asarray(value)
    except ValueError:
        rows = np.empty(len(value), object)
        for i, row in enumerate(value):
            rows[i] = row
        return rows


def is_number(leaf: Leaf) -> bool:
    """Whether a leaf is a single number, which applies to a whole batch and not to a row.

    >>> is_number(np.asarray(3)), is_number(np.zeros(1)), is_number([])
    (True, False, False)
    """
    return getattr(leaf, "shape", None) == ()


def count_rows(leaf: Leaf) -> int | None:
    """Returns the length of the leaf's first axis: 0 for a scalar, None if unknown in a trace."""
    shape = getattr(leaf, "shape", None)
    if shape is None:
        return len(leaf)
    return shape[0] if len(shape) else 0


def take_rows(leaf: Leaf, indices: np.ndarray) -> Any:
    """Returns the rows of `leaf` at `indices` [K] as a new array or list."""
    if is_number(leaf):
        return leaf
    if isinstance(leaf, list):
        return [leaf[i] for i in indices]
    return leaf[indices] if isinstance(leaf, PackedColumn) else np.asarray(leaf)[indices]


def scatter_rows(leaf: Leaf, positions: np.ndarray, total: int) -> Any:
    """Returns `total` rows, with row k of `leaf` at `positions[k]` and padding elsewhere.

    The padding is zero, or None in lists and in columns of objects or text.

    >>> scatter_rows(np.array([5, 6, 7]), np.array([0, 2, 3]), 5)
    array([5, 0, 6, 7, 0])
    """
    if isinstance(leaf, list):
        rows: list[Any] = [None] * total
        for position, row in zip(positions, leaf, strict=True):
            rows[position] = row
        return rows
    if isinstance(leaf, PackedColumn):
        return leaf[positions]
    if is_number(leaf):
        return leaf
    array = np.asarray(leaf)
    shape = (total, *array.shape[1:])
    if array.dtype.kind in "OSU":
        result = np.full(shape, None, dtype=object)
    else:
        result = np.zeros(shape, dtype=array.dtype)
    result[positions] = array
    return result


def get_padded_positions(seq_lens: np.ndarray, max_seq_len: int) -> np.ndarray:
    """Returns the positions of rows after padding every sequence to `max_seq_len` rows.

    >>> get_padded_positions(np.array([2, 1]), 3)
    array([0, 1, 3])
    """
    lengths = np.asarray(seq_lens, dtype=np.int64)
    shifts = np.arange(len(lengths)) * max_seq_len - (np.cumsum(lengths) - lengths)
    return np.arange(lengths.sum()) + np.repeat(shifts, lengths)


def concatenate_columns(name: str, columns: Sequence[Any], axis: int = 0) -> Any:
    """Joins columns of one structure leaf by leaf along `axis`."""
    first = columns[0]
    if isinstance(first, dict | tuple):
        if any(_get_keys(column) != _get_keys(first) for column in columns):
            raise BatchError(
                f"Batches to be joined must have the same parts in each column, but those of "
                f"{name!r} are {sorted({str(_get_keys(column)) for column in columns})}. "
                "Give all batches one observation and action space."
            )
        keys = _get_keys(first)
        parts = {
            key: concatenate_columns(f"{name}/{key}", [column[key] for column in columns], axis)
            for key in keys
        }
        return parts if isinstance(first, dict) else tuple(parts.values())
    if any(isinstance(leaf, list) for leaf in columns):
        return [row for leaf in columns for row in leaf]
    if any(isinstance(leaf, PackedColumn) for leaf in columns):
        raise BatchError(
            f"Columns packed as a whole cannot be joined, but {name!r} is packed. "
            "Call `decompress_if_needed()` on each batch first."
        )
    if all(is_number(leaf) and leaf == first for leaf in columns):
        return first
    try:
        return np.concatenate(columns, axis=axis)
    except ValueError as error:
        raise BatchError(
            f"Batches to be joined must have rows of one shape in each column, but those of "
            f"{name!r} have shapes {[np.shape(leaf) for leaf in columns]}."
        ) from error


def _get_keys(column: Column) -> list[Any]:
    if isinstance(column, dict):
        return list(column)
    return list(range(len(column))) if isinstance(column, tuple) else ["array"]


def iterate_named_leaves(columns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each leaf with a path that distinguishes dicts (`obs/a`) from tuples (`obs/[0]`).

    >>> dict(iterate_named_leaves({"obs": {"a": 1}, "actions": (2, 3)}))
    {'obs/a': 1, 'actions/[0]': 2, 'actions/[1]': 3}
    """
    for name, column in columns.items():
        if isinstance(column, dict):
            yield from iterate_named_leaves({f"{name}/{key}": part for key, part in column.items()})
        elif isinstance(column, tuple):
            yield from iterate_named_leaves(
                {f"{name}/[{i}]": part for i, part in enumerate(column)}
            )
        else:
            yield name, column
