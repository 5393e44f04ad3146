"""The recurrent states and histories of all sequences of one model version."""

from __future__ import annotations

import threading

import numpy as np

from tfpolicies.export.player import OnnxPolicy
from tfpolicies.serving.batching import Arrays

NOISE, REWARDS, SLOTS, STATE_OUT = "noise", "rewards", "slots", "state_out_"
_MIN_SLOTS = 64


class SequenceStates:
    """Arrays `[slots, ...]` of state; each row of a sequence has a slot.

    So one step for many sequences reads and writes the states of all of them at once. The arrays
    grow with the number of rows, and are freed when there are none.

    Args:
        policy: defines the states.
    """

    def __init__(self, policy: OnnxPolicy) -> None:
        self._policy = policy
        self._states = policy.make_initial_carry(0)
        self._free: list[int] = []
        self._size = 0
        self._lock = threading.Lock()  # batches may run in several threads

    def __len__(self) -> int:
        return self._size - len(self._free)

    def allocate(self, rows: int) -> np.ndarray:
        """Returns slots for new rows, with zero state."""
        if len(self._free) < rows:
            self._grow(max(_MIN_SLOTS, rows, self._size))
        slots = np.array([self._free.pop() for _ in range(rows)])
        for x in self._states.values():
            x[slots] = 0
        return slots

    def release(self, slots: np.ndarray) -> None:
        """Frees slots; no running batch may read them."""
        self._free.extend(slots.tolist())
        if self._size > _MIN_SLOTS and not len(self):
            self._states, self._free, self._size = self._policy.make_initial_carry(0), [], 0

    def step(self, policy: OnnxPolicy, feed: Arrays) -> dict[str, np.ndarray]:
        """Executes a step of all rows, and returns its outputs.

        Args:
            policy: the model.
            feed: by name, the observations, the slots, the rewards if the policy reads them, and
                the noise if actions are sampled.
        """
        leaves = [feed[port["name"]] for port in policy.observation_ports]
        slots = feed[SLOTS]
        with self._lock:
            states = {name: x[slots] for name, x in self._states.items()}
        if REWARDS in states:
            states[REWARDS][:, -1] = feed[REWARDS]
        outputs = policy.run(leaves, feed.get(NOISE), states)
        new_states = policy.update_carry(outputs, leaves, states)
        with self._lock:
            for name, x in new_states.items():
                self._states[name][slots] = x
        return {name: x for name, x in outputs.items() if not name.startswith(STATE_OUT)}

    def _grow(self, num_slots: int) -> None:
        with self._lock:
            initial_states = self._policy.make_initial_carry(num_slots)
            self._states = {
                k: np.concatenate([x, initial_states[k]]) for k, x in self._states.items()
            }
        self._free.extend(range(self._size + num_slots - 1, self._size - 1, -1))
        self._size += num_slots
