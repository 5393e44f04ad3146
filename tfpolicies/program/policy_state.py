"""The state of one policy: all of its variables, as NumPy arrays of a fixed layout.

A state holds the policy's networks: the one that acts (the part `model`) and any others by name. A
network may have a target network (the part `target`, `critic_target`) and has an optimizer (the
part `learner`, `critic_learner`). All variables of one part and dtype are consecutive in one
vector, a *segment*, and all segments are in one block of memory. So loading, saving or stacking a
state copies a few segments, however many variables there are, and paging it is one read or write.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tfpolicies.errors import FrozenPolicyError

tick: Callable[[], int] = itertools.count(1).__next__
"""Returns a larger number with each call: the timestamps of the last use of states."""

_ALIGNMENT = 64  # bytes
_MIN_OWN_BUFFER = 4096  # elements; a variable of this size or more has a buffer for itself
_NO_MEMORY = np.zeros(0, np.uint8)

ACTING_PARTS = ("model", "filter")
"""The parts that acting reads; all others are for learning only."""


class Slot(NamedTuple):
    """One variable of a state."""

    key: str  # canonical: position and role, never an auto-numbered name
    shape: tuple[int, ...]
    dtype: str
    part: str  # "model", "filter" or another network, a target network, an optimizer

    @property
    def segment(self) -> str:
        """The segment that holds this variable, for example `model/float32`."""
        return f"{self.part}/{self.dtype}"


class NetworkParts(NamedTuple):
    """The names of the parts of a state that belong to one network."""

    part: str = "model"  # its variables
    target: str = "target"  # its target network, if the layout has this part
    optimizer: str = "learner"  # the optimizer's variables

    @classmethod
    def for_network(cls, name: str) -> NetworkParts:
        """Returns the parts of a network by its name; "model" is the network that acts."""
        return cls() if name == "model" else cls(name, f"{name}_target", f"{name}_learner")


class StateLayout:
    """The order, shapes and dtypes of the variables of all policies with the same Program.

    Args:
        slots: the variables, in the order of the memory within their segment.
        unused: the keys of variables that nothing reads, so that they are not weights.
        networks: the names of the networks, the one that acts first.

    Attributes:
        acting_slots: the variables that acting reads.
        acting_buffers: the buffers that hold variables of `acting`.
        networks: the parts that are networks.
        targets: the parts that are target networks.
        networks_with_targets: the networks of the target networks, in the same order.
        optimizers: the parts that are optimizers.
        updated_parts: the parts that an update changes.
        buffers: the buffers in which an update returns its new values, by name: one tensor for each
            large variable, and one for the small variables of a segment. Large ones are not joined:
            depending on the addresses, which differ in each process, XLA's loops for that are up to
            five times slower.
        segment_sizes: the number of elements of each segment, by name.
        num_bytes: the memory of one state; segments begin at multiples of 64 bytes.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        unused: Collection[str] = (),
        networks: Sequence[str] = ("model",),
    ) -> None:
        self.slots = tuple(slots)
        self.acting_slots = self.get_slots(*ACTING_PARTS)
        self._unused = frozenset(unused)
        network_parts = [NetworkParts.for_network(name) for name in networks]
        present = {slot.part for slot in slots}
        self.networks = tuple(network.part for network in network_parts)
        self._network_by_target = {
            network.target: network.part for network in network_parts if network.target in present
        }
        self.targets, self.networks_with_targets = (
            tuple(self._network_by_target),
            tuple(self._network_by_target.values()),
        )
        self.optimizers = tuple(network.optimizer for network in network_parts)
        self.updated_parts = self.networks + self.targets + self.optimizers
        self.segment_sizes: dict[str, int] = {}
        self._slices: list[tuple[Slot, int, int]] = []
        for slot in self.slots:
            start = self.segment_sizes.get(slot.segment, 0)
            stop = start + math.prod(slot.shape)
            self._slices.append((slot, start, stop))
            self.segment_sizes[slot.segment] = stop
        self.buffers: dict[str, list[Slot]] = {}
        for slot in self.get_slots(*self.updated_parts):
            name = (
                slot.key if math.prod(slot.shape) >= _MIN_OWN_BUFFER else f"small of {slot.segment}"
            )
            self.buffers.setdefault(name, []).append(slot)
        self.acting_buffers = [
            name for name, [x, *_] in self.buffers.items() if x.part in ACTING_PARTS
        ]
        self._segment_slices: list[tuple[str, int, int, str]] = []
        self.num_bytes = 0
        for name, count in self.segment_sizes.items():
            dtype = name.partition("/")[2]
            stop = self.num_bytes + count * np.dtype(dtype).itemsize
            self._segment_slices.append((name, self.num_bytes, stop, dtype))
            self.num_bytes = stop + -stop % _ALIGNMENT

    @functools.cached_property
    def acting(self) -> StateLayout:
        """The layout of a frozen state, which has only the variables that acting reads."""
        return StateLayout(self.acting_slots, self._unused)

    def get_slots(self, *parts: str) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.part in parts)

    def get_weight_slots(self, *parts: str) -> tuple[Slot, ...]:
        """Returns the slots of some parts, in order, without the variables that nothing reads."""
        return tuple(slot for slot in self.get_slots(*parts) if slot.key not in self._unused)

    def pair_target_segments(self, target: str) -> list[tuple[str, str]]:
        """Returns the segments of a target network, each with that of its network, by name."""
        source = self._network_by_target[target]
        names = self.get_segment_names(target)
        return [(name, f"{source}/{name.partition('/')[2]}") for name in names]

    def get_segment_names(self, *parts: str) -> list[str]:
        """Returns the segment names of some parts, in the order of their first slot."""
        return [name for name in self.segment_sizes if name.partition("/")[0] in parts]

    def allocate(self) -> np.ndarray:
        """Returns new memory for one state, filled with zeros: uint8 `[num_bytes]`."""
        return np.zeros(self.num_bytes, np.uint8)

    def view_segments(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        """Returns one view per segment, by name, into the memory of a state."""
        return {
            name: memory[start:stop].view(dtype)
            for name, start, stop, dtype in self._segment_slices
        }

    def complete_segments(self, segments: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns all segments by name: the given ones, and zeros for those that are missing."""
        return {
            name: segments[name] if name in segments else np.zeros(count, name.partition("/")[2])
            for name, count in self.segment_sizes.items()
        }

    def view_variables(self, segments: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns one view per variable, by key, into the given segments."""
        return {
            slot.key: segments[slot.segment][start:stop].reshape(slot.shape)
            for slot, start, stop in self._slices
            if slot.segment in segments
        }

    def unpack_buffers(self, buffers: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns one view per variable, by key, into buffers of an update."""
        arrays: dict[str, np.ndarray] = {}
        for name, buffer in buffers.items():
            flat, stop = np.asarray(buffer).reshape(-1), 0
            for slot in self.buffers[name]:
                start, stop = stop, stop + math.prod(slot.shape)
                arrays[slot.key] = flat[start:stop].reshape(slot.shape)
        return arrays


class StateLoader(Protocol):
    """Stores the variables of states that are not in memory."""

    def load_memory(self, state: PolicyState) -> np.ndarray:
        """Returns the memory of a state that was paged out; `state.lock` is held."""


class PolicyState:
    """The variables, hyperparameters, generator and counters of one policy.

    Reading `segments` or `arrays` loads the variables into memory if they are not there. Either
    they are *paged out*: their memory is freed and `loader` can load it again. Or they are in the
    buffers of the last update (`pending_update`): these are copied into the state's memory on
    demand only. Until then the next update continues without reading that memory, and acting reads
    views of the buffers.

    Attributes:
        layout: the position of each variable.
        hyperparameters: current values, float32 `[H]`, in the Program's order.
        rng: draws action noise; call `flush_noise_buffer` before reading it, except within
            `lock_for_change`.
        learning_rng: draws the order of minibatches and the noise of learning; the same generator,
            unless sampling may overlap learning.
        noise_buffer: action noise that was drawn before its use, a `NoiseBuffer`; None without such
            noise.
        global_timestep: the number of rows acted on.
        num_grad_updates: the number of minibatch updates.
        version: increases with every change of the variables, so that copies can be compared.
        lock: hold it to change the variables, or to keep them unchanged. Never hold the locks of
            two states at once.
        loader: loads the variables when they are not in memory; None if they always are.
        pending_update: the buffers of the last update, by name, until they are copied into memory.
        frozen_as: the ID under which the policy is frozen; None if it may change.
        last_used: the time of the last use, by `tick()`.
    """

    rng: np.random.Generator
    learning_rng: np.random.Generator
    noise_buffer: Any

    def __init__(
        self, layout: StateLayout, hyperparameters: Iterable[float], rng: np.random.Generator
    ) -> None:
        self._init_fields(layout, layout.allocate(), rng)
        self.hyperparameters = np.fromiter(hyperparameters, np.float32)

    def spawn_learning_rng(self) -> None:
        """Gives learning a separate generator, spawned from that of acting."""
        self.learning_rng = self.rng.spawn(1)[0]

    @property
    def generators(self) -> dict[str, np.random.Generator]:
        self.flush_noise_buffer()
        learning = {} if self.learning_rng is self.rng else {"learning_rng": self.learning_rng}
        return {"rng": self.rng, **learning}

    def flush_noise_buffer(self) -> None:
        """Discards unused noise that was drawn ahead, and rewinds the generator accordingly."""
        if self.noise_buffer is None:
            return
        with self.lock:
            buffer, self.noise_buffer = self.noise_buffer, None
            if buffer is not None:
                buffer.rewind_generator()

    def _init_fields(
        self, layout: StateLayout, memory: np.ndarray, rng: np.random.Generator
    ) -> None:
        self.layout = layout
        self.lock = threading.RLock()
        self._segments: dict[str, np.ndarray] | None = None  # None if they are not up to date
        self._arrays: dict[str, np.ndarray] | None = None
        self._acting_segments: dict[str, np.ndarray] | None = None  # of the pending update
        self._acting_arrays: dict[str, np.ndarray] | None = None  # of the pending update
        self.pending_update: Mapping[str, Any] | None = None
        self.page_in(memory)
        self.rng = self.learning_rng = rng
        self.noise_buffer = None
        self.global_timestep = 0
        self.num_grad_updates = 0
        self.version = 0
        self.loader: StateLoader | None = None
        self.frozen_as: str | None = None
        self.last_used = 0

    @property
    def memory(self) -> np.ndarray:
        """All variables, as one array of bytes `[num_bytes]`."""
        _ = self.segments
        return self._memory

    @property
    def segments(self) -> dict[str, np.ndarray]:
        """The variables, one vector per segment; they may be written in place.

        A new dict is returned whenever the memory is reallocated.
        """
        segments = self._segments
        return self._load_segments() if segments is None else segments

    @property
    def acting_segments(self) -> dict[str, np.ndarray]:
        """The segments that acting reads, and possibly others, read-only; `lock` must be held.

        While an update is pending they are copies of its results.
        """
        if self.pending_update is None:
            return self.segments
        if self._acting_segments is None:
            parts: dict[str, list[np.ndarray]] = {}
            for slot in self.layout.acting_slots:
                parts.setdefault(slot.segment, []).append(self.acting_arrays[slot.key].reshape(-1))
            self._acting_segments = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        return self._acting_segments

    @property
    def acting_arrays(self) -> dict[str, np.ndarray]:
        """The variables that acting reads, by key, and maybe others; `lock` must be held.

        They are read-only. Pending results of an update are views. Get the dict again for each
        call: it is a new one whenever the arrays may have moved.
        """
        if self.pending_update is None:
            return self.arrays
        if self._acting_arrays is None:
            buffers = {
                x: self.pending_update[x]
                for x in self.layout.acting_buffers
                if x in self.pending_update
            }
            arrays = self.layout.unpack_buffers(buffers)
            if len(arrays) < len(self.layout.acting_slots):  # filters, which no update changes
                arrays = {**self.layout.view_variables(self._memory_segments), **arrays}
            self._acting_arrays = arrays
        return self._acting_arrays

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        arrays = self._arrays
        if arrays is None:
            with self.lock:
                arrays = self._arrays = self.layout.view_variables(self.segments)
        return arrays

    def _load_segments(self) -> dict[str, np.ndarray]:
        with self.lock:
            if self.pending_update is not None:
                arrays = self.layout.view_variables(self._memory_segments)
                for key, values in self.layout.unpack_buffers(self.pending_update).items():
                    arrays[key][...] = values
                self._segments = self._memory_segments
                self._acting_segments = self._acting_arrays = self.pending_update = None
            elif self._segments is None:
                self.page_in(self.loader.load_memory(self))  # type: ignore[union-attr]
            return self._segments  # type: ignore[return-value]

    def set_pending_update(self, buffers: Mapping[str, Any]) -> None:
        """Sets the results of an update of some or all variables; `lock` must be held.

        Args:
            buffers: buffers that are never written again, arrays or tensors. They are copied on
                demand.
        """
        _ = self.pending_update or self.segments  # an update may change only some of the variables
        self.pending_update = buffers
        self._segments = self._arrays = self._acting_segments = self._acting_arrays = None
        self.version += 1

    def pack_acting(self) -> np.ndarray:
        """Returns a copy of the variables that acting reads: the memory of a frozen state."""
        memory = self.layout.acting.allocate()
        with self.lock:
            segments = self.acting_segments
            for name, values in self.layout.acting.view_segments(memory).items():
                values[...] = segments[name]
        return memory

    def freeze(self, policy_id: str) -> None:
        """Makes the state read-only, with the layout of frozen states, for another memory.

        Args:
            policy_id: its name in messages.
        """
        self.frozen_as = policy_id
        self.layout = self.layout.acting

    @property
    def is_in_memory(self) -> bool:
        return self._memory is not _NO_MEMORY

    def page_in(self, memory: np.ndarray) -> None:
        """Uses `memory` for the variables."""
        self._memory = memory
        self._arrays = self._acting_segments = self._acting_arrays = self.pending_update = None
        self._segments = self._memory_segments = self.layout.view_segments(memory)

    def page_out(self) -> None:
        """Frees the memory of the variables, which the pager has stored; `lock` must be held."""
        self._segments = self._arrays = self.pending_update = None
        self._acting_segments = self._acting_arrays = None
        self._memory, self._memory_segments = _NO_MEMORY, {}

    @contextlib.contextmanager
    def lock_for_change(self) -> Iterator[None]:
        """Holds the lock for a change of the variables; raises a `FrozenPolicyError` if frozen."""
        with self.lock:
            self.require_not_frozen()
            if self.noise_buffer is not None and self.learning_rng is self.rng:
                self.flush_noise_buffer()
            yield

    def require_not_frozen(self) -> None:
        if self.frozen_as is not None:
            raise FrozenPolicyError(
                f"The policy {self.frozen_as!r} is frozen: it can act, but cannot learn or change "
                "its weights. Change a copy: `policy_map.copy_policy(source, target)`."
            )

    def copy(self, rng: np.random.Generator | None = None) -> PolicyState:
        """Returns an independent copy; it shares the generator if `rng` is None."""
        clone = PolicyState.__new__(PolicyState)
        with self.lock:
            self.flush_noise_buffer()
            clone._init_fields(self.layout, self.memory.copy(), self.rng if rng is None else rng)
            if self.learning_rng is not self.rng:
                clone.learning_rng = self.learning_rng
                if rng is not None:
                    clone.spawn_learning_rng()
            clone.hyperparameters = self.hyperparameters.copy()
            clone.copy_counters_from(self)
        return clone

    def copy_counters_from(self, other: PolicyState) -> None:
        self.global_timestep = other.global_timestep
        self.num_grad_updates = other.num_grad_updates

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Overwrites the named variables; the caller has checked keys and shapes."""
        with self.lock_for_change():
            for key, value in arrays.items():
                self.arrays[key][...] = value
            self.version += 1

    def update_targets(self, tau: float, networks: Collection[str] | None = None) -> None:
        """Moves target networks towards their networks: t <- tau s + (1 - tau) t.

        Integer variables are copied. `networks` limits this to the target networks of some
        networks.
        """
        with self.lock_for_change():
            for target in self.layout.targets:
                for name, source in self.layout.pair_target_segments(target):
                    if networks is None or source.partition("/")[0] in networks:
                        _polyak_update(self.segments[name], self.segments[source], tau)
            self.version += 1

    def copy_weights(self, *parts: str) -> dict[str, np.ndarray]:
        """Returns copies of the weights of some parts, by key, in order."""
        with self.lock:
            arrays = self.arrays
            return {
                slot.key: arrays[slot.key].copy() for slot in self.layout.get_weight_slots(*parts)
            }


def _polyak_update(old: np.ndarray, new: np.ndarray, tau: float) -> None:
    if tau == 1.0 or old.dtype.kind != "f":
        old[...] = new
    else:
        old += np.float32(tau) * (new - old)
