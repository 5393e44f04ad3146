"""The recurrent states and histories of all sequences of one model version."""

from __future__ import annotations

import threading

import numpy as np

from tfpolicies.export.player import OnnxPolicy
from tfpolicies.serving.batching import Arrays

NOISE, REWARDS, SLOTS, STATE_OUT = "noise", "rewards", "slots", "state_out_"
_FEWEST = 64


class Memory:
    """Arrays `[slots, ...]` of state; each row of a sequence has a slot.

    So one step for many sequences reads and writes the states of all of them at once. The arrays
    grow with the number of rows, and are freed when there are none.

    Args:
        policy: defines the states.
    """

    def __init__(self, policy: OnnxPolicy) -> None:
        self._policy = policy
        self._carried = policy.fresh(0)
        self._free: list[int] = []
        self._size = 0
        self._lock = threading.Lock()  # batches may run in several threads

    def __len__(self) -> int:
        return self._size - len(self._free)

    def begin(self, rows: int) -> np.ndarray:
        """Returns slots for new rows, with zero state."""
        if len(self._free) < rows:
            self._grow(max(_FEWEST, rows, self._size))
        slots = np.array([self._free.pop() for _ in range(rows)])
        for x in self._carried.values():
            x[slots] = 0
        return slots

    def end(self, slots: np.ndarray) -> None:
        """Frees slots; no running batch may read them."""
        self._free.extend(slots.tolist())
        if self._size > _FEWEST and not len(self):
            self._carried, self._free, self._size = self._policy.fresh(0), [], 0

    def step(self, policy: OnnxPolicy, feed: Arrays) -> dict[str, np.ndarray]:
        """Executes a step of all rows, and returns its outputs.

        Args:
            policy: the model.
            feed: by name, the observations, the slots, the rewards if the policy reads them, and
            the
                noise if actions are sampled.
        """
        leaves = [feed[port["name"]] for port in policy.observed]
        slots = feed[SLOTS]
        with self._lock:
            carried = {name: x[slots] for name, x in self._carried.items()}
        if REWARDS in carried:
            carried[REWARDS][:, -1] = feed[REWARDS]
        outputs = policy.run(leaves, feed.get(NOISE), carried)
        after = policy.after(outputs, leaves, carried)
        with self._lock:
            for name, x in after.items():
                self._carried[name][slots] = x
        return {name: x for name, x in outputs.items() if not name.startswith(STATE_OUT)}

    def _grow(self, more: int) -> None:
        with self._lock:
            fresh = self._policy.fresh(more)
            self._carried = {k: np.concatenate([x, fresh[k]]) for k, x in self._carried.items()}
        self._free.extend(range(self._size + more - 1, self._size - 1, -1))
        self._size += more
