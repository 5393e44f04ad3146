"""Uniform replay: the newest rows in preallocated NumPy columns, sampled with replacement.

Lin 1992 ("Self-improving reactive agents"); Mnih et al. 2015 (doi:10.1038/nature14236).

The row added as number i lies at position i modulo the capacity, so one counter says where
everything is. Adding copies slices and sampling gathers rows: no Python runs per row. The memory of
rows that were never written is reserved, not used, where the operating system works that way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfpolicies.batch.layout import INFOS, SEQ_LENS
from tfpolicies.batch.leaves import map_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import BatchError, CheckpointError, ConfigError, UsageError
from tfpolicies.storage.generator_json import decode_generator, encode_generator

_STATE_KEYS = ("capacity", "num_added", "num_sampled", "rng", "columns")


class ReplayBuffer:
    """The newest `capacity` rows of one policy.

    The first batch fixes the columns, their nesting, row shapes and dtypes; `new_obs` takes memory
    only if batches have it. `infos` is left out: it is no array.

    Args:
        capacity: how many rows are kept.
        seed: of the generator that chooses rows; None draws one.
        train_batch_size: how many rows `replay` returns.
        learning_starts: how many rows must have been added before `replay` returns any.

    Raises:
        ConfigError: if an argument is out of range.

    >>> buffer = ReplayBuffer(capacity=3, seed=0)
    >>> buffer.add(SampleBatch(obs=[[0.0], [1.0], [2.0], [3.0]], rewards=[0.0, 1.0, 2.0, 3.0]))
    >>> len(buffer), buffer.num_added, sorted(set(buffer.sample(99)["rewards"].tolist()))
    (3, 4, [1.0, 2.0, 3.0])
    """

    def __init__(
        self,
        capacity: int,
        seed: int | np.random.SeedSequence | None = None,
        *,
        train_batch_size: int = 32,
        learning_starts: int = 0,
    ) -> None:
        _require_count("capacity", capacity, 1)
        _require_count("train_batch_size", train_batch_size, 1)
        _require_count("learning_starts", learning_starts, 0)
        self.capacity = capacity
        self.train_batch_size = train_batch_size
        self.learning_starts = learning_starts
        self._rng = np.random.default_rng(seed)
        self._columns: dict[str, Any] = {}
        self._leaves: dict[str, np.ndarray] = {}
        self._num_added = 0
        self._num_sampled = 0

    def __len__(self) -> int:
        return min(self._num_added, self.capacity)

    @property
    def num_added(self) -> int:
        """How many rows were ever added."""
        return self._num_added

    @property
    def num_sampled(self) -> int:
        """How many rows were ever sampled."""
        return self._num_sampled

    def add(self, batch: SampleBatch) -> None:
        """Copies the rows of `batch` in, over the oldest ones once the buffer is full.

        Raises:
            BatchError: if the batch has sequences, columns of objects, or columns that differ
                from the buffer's in name, row shape or dtype. Nothing is changed then.
        """
        leaves = self.checked(batch)
        rows = batch.count
        if not rows:
            return
        if not self._leaves:
            self._allocate(_columns_of(batch))
        skipped = max(rows - self.capacity, 0)
        start = (self._num_added + skipped) % self.capacity
        head = min(rows - skipped, self.capacity - start)
        wraps = skipped + head < rows
        for stored, leaf in zip(self._leaves.values(), leaves, strict=True):
            stored[start : start + head] = leaf[skipped : skipped + head]
            if wraps:
                stored[: rows - skipped - head] = leaf[skipped + head :]
        self._num_added += rows

    def checked(self, batch: SampleBatch) -> list[np.ndarray]:
        """Returns the arrays of `batch` in the buffer's order if `add` would accept it.

        Raises:
            BatchError: as `add` does.
        """
        if SEQ_LENS in batch or batch.time_major:
            raise BatchError(
                "A ReplayBuffer keeps single rows, but the batch has sequences "
                f"({list(batch)}, {batch.layout}). Add rows before they are cut into sequences."
            )
        leaves = dict(_leaves_of(_columns_of(batch)))
        for path, leaf in leaves.items():
            if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
                raise BatchError(
                    f"A ReplayBuffer keeps arrays of numbers, but the column {path!r} holds "
                    f"{getattr(leaf, 'dtype', type(leaf).__name__)}. Leave it out, or call "
                    "`decompress_if_needed()` on the batch."
                )
        stored = self._leaves
        if not stored or not batch.count:
            return list(leaves.values())
        if leaves.keys() != stored.keys():
            raise BatchError(
                f"All batches of a ReplayBuffer must have the same columns, but this one lacks "
                f"{sorted(stored.keys() - leaves.keys())} and adds "
                f"{sorted(leaves.keys() - stored.keys())}. Make a new buffer for other columns."
            )
        for path, kept in stored.items():
            leaf = leaves[path]
            if leaf.dtype != kept.dtype or leaf.shape[1:] != kept.shape[1:]:
                raise BatchError(
                    f"Rows of the column {path!r} must be {kept.dtype} of shape {kept.shape[1:]}, "
                    f"as in the first batch, but got {leaf.dtype} of shape {leaf.shape[1:]}. "
                    "Convert the column, or make a new buffer."
                )
        return [leaves[path] for path in stored]

    def sample(self, num_items: int) -> SampleBatch:
        """Returns `num_items` rows, each drawn from all rows, with replacement: here uniformly.

        Raises:
            UsageError: if the buffer is empty or `num_items` is no count.
        """
        if not isinstance(num_items, int | np.integer) or num_items < 0:
            raise UsageError(f"`num_items` must be a whole number from 0, but got {num_items!r}.")
        if not self._num_added:
            raise UsageError(
                "An empty ReplayBuffer has no rows to sample. Call `add(batch)` first, or use "
                "`replay()`, which returns None until there are enough rows."
            )
        batch = self._drawn(num_items)
        self._num_sampled += num_items
        return batch

    def _drawn(self, num_items: int) -> SampleBatch:
        return self._rows(self._rng.integers(len(self), size=num_items))

    def _rows(self, chosen: np.ndarray) -> SampleBatch:
        return SampleBatch(map_leaves(lambda leaf: leaf.take(chosen, 0), self._columns))

    def replay(self, policy_id: str | None = None) -> SampleBatch | None:
        """Returns `train_batch_size` rows, or None before there are enough to learn from.

        Enough is at least `train_batch_size` rows, and `learning_starts` ever added.

        Args:
            policy_id: accepted so that a buffer is a `ReplayActor`; all rows are of one policy.
        """
        del policy_id
        if self._num_added < max(self.learning_starts, min(self.train_batch_size, self.capacity)):
            return None
        return self.sample(self.train_batch_size)

    def stats(self) -> dict[str, int]:
        """Returns counters by name, and the bytes reserved."""
        return {
            "capacity": self.capacity,
            "num_entries": len(self),
            "added_count": self._num_added,
            "sampled_count": self._num_sampled,
            "size_bytes": sum(leaf.nbytes for leaf in self._leaves.values()),
        }

    def get_state(self) -> dict[str, Any]:
        """Returns all rows (copied), counters and the generator: JSON values and arrays."""
        filled = len(self)
        return {
            "capacity": self.capacity,
            "num_added": self._num_added,
            "num_sampled": self._num_sampled,
            "rng": encode_generator(self._rng),
            "columns": map_leaves(lambda leaf: leaf[:filled].copy(), self._columns),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Puts back what `get_state` returned; the next samples are the same rows again.

        Raises:
            CheckpointError: if `state` is of a buffer of another capacity, or damaged. Nothing is
                changed then.
        """
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise CheckpointError(
                f"The state of a ReplayBuffer lacks {missing}; it has {[*state]}."
            )
        if state["capacity"] != self.capacity:
            raise CheckpointError(
                f"The state is of a ReplayBuffer of capacity {state['capacity']!r}, but this one "
                f"has {self.capacity}. Make one of the same capacity."
            )
        rng = decode_generator(state["rng"])
        columns = dict(state["columns"])
        filled = min(state["num_added"], self.capacity)
        lengths = {path: np.shape(leaf)[:1] for path, leaf in _leaves_of(columns)}
        whole = all(length == (filled,) for length in lengths.values())
        if not whole or bool(columns) != bool(filled):
            raise CheckpointError(
                f"A ReplayBuffer that {state['num_added']} rows were added to holds {filled}, but "
                f"the columns of the state have {lengths}. The state is damaged."
            )
        self._columns, self._leaves = {}, {}
        if columns:
            self._allocate(columns)
            for stored, (_, leaf) in zip(self._leaves.values(), _leaves_of(columns), strict=True):
                stored[:filled] = leaf
        self._rng = rng
        self._num_added = int(state["num_added"])
        self._num_sampled = int(state["num_sampled"])

    def _allocate(self, columns: dict[str, Any]) -> None:
        def like(leaf: np.ndarray) -> np.ndarray:
            return np.empty((self.capacity, *leaf.shape[1:]), leaf.dtype)

        try:
            self._columns = map_leaves(like, columns)
        except (MemoryError, ValueError) as error:  # ValueError: more than there are addresses
            raise ConfigError(
                f"A ReplayBuffer of capacity={self.capacity} does not fit the memory: {error}. "
                "Make capacity smaller."
            ) from error
        self._leaves = dict(_leaves_of(self._columns))


def _columns_of(batch: SampleBatch) -> dict[str, Any]:
    return {name: column for name, column in batch.items() if name != INFOS}


def _leaves_of(columns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each leaf with a path that tells dicts (`obs/a`) from tuples (`obs/[0]`)."""
    for name, column in columns.items():
        if isinstance(column, dict):
            yield from _leaves_of({f"{name}/{key}": part for key, part in column.items()})
        elif isinstance(column, tuple):
            yield from _leaves_of({f"{name}/[{i}]": part for i, part in enumerate(column)})
        else:
            yield name, column


def _require_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ConfigError(f"`{name}` must be a whole number from {least}, but got {value!r}.")
