"""Batches of recorded experience that are taken item by item, in random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.leaves import map_leaves
from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.offline.step_columns import EPS_ID, T


class LoadedBlock:
    """Batches whose items, rows or sequences, are taken in a given order.

    Attributes:
        offset: how many items were taken.
    """

    def __init__(
        self,
        batches: Mapping[str, SampleBatch],
        order: np.ndarray,
        offset: int = 0,
        whole_trajectories: bool = False,
    ) -> None:
        self._batches = batches
        self._order = order
        self.offset = offset
        self._bounds = np.cumsum([0, *(count_items(batch) for batch in batches.values())])
        lengths = [_get_item_rows(batch) for batch in batches.values()]
        has_sequences = any(batch.get("seq_lens") is not None for batch in batches.values())
        self._item_rows = np.concatenate(lengths) if has_sequences else None
        ids = [batch.get("unroll_id") for batch in batches.values()]
        has_ids = len(ids) == 1 and ids[0] is not None and not has_sequences
        self._trajectories = ids[0] if whole_trajectories and has_ids else None

    @property
    def is_empty(self) -> bool:
        return self.offset >= len(self._order)

    def take(self, rows: int) -> tuple[dict[str, SampleBatch], int]:
        """Takes items of at least `rows` rows, or all; returns batches and number of rows."""
        remaining = self._order[self.offset :]
        if self._item_rows is None:
            items = remaining[: self._extend(rows)]
            count = len(items)
        else:
            totals = np.cumsum(self._item_rows[remaining])
            number = int(np.searchsorted(totals, rows)) + 1
            items = remaining[:number]
            count = int(totals[min(number, len(totals)) - 1]) if len(totals) else 0
        self.offset += len(items)
        batches = {}
        for i, (policy_id, batch) in enumerate(self._batches.items()):
            own = items
            if len(self._batches) > 1:
                own = items[(items >= self._bounds[i]) & (items < self._bounds[i + 1])]
                own = own - self._bounds[i]
            if len(own):
                batches[policy_id] = _take_items(batch, own)
        return batches, count

    def _extend(self, rows: int) -> int:
        """Returns how many items to take, so that the last trajectory is whole."""
        if self._trajectories is None or self.offset + rows >= len(self._order):
            return rows
        following = self._trajectories[self._order[self.offset + rows - 1 :]]
        changes = np.flatnonzero(following != following[0])
        return rows + (int(changes[0]) if len(changes) else len(following)) - 1

    def get_rows(self) -> dict[str, Any]:
        """Returns all rows and their order, as plain values and arrays."""
        return {
            "order": self._order,
            "batches": [[pid, dict(batch)] for pid, batch in self._batches.items()],
        }

    @classmethod
    def from_rows(
        cls, state: Mapping[str, Any], offset: int, whole_trajectories: bool
    ) -> LoadedBlock:
        """Restores a block from `get_rows`."""
        batches = {pid: SampleBatch(columns) for pid, columns in state["batches"]}
        return cls(batches, np.asarray(state["order"]), offset, whole_trajectories)


def count_items(batch: SampleBatch) -> int:
    lengths = batch.get("seq_lens")
    return batch.count if lengths is None else len(lengths)


def _get_item_rows(batch: SampleBatch) -> np.ndarray:
    lengths = batch.get("seq_lens")
    return np.ones(batch.count, np.int64) if lengths is None else np.asarray(lengths)


def _take_items(batch: SampleBatch, items: np.ndarray) -> SampleBatch:
    lengths = batch.get("seq_lens")
    if lengths is None:
        return SampleBatch({name: _take_rows(column, items) for name, column in batch.items()})
    starts = np.cumsum(lengths) - lengths
    chosen = lengths[items]
    offsets = np.arange(chosen.sum()) - np.repeat(np.cumsum(chosen) - chosen, chosen)
    rows = np.repeat(starts[items], chosen) + offsets
    columns = {}
    for name, column in batch.items():
        is_per_sequence = name == "seq_lens" or name.startswith("state_in_")
        columns[name] = _take_rows(column, items if is_per_sequence else rows)
    return SampleBatch(columns)


def _take_rows(column: Any, rows: np.ndarray) -> Any:
    return map_leaves(lambda leaf: leaf.take(rows, axis=0), column)  # 3 times as fast as indexing


def join_batches(batches: Sequence[SampleBatch]) -> Any:
    return batches[0] if len(batches) == 1 else concat_samples(list(batches))


def count_env_steps(batches: Mapping[str, SampleBatch]) -> int:
    """Returns how many environment steps the rows of several policies belong to."""
    if all(EPS_ID in batch and T in batch for batch in batches.values()):
        steps = [np.stack([batch[EPS_ID], batch[T]], axis=1) for batch in batches.values()]
        return len(np.unique(np.concatenate(steps), axis=0))
    return max(batch.count for batch in batches.values())
