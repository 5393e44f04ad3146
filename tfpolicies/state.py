"""What one policy owns, as plain NumPy with a fixed layout.

All variables of one part (`model`, `filter`, `target`, `learner`) and dtype lie end to end in one
vector, a *segment*: loading, saving or stacking a state is a copy of a few segments, however many
variables there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

ACTING = ("model", "filter")
"""The parts that acting needs; "target" and "learner" are for learning only."""


class Slot(NamedTuple):
    """One variable of a state."""

    key: str  # canonical: position and role, never an auto-numbered name
    shape: tuple[int, ...]
    dtype: str
    part: str  # "model", "filter", "target" or "learner"

    @property
    def segment(self) -> str:
        """The segment that holds this variable, for example `model/float32`."""
        return f"{self.part}/{self.dtype}"


class StateLayout:
    """The order, shapes and dtypes of the variables of all policies of one kind.

    Args:
        slots: the variables; their order within a segment is the order of the memory.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.sizes: dict[str, int] = {}
        self._places: list[tuple[Slot, int, int]] = []
        for slot in self.slots:
            start = self.sizes.get(slot.segment, 0)
            stop = start + math.prod(slot.shape)
            self._places.append((slot, start, stop))
            self.sizes[slot.segment] = stop

    def of(self, *parts: str) -> tuple[Slot, ...]:
        """Returns the slots of some parts, in order."""
        return tuple(slot for slot in self.slots if slot.part in parts)

    def segments(self, *parts: str) -> list[str]:
        """Returns the names of some parts' segments, in the order of their first slot."""
        return [name for name in self.sizes if name.partition("/")[0] in parts]

    def allocate(self) -> dict[str, np.ndarray]:
        """Returns new segments filled with zeros."""
        return {name: np.zeros(n, name.split("/")[1]) for name, n in self.sizes.items()}

    def views(self, segments: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns one view per variable, by key, into the given segments."""
        return {
            slot.key: segments[slot.segment][start:stop].reshape(slot.shape)
            for slot, start, stop in self._places
        }


class PolicyState:
    """The variables, hyper-parameters, generator and counters of one policy.

    Attributes:
        layout: where each variable lies.
        segments: the memory, by segment name; written in place, never replaced.
        arrays: a view per variable, by key.
        hyper: the real-valued hyper-parameters in force, float32 `[H]`, in the Program's order.
        rng: draws action noise and shuffles minibatches.
        global_timestep: rows acted on.
        num_grad_updates: minibatch updates done.
        version: grows with every change of the variables, so that copies can tell if they are old.
    """

    def __init__(
        self, layout: StateLayout, hyper: Iterable[float], rng: np.random.Generator
    ) -> None:
        self.layout = layout
        self.segments = layout.allocate()
        self.arrays = layout.views(self.segments)
        self.hyper = np.fromiter(hyper, np.float32)
        self.rng = rng
        self.global_timestep = 0
        self.num_grad_updates = 0
        self.version = 0

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Overwrites the named variables; the caller has checked keys and shapes."""
        for key, value in arrays.items():
            self.arrays[key][...] = value
        self.version += 1

    def copy_part(self, source: str, target: str, tau: float) -> None:
        """Moves one part towards another of the same variables: t <- tau s + (1 - tau) t.

        Does nothing where the layout has no `target`. Integer variables are copied.
        """
        for name in self.layout.segments(target):
            kind = name.partition("/")[2]
            new, old = self.segments[f"{source}/{kind}"], self.segments[name]
            if tau == 1.0 or old.dtype.kind != "f":
                old[...] = new
            else:
                old += np.float32(tau) * (new - old)
        self.version += 1

    def copy_of(self, part: str) -> dict[str, np.ndarray]:
        """Returns copies of one part's variables, by key, in order."""
        return {slot.key: self.arrays[slot.key].copy() for slot in self.layout.of(part)}
