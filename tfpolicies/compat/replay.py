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

from tfpolicies.batch.layout import SEQ_LENS, by_axis
from tfpolicies.batch.leaves import map_leaves
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch, concat_samples
from tfpolicies.errors import BatchError, CheckpointError, UnknownPolicyError, UsageError
from tfpolicies.replay.prioritized import (
    INDEXES,
    WEIGHTS,
    Priorities,
    checked_indexes,
    require_amount,
)
from tfpolicies.rules import count
from tfpolicies.storage.generator_json import decode_generator, encode_generator

_ALL_POLICIES = "__all__"
_COUNTERS = {
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
        if not count(1).holds(capacity):
            raise UsageError(f"capacity must be {count(1).words}, got {capacity!r}.")
        self.capacity = capacity
        self.storage_unit = _member(StorageUnit, "storage_unit", storage_unit)
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
            for item in self._items(batch.copy()):
                self._put(item, weight)

    def sample(self, num_items: int, **ignored: Any) -> Any:
        """Returns items concatenated in one batch, sampled with replacement.

        Raises:
            UsageError: if the buffer is empty, or `num_items` is not a count.
        """
        del ignored
        self._require_items(num_items)
        return self._joined(self._rng.integers(len(self), size=num_items))

    def stats(self, debug: bool = False) -> dict[str, Any]:
        """Returns counters by name.

        Args:
            debug: accepted and unused.
        """
        del debug
        counters = {name: getattr(self, attribute) for name, attribute in _COUNTERS.items()}
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
        for name, attribute in _COUNTERS.items():
            setattr(self, attribute, state[name])

    def _items(self, batch: Any) -> Sequence[Any]:
        if self.storage_unit is StorageUnit.FRAGMENTS:
            return [batch]
        if self.storage_unit is StorageUnit.TIMESTEPS:
            return batch.timeslices(1)
        if self.storage_unit is StorageUnit.SEQUENCES:
            return _sequences(batch)
        return [episode for episode in batch.split_by_episode() if _is_whole(episode)]

    def _put(self, item: Any, weight: float | None) -> None:
        """Writes an item at the next index, over an older one if the buffer is full."""
        self._write(self._next_idx, item, weight)
        self._count(item)
        self._next_idx += 1
        if self._num_timesteps_added_wrap >= self.capacity:
            self._eviction_started = True
            self._num_timesteps_added_wrap = self._next_idx = 0

    def _count(self, item: Any) -> None:
        self._num_timesteps_added += item.count
        self._num_timesteps_added_wrap += item.count

    def _write(self, place: int, item: Any, weight: float | None) -> None:
        del weight
        if place == len(self):
            self._storage.append(item)
        else:
            self._est_size_bytes -= self._storage[place].size_bytes()
            self._storage[place] = item
        self._est_size_bytes += item.size_bytes()

    def _require_items(self, num_items: Any) -> None:
        if not count(0).holds(num_items):
            raise UsageError(f"num_items must be {count(0).words}, got {num_items!r}.")
        if not len(self):
            raise UsageError("An empty buffer has no items to sample. Call `add(batch)` first.")

    def _joined(self, places: np.ndarray) -> Any:
        items = [self._storage[place] for place in places]
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
        self._require_items(num_items)
        require_amount("beta", beta)
        places = self._priorities.draw(num_items, self._rng)
        batch = self._joined(places)
        if isinstance(batch, SampleBatch):
            rows = [_rows(self._storage[place]) for place in places]
            batch[WEIGHTS] = np.repeat(self._priorities.weights(places, beta), rows)
            batch[INDEXES] = np.repeat(places, rows)
        return batch

    def update_priorities(self, idxes: Any, priorities: Any) -> None:
        """Sets the priorities of items; if an item occurs twice, its last priority counts.

        Args:
            idxes: `[B]`, as in the column `batch_indexes`.
            priorities: `[B]`, finite and greater than 0.

        Raises:
            UsageError: if an argument has another form. Then nothing is changed.
        """
        self._priorities.update(*checked_indexes(idxes, priorities, len(self)))

    def get_state(self) -> dict[str, Any]:
        """Returns items, which are shared and never change, priorities, counters, generator."""
        return {**super().get_state(), "priorities": self._priorities.get_state(len(self))}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`.

        Raises:
            CheckpointError: if `state` is from another class or alpha. Then nothing is changed.
        """
        filled = len(state.get("_storage", ()))
        self._priorities.checked(state.get("priorities"), filled)
        super().set_state(state)
        self._priorities.set_state(state["priorities"], filled)

    def _write(self, place: int, item: Any, weight: float | None) -> None:
        self._priorities.enter(np.array([place]), weight)
        super()._write(place, item, weight)


class ReservoirReplayBuffer(ReplayBuffer):
    """Keeps a uniform sample of all added items (Vitter 1985, algorithm R).

    Once it is full, item number n replaces a random one with probability k / n, where k
    items are kept. Its arguments are those of `ReplayBuffer`.
    """

    _num_add_calls = _num_evicted = 0

    def stats(self, debug: bool = False) -> dict[str, Any]:
        """Returns counters by name; `num_evicted` counts replaced items."""
        own = {"num_evicted": self._num_evicted, "num_add_calls": self._num_add_calls}
        return {**super().stats(debug), **own}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`; see `ReplayBuffer.set_state`."""
        super().set_state(state)
        self._num_evicted, self._num_add_calls = state["num_evicted"], state["num_add_calls"]

    def _put(self, item: Any, weight: float | None) -> None:
        """Appends an item, or writes it over a random one, or drops it."""
        self._count(item)
        self._num_add_calls += 1
        if self._num_timesteps_added <= self.capacity:
            self._write(len(self), item, weight)
            return
        self._eviction_started = True
        place = int(self._rng.integers(self._num_add_calls))
        if place < len(self):
            self._num_evicted += 1
            self._write(place, item, weight)


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
        self.replay_mode = _member(ReplayMode, "replay_mode", replay_mode)
        is_cut = self.storage_unit in (StorageUnit.SEQUENCES, StorageUnit.EPISODES)
        if self.replay_mode is ReplayMode.LOCKSTEP and is_cut:
            raise UsageError(
                f"replay_mode='lockstep' keeps steps of all policies, not {storage_unit}. Use "
                "storage_unit='timesteps' or 'fragments', or replay_mode='independent'."
            )
        self._longest = replay_sequence_length if replay_sequence_override else None
        self._zero_memory = replay_zero_init_states
        self._underlying = dict(underlying_buffer_config or {"type": ReplayBuffer})
        self._entropy = np.random.SeedSequence(seed).entropy
        self._num_added = 0
        self.replay_buffers = _Buffers(self._new_buffer)

    def __len__(self) -> int:
        return sum(len(buffer) for buffer in self.replay_buffers.values())

    def add(self, batch: Any, weight: float | None = None, **given: Any) -> None:
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
            for item in self._items(part) if part.count else ():
                self.replay_buffers[policy_id].add(item, self._weight(item, weight), **given)
        self._num_added += multi.count

    def sample(self, num_items: int, policy_id: Any = None, **given: Any) -> MultiAgentBatch:
        """Returns items of one policy, or the same number of each.

        Args:
            num_items: the number of items.
            policy_id: a policy; None for all policies, as it must be in "lockstep".
            **kwargs: further arguments of the policy's buffer.

        Raises:
            UnknownPolicyError: if no rows of this policy were added.
            UsageError: if a policy is named in "lockstep".
        """
        given = {**self._underlying, **given}
        buffers = self.replay_buffers
        if self.replay_mode is ReplayMode.LOCKSTEP:
            if policy_id is not None:
                raise UsageError("In 'lockstep' all policies are sampled: leave policy_id out.")
            return buffers[_ALL_POLICIES].sample(num_items, **given)
        chosen = [*buffers] if policy_id is None else [policy_id]
        if unknown := [name for name in chosen if name not in buffers]:
            raise UnknownPolicyError(
                f"No rows of a policy {unknown[0]!r} were added; policies with rows: {[*buffers]}."
            )
        drawn = {name: buffers[name].sample(num_items, **given) for name in chosen}
        return MultiAgentBatch(drawn, sum(batch.count for batch in drawn.values()))

    def stats(self, debug: bool = False) -> dict[str, Any]:
        """Returns the counters of each policy's buffer, under `policy_<id>`."""
        return {f"policy_{name}": each.stats(debug) for name, each in self.replay_buffers.items()}

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
        buffers = _Buffers(self._new_buffer)
        for policy_id, own in state["replay_buffers"].items():
            buffers[policy_id].set_state(own)
        self._num_added, self._entropy = state["num_added"], state["entropy"]
        self.replay_buffers = buffers

    def _items(self, batch: Any) -> Sequence[Any]:
        if self.storage_unit is StorageUnit.SEQUENCES:
            return _sequences(batch, self._longest, zero_memory=self._zero_memory)
        return super()._items(batch)

    def _weight(self, item: Any, weight: float | None) -> float | None:
        del item
        return weight

    def _new_buffer(self, policy_id: Any) -> Any:
        config = {"capacity": self.capacity, "storage_unit": "fragments", **self._underlying}
        kind = config.pop("type", ReplayBuffer)
        seed = np.random.SeedSequence([self._entropy, *str(policy_id).encode()])
        return _class_of(kind)(**{"seed": seed, **config})


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
        usual = {"type": PrioritizedReplayBuffer, **exponents}
        config = underlying_buffer_config or usual
        super().__init__(capacity, storage_unit, underlying_buffer_config=config, **settings)
        require_amount("prioritized_replay_eps", prioritized_replay_eps)
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

    def _weight(self, item: Any, weight: float | None) -> float | None:
        if weight is None and isinstance(item, SampleBatch) and WEIGHTS in item:
            return float(np.mean(item[WEIGHTS]))
        return weight


class _Buffers(dict[Any, Any]):
    """Buffers by policy id, made on first use."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, policy_id: Any) -> Any:
        return self.setdefault(policy_id, self._make(policy_id))


def _sequences(
    batch: SampleBatch, longest: int | None = None, *, zero_memory: bool = False
) -> list[SampleBatch]:
    """Returns the sequences of a batch, cut to at most `max_length` rows."""
    if SEQ_LENS not in batch or batch.layout.is_rectangular:
        raise BatchError(
            f"storage_unit='sequences' needs sequences that are not padded, by {SEQ_LENS!r}, but "
            f"the batch is {batch!r}, {batch.layout}. Use 'timesteps' or 'fragments', or a batch "
            "of a recurrent policy."
        )
    found, start = [], 0
    for i, length in enumerate(batch[SEQ_LENS].tolist()):
        for first in range(0, length, longest or length):
            rows = slice(start + first, start + min(first + (longest or length), length))
            found.append(_sequence(batch, i, rows, zero_memory=zero_memory))
        start += length
    return found


def _sequence(batch: SampleBatch, i: int, rows: slice, *, zero_memory: bool) -> SampleBatch:
    """Returns some rows of sequence `i`, with its initial state or zeros."""
    columns = {}
    for name, column, per_sequence in by_axis(batch):
        taken = slice(i, i + 1) if per_sequence else rows
        part = map_leaves(itemgetter(taken), column)
        is_memory = per_sequence and zero_memory
        columns[name] = map_leaves(np.zeros_like, part) if is_memory else part
    columns[SEQ_LENS] = np.array([rows.stop - rows.start], np.int32)
    return SampleBatch(columns)


def _is_whole(episode: SampleBatch) -> bool:
    """Returns whether rows are a complete episode, as far as their columns show it."""
    starts = np.ravel(episode.get(SampleBatch.T, [0]))[0] == 0
    terminated = episode.get(SampleBatch.TERMINATEDS, [True])[-1]
    return bool(starts and (terminated or episode.get(SampleBatch.TRUNCATEDS, [False])[-1]))


def _rows(item: SampleBatch) -> int:
    """Returns the number of entries in an item's columns, including padding."""
    lengths = item.get(SEQ_LENS) if item.layout.is_rectangular else None
    return item.count if lengths is None else len(lengths) * int(item.max_seq_len or 0)


def _member(kind: type[Any], name: str, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        choices = [each.value for each in kind]
        raise UsageError(f"{name} must be one of {choices}, got {value!r}.") from None


def _class_of(kind: Any) -> type[Any]:
    """Returns a buffer class, given itself or its name, with or without a module path.

    Raises:
        UsageError: for an unknown name.
    """
    kinds = (ReplayBuffer, PrioritizedReplayBuffer, ReservoirReplayBuffer)
    known = {each.__name__: each for each in kinds}
    found = kind if isinstance(kind, type) else known.get(str(kind).rpartition(".")[2])
    if found is None:
        raise UsageError(
            f"underlying_buffer_config['type'] must be a class or one of {[*known]}, got {kind!r}."
        )
    return found
