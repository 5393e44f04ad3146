"""Uniform replay: the newest rows, sampled with replacement.

Lin 1992 ("Self-improving reactive agents"); Mnih et al. 2015 (doi:10.1038/nature14236).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpolicies.batch.layout import INFOS, SEQ_LENS
from tfpolicies.batch.leaves import iterate_named_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import BatchError, CheckpointError, ConfigError, UsageError
from tfpolicies.replay.allocator import BufferAllocator
from tfpolicies.replay.ring_storage import RingStorage
from tfpolicies.storage.generator_json import decode_generator, encode_generator

_STATE_KEYS = ("capacity", "num_added", "num_sampled", "rng", "columns")


class ReplayBuffer:
    """The newest `capacity` rows of one policy.

    The first batch determines the columns, their nesting, row shapes and dtypes; `new_obs` uses
    memory only if batches have it. `infos` is left out, since it is not an array. Each frame of
    images in `obs` and `new_obs` (rows of 4096 bytes or more) is stored once; see
    `replay/frame_store.py`.

    Args:
        capacity: the number of rows to keep.
        seed: of the generator that chooses rows; None draws one.
        train_batch_size: the number of rows that `replay` returns.
        learning_starts: the number of rows that must have been added before `replay` returns any.
        allocator: allocates memory for the rows; None creates a `BufferAllocator` with default
            arguments.

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
        allocator: BufferAllocator | None = None,
    ) -> None:
        _check_count("capacity", capacity, 1)
        _check_count("train_batch_size", train_batch_size, 1)
        _check_count("learning_starts", learning_starts, 0)
        self.capacity = capacity
        self.train_batch_size = train_batch_size
        self.learning_starts = learning_starts
        self._rng = np.random.default_rng(seed)
        self._allocator = allocator or BufferAllocator()
        self._rows: RingStorage | None = None
        self._num_sampled = 0

    def __len__(self) -> int:
        return 0 if self._rows is None else len(self._rows)

    @property
    def num_added(self) -> int:
        """The number of rows that were ever added."""
        return 0 if self._rows is None else self._rows.num_added

    @property
    def num_sampled(self) -> int:
        """The number of rows that were ever sampled."""
        return self._num_sampled

    def add(self, batch: SampleBatch) -> None:
        """Copies the rows of `batch` into the buffer, over the oldest ones once it is full.

        Raises:
            BatchError: if the batch has sequences, columns of objects, or columns that differ from
                the buffer's in name, row shape or dtype. Nothing is changed then.
            ConfigError: if there is not enough memory for the rows. Nothing is changed then.
        """
        leaves = self.check_batch(batch)
        if not batch.count:
            return
        rows = self._rows or RingStorage(self.capacity, _get_columns(batch), self._allocator)
        rows.add(leaves)
        self._rows = rows

    def check_batch(self, batch: SampleBatch) -> list[np.ndarray]:
        """Returns the arrays of `batch` in the buffer's order, if `add` would accept it.

        Raises:
            BatchError: as in `add`.
        """
        if SEQ_LENS in batch or batch.time_major:
            raise BatchError(
                "A ReplayBuffer keeps single rows, but the batch has sequences "
                f"({list(batch)}, {batch.layout}). Add rows before they are cut into sequences."
            )
        leaves = dict(iterate_named_leaves(_get_columns(batch)))
        for path, leaf in leaves.items():
            if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
                raise BatchError(
                    f"A ReplayBuffer keeps arrays of numbers, but the column {path!r} holds "
                    f"{getattr(leaf, 'dtype', type(leaf).__name__)}. Leave it out, or call "
                    "`decompress_if_needed()` on the batch."
                )
        if self._rows is None or not batch.count:
            return list(leaves.values())
        stored = self._rows.leaves
        if leaves.keys() != stored.keys():
            raise BatchError(
                f"All batches of a ReplayBuffer must have the same columns, but this one lacks "
                f"{sorted(stored.keys() - leaves.keys())} and adds "
                f"{sorted(leaves.keys() - stored.keys())}. Create a new buffer for other columns."
            )
        for path, column in stored.items():
            leaf = leaves[path]
            if leaf.dtype != column.dtype or leaf.shape[1:] != column.shape:
                raise BatchError(
                    f"Rows of the column {path!r} must be {column.dtype} of shape {column.shape}, "
                    f"as in the first batch, but got {leaf.dtype} of shape {leaf.shape[1:]}. "
                    "Convert the column, or create a new buffer."
                )
        return [leaves[path] for path in stored]

    def sample(self, num_items: int) -> SampleBatch:
        """Returns `num_items` rows, each drawn from all rows, with replacement; uniformly here.

        Raises:
            UsageError: if the buffer is empty or `num_items` is not a non-negative integer.
        """
        if not isinstance(num_items, int | np.integer) or num_items < 0:
            raise UsageError(f"`num_items` must be a whole number from 0, but got {num_items!r}.")
        if self._rows is None:
            raise UsageError(
                "An empty ReplayBuffer has no rows to sample. Call `add(batch)` first, or use "
                "`replay()`, which returns None until there are enough rows."
            )
        batch = self._draw_rows(num_items)
        self._num_sampled += num_items
        return batch

    def _draw_rows(self, num_items: int) -> SampleBatch:
        return self._take(self._rng.integers(len(self), size=num_items))

    def _take(self, indices: np.ndarray) -> SampleBatch:
        return SampleBatch() if self._rows is None else self._rows.take(indices)

    def replay(self, policy_id: str | None = None) -> SampleBatch | None:
        """Returns `train_batch_size` rows, or None if there are not enough rows yet.

        It needs `train_batch_size` rows, and `learning_starts` rows that were ever added.

        Args:
            policy_id: accepted so that policies can learn from a buffer; all rows are of one
                policy.
        """
        if self.num_added < max(self.learning_starts, min(self.train_batch_size, self.capacity)):
            return None
        return self.sample(self.train_batch_size)

    @property
    def row_bytes(self) -> int:
        """The size of a sampled row in bytes; 0 for an empty buffer."""
        return 0 if self._rows is None else self._rows.row_bytes

    def stats(self) -> dict[str, int]:
        """Returns counters by name, and the allocated memory."""
        return {
            "capacity": self.capacity,
            "num_entries": len(self),
            "added_count": self.num_added,
            "sampled_count": self._num_sampled,
            "size_bytes": 0 if self._rows is None else self._rows.nbytes,
        }

    def get_state(self) -> dict[str, Any]:
        """Returns all rows, counters and the generator: JSON values, arrays and segments.

        Segments that are complete and already stored in a checkpoint are not copied but referred
        to: such a state needs the files of that checkpoint until it is written or pickled.
        """
        empty: dict[str, Any] = {"columns": {}, "rows": [], "frames": {}}
        return {
            "capacity": self.capacity,
            "num_added": self.num_added,
            "num_sampled": self._num_sampled,
            "rng": encode_generator(self._rng),
            **(empty if self._rows is None else self._rows.get_state()),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `get_state`; the next samples are the same rows again.

        Raises:
            CheckpointError: if `state` is of a buffer with another capacity, or damaged. Nothing is
                changed then.
            ConfigError: if there is not enough memory for the rows. Nothing is changed then.
        """
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise CheckpointError(
                f"The state of a ReplayBuffer lacks {missing}; it has {[*state]}."
            )
        if state["capacity"] != self.capacity:
            raise CheckpointError(
                f"The state is of a ReplayBuffer of capacity {state['capacity']!r}, but this one "
                f"has {self.capacity}. Create one with the same capacity."
            )
        rng, added = decode_generator(state["rng"]), max(0, int(state["num_added"]))
        filled = min(added, self.capacity)
        lengths = {
            path: np.shape(leaf)[:1] for path, leaf in iterate_named_leaves(state["columns"])
        }
        expected = 0 if "rows" in state else filled  # older states have the rows in "columns"
        is_complete = all(length == (expected,) for length in lengths.values())
        if not is_complete or bool(lengths) != bool(filled):
            raise CheckpointError(
                f"A ReplayBuffer to which {added} rows were added has {filled} rows, but the "
                f"columns of the state have {lengths}. The state is damaged."
            )
        try:
            rows = (
                RingStorage.from_state(state, self.capacity, added, self._allocator)
                if filled
                else None
            )
        except (CheckpointError, ConfigError):
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"The state of a ReplayBuffer is damaged: {error}.") from error
        self._rows, self._rng, self._num_sampled = rows, rng, int(state["num_sampled"])


def _get_columns(batch: SampleBatch) -> dict[str, Any]:
    return {name: column for name, column in batch.items() if name != INFOS}


def _check_count(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"`{name}` must be a whole number from {minimum}, but got {value!r}.")
