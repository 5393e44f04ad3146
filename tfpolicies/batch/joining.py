"""Joining the columns of several batches, after checking that they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpolicies.batch.column_batch import ColumnBatch
from tfpolicies.batch.layout import Layout, by_axis
from tfpolicies.batch.leaves import concatenate_columns
from tfpolicies.errors import BatchError, MissingColumnError


def join_columns(batches: Sequence[ColumnBatch]) -> tuple[dict[str, Any], Layout]:
    """Returns the joined columns of at least one batch, none of them empty, and their layout.

    Raises:
        BatchError: if the batches differ in columns, shapes or layout. A missing column is a
            MissingColumnError.
    """
    layout = _common_layout(batches)
    for number, batch in enumerate(batches):
        _require_same_columns(batches[0], batch, number)
    columns = {
        name: concatenate_columns(
            name,
            [dict.get(batch, name) for batch in batches],
            axis=1 if layout.time_major and not per_sequence else 0,
        )
        for name, _, per_sequence in by_axis(batches[0])
    }
    return columns, layout


def _common_layout(batches: Sequence[ColumnBatch]) -> Layout:
    first = batches[0].layout
    for name in ("time_major", "zero_padded"):
        values = [getattr(batch, name) for batch in batches]
        if len(set(values)) > 1:
            raise BatchError(
                f"Batches to be joined must have the same `{name}`, but theirs are {values}. "
                "Join them before they are padded or transposed."
            )
    lengths = [batch.max_seq_len for batch in batches]
    some_have_none = None in lengths and set(lengths) != {None}
    if some_have_none or (first.is_rectangular and len(set(lengths)) > 1):
        raise BatchError(
            "Batches to be joined must all have sequences or none, padded ones of one length, but "
            f"their `max_seq_len` are {lengths}. Join them before they are padded."
        )
    return first._replace(max_seq_len=lengths[0] if first.is_rectangular else None)


def _require_same_columns(first: ColumnBatch, batch: ColumnBatch, number: int) -> None:
    missing, extra = sorted(first.keys() - batch.keys()), sorted(batch.keys() - first.keys())
    if missing:
        raise MissingColumnError(
            f"Batches to be joined must have the same columns, but batch {number} lacks {missing}, "
            "which batch 0 has. Add them, or delete them from all batches."
        )
    if extra:
        raise BatchError(
            f"Batches to be joined must have the same columns, but batch {number} has {extra}, "
            "which batch 0 lacks. Delete them, or add them to all batches."
        )
