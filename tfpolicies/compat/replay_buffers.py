"""RLlib's replay buffers: items of one or more rows in a list, sampled with the core's functions.

They are for ported training loops that make buffers themselves. An item is defined by
`storage_unit`: a row ("timesteps"), a sequence, a whole episode, or one argument of `add`
("fragments"). `capacity` counts rows in all cases. Sampling, weights and errors are as in
`tfpolicies.replay`, whose buffers keep columns of arrays and are much faster.

Unknown arguments are ignored, as in RLlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from operator import itemgetter
from typing import Any

import numpy as np

from tfpolicies.base.validators import int_at_least
from tfpolicies.batch.layout import SEQ_LENS, iterate_columns
from tfpolicies.batch.leaves import map_leaves
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch, concat_samples
from tfpolicies.errors import BatchError, CheckpointError, UnknownPolicyError, UsageError
from tfpolicies.replay.prioritized import (
    INDEXES,
    WEIGHTS,
    Priorities,
    check_indexes,
    check_non_negative,
)
from tfpolicies.storage.generator_json import decode_generator, encode_generator

_ALL_POLICIES = "__all__"
_COUNTER_ATTRIBUTES = {
    "added_count": "_num_timesteps_added",
    "added_count_wrapped": "_num_timesteps_added_wrap",
    "eviction_started": "_eviction_started",
    "sampled_count": "_num_timesteps_sampled",
    "est_size_bytes": "_est_size_bytes",
}
"""Attributes of counters, by their name in statistics and states."""


class StorageUnit(Enum):
    """The unit of a buffer's items."""

    TIMESTEPS = "timesteps"
    SEQUENCES = "sequences"
    EPISODES = "episodes"
    FRAGMENTS = "fragments"


class ReplayMode(Enum):
    """Modes of sampling rows of several policies: together by step, or independently."""

    LOCKSTEP = "lockstep"
    INDEPENDENT = "independent"


class ReplayBuffer:
    """Keeps the newest items, and samples them uniformly.

    Once `capacity` rows were added, items are overwritten, starting with the first one.

    Args:
        capacity: the number of rows to keep.
        storage_unit: a `StorageUnit` or its value.
        seed: the seed of sampling; None for a random one.
        **ignored: has no effect.

    Attributes:
        capacity: the number of rows to keep.
        storage_unit: a `StorageUnit`.

    Raises:
        UsageError: if an argument is out of range.

    >>> buffer = ReplayBuffer(capacity=10, storage_unit="fragments", seed=0)
    >>> buffer.add(SampleBatch(obs=[1, 2, 3]))
    >>> len(buffer), buffer.sample(2)["obs"].tolist()
    (1, [1, 2, 3, 1, 2, 3])
    """

    def __init__(
        self,
        capacity: int = 10_000,
        storage_unit: str | StorageUnit = "timesteps",
        *,
        seed: Any = None,
        **ignored: Any,
    ) -> None:
        del ignored
        if not int_at_least(1).is_valid(capacity):
            raise UsageError(f"capacity must be {int_at_least(1).description}, got {capacity!r}.")
        self.capacity = capacity
        self.storage_unit = _parse_enum(StorageUnit, "storage_unit", storage_unit)
        self._rng = np.random.default_rng(seed)
        self._storage: list[Any] = []
        self._next_idx = 0
        self._num_timesteps_added = self._num_timesteps_added_wrap = 0
        self._num_timesteps_sampled = self._est_size_bytes = 0
        self._eviction_started = False

    def __len__(self) -> int:
        return len(self._storage)

    def add(self, batch: Any, weight: float | None = None, **ignored: Any) -> None:
        """Adds copies of the items of a `SampleBatch` or `MultiAgentBatch`.

        Args:
            batch: postprocessed rows. With "episodes", episodes without their first or last row are
                skipped.
            weight: the priority of its items, in a buffer with priorities.
            **ignored: has no effect.

        Raises:
            BatchError: if it cannot be cut into items.
        """
        del ignored
        if batch.count:
            for item in self._split_items(batch.copy()):
                self._insert(item, weight)

    def sample(self, num_items: int, **ignored: Any) -> Any:
        """Returns items concatenated in one batch, sampled with replacement.

        Raises:
            UsageError: if the buffer is empty, or `num_items` is not a count.
        """
        del ignored
        self._require_can_sample(num_items)
        return self._concat_items(self._rng.integers(len(self), size=num_items))

    def stats(self, debug: bool = False) -> dict[str, Any]:
        """Returns counters by name.

        Args:
            debug: accepted and unused.
        """
        del debug
        counters = {
            name: getattr(self, attribute) for name, attribute in _COUNTER_ATTRIBUTES.items()
        }
        return {**counters, "num_entries": len(self)}

    def get_state(self) -> dict[str, Any]:
        """Returns items, which are shared and never change, counters and the generator."""
        state = {"_storage": [*self._storage], "_next_idx": self._next_idx, **self.stats()}
        return {**state, "rng": encode_generator(self._rng)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`; the next samples are then the same.

        Raises:
            CheckpointError: if `state` is from another class. Then nothing is changed.
        """
        if missing := [key for key in ReplayBuffer.get_state(self) if key not in state]:
            raise CheckpointError(f"The state of a {type(self).__name__} lacks {missing}.")
        self._rng = decode_generator(state["rng"])
        self._storage, self._next_idx = [*state["_storage"]], state["_next_idx"]
        for name, attribute in _COUNTER_ATTRIBUTES.items():
            setattr(self, attribute, state[name])

    def _split_items(self, batch: Any) -> Sequence[Any]:
        if self.storage_unit is StorageUnit.FRAGMENTS:
            return [batch]
        if self.storage_unit is StorageUnit.TIMESTEPS:
            return batch.timeslices(1)
        if self.storage_unit is StorageUnit.SEQUENCES:
            return _split_sequences(batch)
        return [episode for episode in batch.split_by_episode() if _is_complete(episode)]

    def _insert(self, item: Any, weight: float | None) -> None:
        """Writes an item at the next index, over an older one if the buffer is full."""
        self._write(self._next_idx, item, weight)
        self._count_added(item)
        self._next_idx += 1
        if self._num_timesteps_added_wrap >= self.capacity:
            self._eviction_started = True
            self._num_timesteps_added_wrap = self._next_idx = 0

    def _count_added(self, item: Any) -> None:
        self._num_timesteps_added += item.count
        self._num_timesteps_added_wrap += item.count

    def _write(self, index: int, item: Any, weight: float | None) -> None:
        del weight
        if index == len(self):
            self._storage.append(item)
        else:
            self._est_size_bytes -= self._storage[index].size_bytes()
            self._storage[index] = item
        self._est_size_bytes += item.size_bytes()

    def _require_can_sample(self, num_items: Any) -> None:
        if not int_at_least(0).is_valid(num_items):
            raise UsageError(f"num_items must be {int_at_least(0).description}, got {num_items!r}.")
        if not len(self):
            raise UsageError("An empty buffer has no items to sample. Call `add(batch)` first.")

    def _concat_items(self, indices: np.ndarray) -> Any:
        items = [self._storage[index] for index in indices]
        batch = items[0].copy() if len(items) == 1 else concat_samples(items)
        self._num_timesteps_sampled += batch.count
        return batch.decompress_if_needed()


class PrioritizedReplayBuffer(ReplayBuffer):
    """Keeps the newest items, and samples them by priority; see `replay/prioritized.py`.

    Args:
        capacity: the number of rows to keep.
        storage_unit: a `StorageUnit` or its value.
        alpha: exponent of priorities; 0 samples uniformly.
        **settings: further arguments of `ReplayBuffer`.
    """

    def __init__(
        self,
        capacity: int = 10_000,
        storage_unit: str | StorageUnit = "timesteps",
        alpha: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(capacity, storage_unit, **settings)
        self._priorities = Priorities(capacity, alpha, beta=0.0)

    def sample(self, num_items: int, beta: float, **ignored: Any) -> Any:  # type: ignore[override]
        """Returns items with columns `weights` and `batch_indexes`, one entry per row.

        Args:
            num_items: the number of items.
            beta: exponent of importance weights; 0 gives ones.
            **ignored: has no effect.

        Raises:
            UsageError: if the buffer is empty, or `num_items` is not a count.
            ConfigError: if `beta` is not a number from 0.
        """
        del ignored
        self._require_can_sample(num_items)
        check_non_negative("beta", beta)
        indices = self._priorities.draw(num_items, self._rng)
        batch = self._concat_items(indices)
        if isinstance(batch, SampleBatch):
            rows = [_count_entries(self._storage[index]) for index in indices]
            batch[WEIGHTS] = np.repeat(self._priorities.compute_weights(indices, beta), rows)
            batch[INDEXES] = np.repeat(indices, rows)
        return batch

    def update_priorities(self, idxes: Any, priorities: Any) -> None:
        """Sets the priorities of items; if an item occurs twice, its last priority counts.

        Args:
            idxes: `[B]`, as in the column `batch_indexes`.
            priorities: `[B]`, finite and greater than 0.

        Raises:
            UsageError: if an argument has another form. Then nothing is changed.
        """
        self._priorities.update(*check_indexes(idxes, priorities, len(self)))

    def get_state(self) -> dict[str, Any]:
        """Returns items, which are shared and never change, priorities, counters, generator."""
        return {**super().get_state(), "priorities": self._priorities.get_state(len(self))}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`.

        Raises:
            CheckpointError: if `state` is from another class or alpha. Then nothing is changed.
        """
        num_items = len(state.get("_storage", ()))
        self._priorities.check_state(state.get("priorities"), num_items)
        super().set_state(state)
        self._priorities.set_state(state["priorities"], num_items)

    def _write(self, index: int, item: Any, weight: float | None) -> None:
        self._priorities.initialize(np.array([index]), weight)
        super()._write(index, item, weight)


class ReservoirReplayBuffer(ReplayBuffer):
    """Keeps a uniform sample of all added items (Vitter 1985, algorithm R).

    Once it is full, item number n replaces a random one with probability k / n, where k
    items are kept. Its arguments are those of `ReplayBuffer`.
    """

    _num_add_calls = _num_evicted = 0

    def stats(self, debug: bool = False) -> dict[str, Any]:
        """Returns counters by name; `num_evicted` counts replaced items."""
        counters = {"num_evicted": self._num_evicted, "num_add_calls": self._num_add_calls}
        return {**super().stats(debug), **counters}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`; see `ReplayBuffer.set_state`."""
        super().set_state(state)
        self._num_evicted, self._num_add_calls = state["num_evicted"], state["num_add_calls"]

    def _insert(self, item: Any, weight: float | None) -> None:
        """Appends an item, or writes it over a random one, or drops it."""
        self._count_added(item)
        self._num_add_calls += 1
        if self._num_timesteps_added <= self.capacity:
            self._write(len(self), item, weight)
            return
        self._eviction_started = True
        index = int(self._rng.integers(self._num_add_calls))
        if index < len(self):
            self._num_evicted += 1
            self._write(index, item, weight)


class MultiAgentReplayBuffer(ReplayBuffer):
    """A buffer of items for each policy, made when its first rows arrive.

    Args:
        capacity: the number of rows to keep for each policy.
        storage_unit: a `StorageUnit` or its value.
        num_shards: must be 1.
        replay_mode: "independent"; or "lockstep": an item has the rows of all policies in one
            step, which are sampled together.
        replay_sequence_override: with "sequences": whether longer ones are cut.
        replay_sequence_length: with "sequences": the longest one that is not cut.
        replay_burn_in: must be 0.
        replay_zero_init_states: with "sequences": whether each begins with a state of zeros.
        underlying_buffer_config: `{"type": ..., ...}`: class or name of each policy's buffer, and
            its arguments, including those of `sample`.
        seed: the seed of all buffers; each policy's also depends on its id.
        **ignored: has no effect.

    Attributes:
        replay_buffers: each policy's buffer by its id; in "lockstep", one by "__all__".
        replay_mode: a `ReplayMode`.

    Raises:
        UsageError: if an argument is out of range, or "lockstep" is combined with sequences or
            episodes.
    """

    def __init__(
        self,
        capacity: int = 10_000,
        storage_unit: str | StorageUnit = "timesteps",
        num_shards: int = 1,
        replay_mode: str | ReplayMode = "independent",
        replay_sequence_override: bool = True,
        replay_sequence_length: int = 1,
        replay_burn_in: int = 0,
        replay_zero_init_states: bool = True,
        underlying_buffer_config: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__(capacity, storage_unit, **ignored)
        if num_shards != 1:
            raise UsageError(f"num_shards must be 1, got {num_shards!r}; make several buffers.")
        if replay_burn_in != 0:
            raise UsageError(f"replay_burn_in must be 0, got {replay_burn_in!r}: see R2D2.")
        self.replay_mode = _parse_enum(ReplayMode, "replay_mode", replay_mode)
        is_cut = self.storage_unit in (StorageUnit.SEQUENCES, StorageUnit.EPISODES)
        if self.replay_mode is ReplayMode.LOCKSTEP and is_cut:
            raise UsageError(
                f"replay_mode='lockstep' keeps steps of all policies, not {storage_unit}. Use "
                "storage_unit='timesteps' or 'fragments', or replay_mode='independent'."
            )
        self._max_sequence_length = replay_sequence_length if replay_sequence_override else None
        self._zero_initial_states = replay_zero_init_states
        self._buffer_config = dict(underlying_buffer_config or {"type": ReplayBuffer})
        self._entropy = np.random.SeedSequence(seed).entropy
        self._num_added = 0
        self.replay_buffers = _BuffersByPolicy(self._make_buffer)

    def __len__(self) -> int:
        return sum(len(buffer) for buffer in self.replay_buffers.values())

    def add(self, batch: Any, weight: float | None = None, **kwargs: Any) -> None:
        """Adds copies of each policy's items; a `SampleBatch` belongs to the default policy.

        Raises:
            BatchError: if a batch cannot be cut into items.
        """
        if batch is None:
            return
        multi = batch.as_multi_agent()
        lockstep = self.replay_mode is ReplayMode.LOCKSTEP
        parts = {_ALL_POLICIES: multi} if lockstep else multi.policy_batches
        for policy_id, part in parts.items():
            for item in self._split_items(part) if part.count else ():
                self.replay_buffers[policy_id].add(item, self._get_weight(item, weight), **kwargs)
        self._num_added += multi.count

    def sample(self, num_items: int, policy_id: Any = None, **kwargs: Any) -> MultiAgentBatch:
        """Returns items of one policy, or the same number of each.

        Args:
            num_items: the number of items.
            policy_id: a policy; None for all policies, as it must be in "lockstep".
            **kwargs: further arguments of the policy's buffer.

        Raises:
            UnknownPolicyError: if no rows of this policy were added.
            UsageError: if a policy is named in "lockstep".
        """
        kwargs = {**self._buffer_config, **kwargs}
        buffers = self.replay_buffers
        if self.replay_mode is ReplayMode.LOCKSTEP:
            if policy_id is not None:
                raise UsageError("In 'lockstep' all policies are sampled: leave policy_id out.")
            return buffers[_ALL_POLICIES].sample(num_items, **kwargs)
        policy_ids = [*buffers] if policy_id is None else [policy_id]
        if unknown := [name for name in policy_ids if name not in buffers]:
            raise UnknownPolicyError(
                f"No rows of a policy {unknown[0]!r} were added; policies with rows: {[*buffers]}."
            )
        batches = {name: buffers[name].sample(num_items, **kwargs) for name in policy_ids}
        return MultiAgentBatch(batches, sum(batch.count for batch in batches.values()))

    def stats(self, debug: bool = False) -> dict[str, Any]:
        """Returns the counters of each policy's buffer, under `policy_<id>`."""
        return {
            f"policy_{name}": buffer.stats(debug) for name, buffer in self.replay_buffers.items()
        }

    def get_state(self) -> dict[str, Any]:
        """Returns the state of each policy's buffer, and the seed."""
        states = {name: buffer.get_state() for name, buffer in self.replay_buffers.items()}
        return {"num_added": self._num_added, "entropy": self._entropy, "replay_buffers": states}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`.

        Raises:
            CheckpointError: if `state` is from buffers of another class. Then nothing is changed.
        """
        if missing := {"num_added", "entropy", "replay_buffers"} - state.keys():
            raise CheckpointError(f"The state of a {type(self).__name__} lacks {sorted(missing)}.")
        buffers = _BuffersByPolicy(self._make_buffer)
        for policy_id, buffer_state in state["replay_buffers"].items():
            buffers[policy_id].set_state(buffer_state)
        self._num_added, self._entropy = state["num_added"], state["entropy"]
        self.replay_buffers = buffers

    def _split_items(self, batch: Any) -> Sequence[Any]:
        if self.storage_unit is StorageUnit.SEQUENCES:
            return _split_sequences(
                batch, self._max_sequence_length, zero_states=self._zero_initial_states
            )
        return super()._split_items(batch)

    def _get_weight(self, item: Any, weight: float | None) -> float | None:
        del item
        return weight

    def _make_buffer(self, policy_id: Any) -> Any:
        config = {"capacity": self.capacity, "storage_unit": "fragments", **self._buffer_config}
        kind = config.pop("type", ReplayBuffer)
        seed = np.random.SeedSequence([self._entropy, *str(policy_id).encode()])
        return _resolve_buffer_class(kind)(**{"seed": seed, **config})


class MultiAgentPrioritizedReplayBuffer(MultiAgentReplayBuffer):
    """A `PrioritizedReplayBuffer` for each policy.

    If the rows of an item have `weights`, their mean is its priority, unless `add` is given one.

    Args:
        capacity: the number of rows to keep for each policy.
        storage_unit: a `StorageUnit` or its value.
        prioritized_replay_alpha: exponent of priorities.
        prioritized_replay_beta: exponent of importance weights.
        prioritized_replay_eps: added to absolute errors by `update_priorities`.
        underlying_buffer_config: replaces the buffers with these exponents.
        **settings: further arguments of `MultiAgentReplayBuffer`.
    """

    def __init__(
        self,
        capacity: int = 10_000,
        storage_unit: str | StorageUnit = "timesteps",
        *,
        prioritized_replay_alpha: float = 0.6,
        prioritized_replay_beta: float = 0.4,
        prioritized_replay_eps: float = 1e-6,
        underlying_buffer_config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        exponents = {"alpha": prioritized_replay_alpha, "beta": prioritized_replay_beta}
        default = {"type": PrioritizedReplayBuffer, **exponents}
        config = underlying_buffer_config or default
        super().__init__(capacity, storage_unit, underlying_buffer_config=config, **settings)
        check_non_negative("prioritized_replay_eps", prioritized_replay_eps)
        self.prioritized_replay_eps = prioritized_replay_eps

    def update_priorities(self, prio_dict: Mapping[Any, tuple[Any, Any]]) -> None:
        """Sets priorities to absolute errors plus `prioritized_replay_eps`.

        Args:
            prio_dict: by policy id, `batch_indexes` `[B]` and temporal-difference errors `[B]`.

        Raises:
            UnknownPolicyError: if no rows of a policy were added.
            UsageError: as `PrioritizedReplayBuffer.update_priorities` does.
        """
        if unknown := [name for name in prio_dict if name not in self.replay_buffers]:
            raise UnknownPolicyError(f"No rows of policies {unknown} were added.")
        for policy_id, (indexes, errors) in prio_dict.items():
            priorities = np.abs(errors) + self.prioritized_replay_eps
            self.replay_buffers[policy_id].update_priorities(indexes, priorities)

    def _get_weight(self, item: Any, weight: float | None) -> float | None:
        if weight is None and isinstance(item, SampleBatch) and WEIGHTS in item:
            return float(np.mean(item[WEIGHTS]))
        return weight


class _BuffersByPolicy(dict[Any, Any]):
    """Buffers by policy id, made on first use."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, policy_id: Any) -> Any:
        return self.setdefault(policy_id, self._make(policy_id))


def _split_sequences(
    batch: SampleBatch, max_length: int | None = None, *, zero_states: bool = False
) -> list[SampleBatch]:
    """Returns the sequences of a batch, cut to at most `max_length` rows."""
    if SEQ_LENS not in batch or batch.layout.is_rectangular:
        raise BatchError(
            f"storage_unit='sequences' needs sequences that are not padded, by {SEQ_LENS!r}, but "
            f"the batch is {batch!r}, {batch.layout}. Use 'timesteps' or 'fragments', or a batch "
            "of a recurrent policy."
        )
    result, start = [], 0
    for i, length in enumerate(batch[SEQ_LENS].tolist()):
        for first in range(0, length, max_length or length):
            rows = slice(start + first, start + min(first + (max_length or length), length))
            result.append(_slice_sequence(batch, i, rows, zero_states=zero_states))
        start += length
    return result


def _slice_sequence(batch: SampleBatch, i: int, rows: slice, *, zero_states: bool) -> SampleBatch:
    """Returns some rows of sequence `i`, with its initial state or zeros."""
    columns = {}
    for name, column, per_sequence in iterate_columns(batch):
        selection = slice(i, i + 1) if per_sequence else rows
        part = map_leaves(itemgetter(selection), column)
        is_zeroed = per_sequence and zero_states
        columns[name] = map_leaves(np.zeros_like, part) if is_zeroed else part
    columns[SEQ_LENS] = np.array([rows.stop - rows.start], np.int32)
    return SampleBatch(columns)


def _is_complete(episode: SampleBatch) -> bool:
    """Returns whether rows are a complete episode, as far as their columns show it."""
    starts = np.ravel(episode.get(SampleBatch.T, [0]))[0] == 0
    terminated = episode.get(SampleBatch.TERMINATEDS, [True])[-1]
    return bool(starts and (terminated or episode.get(SampleBatch.TRUNCATEDS, [False])[-1]))


def _count_entries(item: SampleBatch) -> int:
    """Returns the number of entries in an item's columns, including padding."""
    lengths = item.get(SEQ_LENS) if item.layout.is_rectangular else None
    return item.count if lengths is None else len(lengths) * int(item.max_seq_len or 0)


def _parse_enum(kind: type[Any], name: str, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        choices = [member.value for member in kind]
        raise UsageError(f"{name} must be one of {choices}, got {value!r}.") from None


def _resolve_buffer_class(kind: Any) -> type[Any]:
    """Returns a buffer class, given itself or its name, with or without a module path."""
    kinds = (ReplayBuffer, PrioritizedReplayBuffer, ReservoirReplayBuffer)
    classes_by_name = {buffer_class.__name__: buffer_class for buffer_class in kinds}
    result = kind if isinstance(kind, type) else classes_by_name.get(str(kind).rpartition(".")[2])
    if result is None:
        raise UsageError(
            f"underlying_buffer_config['type'] must be a class or one of {[*classes_by_name]}, "
            f"got {kind!r}."
        )
    return result
