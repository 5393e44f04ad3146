"""Connector that stacks the last observations of each agent."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from tfpolicies.connectors.agent_connectors import ObservationConnector, map_boxes
from tfpolicies.connectors.connector import AgentStep, register_connector
from tfpolicies.errors import ConfigError, UsageError
from tfpolicies.models.spaces import leaves, unflatten

_AGENT_BITS = 20  # a row's key is env_id * 2^20 + agent
_RowSlots: TypeAlias = tuple[np.ndarray, np.ndarray]
"""The slot of each row, and the indices of the rows with a new slot."""
_LIMITS = {"env_ids": 1 << 42, "agents": 1 << _AGENT_BITS}


@register_connector
class FrameStack(ObservationConnector):
    """Stacks the last `num_frames` observations, the oldest first.

    Boxes of one, three or more dimensions are joined along the last axis: `[84, 84, 1]` becomes
    `[84, 84, 4]`, `[3]` becomes `[12]`. Boxes of zero or two dimensions get a new last axis:
    `[84, 84]` becomes `[84, 84, 4]`. Other leaves stay unchanged. At an episode's start, its first
    observation is repeated.

    Each call stores one observation of each agent in the rows. Call it with an episode's last
    observation before `reset` of its environment, and with the next episode's first one after it.

    Args:
        num_frames: the number of observations, from 1.

    Raises:
        ConfigError: if that is not an integer from 1.
    """

    def __init__(self, num_frames: int) -> None:
        if not isinstance(num_frames, int) or isinstance(num_frames, bool) or num_frames < 1:
            raise ConfigError(f"`num_frames` must be an integer from 1, but got {num_frames!r}.")
        self.num_frames = num_frames
        self._slot_map = _SlotMap()
        self._stacks: dict[int, np.ndarray] = {}

    def params(self) -> dict[str, Any]:
        return {"num_frames": self.num_frames}

    def connect(self, space: spaces.Space) -> spaces.Space:
        result = super().connect(space)
        self._slot_map = _SlotMap()
        self._stacks = {}
        return result

    def reset(self, env_ids: ArrayLike) -> None:
        self._slot_map.drop(env_ids)

    def _transform_space(self, space: spaces.Space) -> spaces.Space:
        return map_boxes(space, self._stack_box)

    def _stack_box(self, box: spaces.Box) -> spaces.Box:
        low, high = (
            np.concatenate([_with_frame_axis(bound[None])[0]] * self.num_frames, axis=-1)
            for bound in (box.low, box.high)
        )
        return spaces.Box(low, high, dtype=box.dtype)

    def _transform(self, space: spaces.Space, arrays: list[np.ndarray], step: AgentStep) -> Any:
        rows = self._slot_map.find(step.env_ids, step.agents, len(arrays[0]))
        stacked = [
            self._push(i, _with_frame_axis(array), rows)
            if isinstance(leaf.space, spaces.Box)
            else array
            for i, (leaf, array) in enumerate(zip(leaves(space), arrays, strict=True))
        ]
        return unflatten(space, stacked)

    def _push(self, index: int, frames: np.ndarray, rows: _RowSlots) -> np.ndarray:
        """Appends one frame `[N, ..., c]` per slot; returns the stacks `[N, ..., c * frames]`."""
        slots, new_rows = rows
        width = frames.shape[-1]
        stacks = self._stacks.get(index)
        if stacks is None or len(stacks) < self._slot_map.capacity:
            shape = (self._slot_map.capacity, *frames.shape[1:-1], width * self.num_frames)
            grown = np.zeros(shape, frames.dtype)
            if stacks is not None:
                grown[: len(stacks)] = stacks
            stacks = self._stacks[index] = grown
        previous = stacks.take(slots, axis=0)
        result = np.empty_like(previous)
        # One shift of the whole array is many times faster than one for each pixel. Values that
        # it moves across pixels are overwritten by the newest frame.
        result.reshape(-1)[:-width] = previous.reshape(-1)[width:]
        result[..., -width:] = frames
        if len(new_rows):
            result[new_rows] = np.concatenate([frames[new_rows]] * self.num_frames, axis=-1)
        stacks[slots] = result
        return result


def _with_frame_axis(frames: np.ndarray) -> np.ndarray:
    """Adds an axis to frames `[N, *shape]` along which they can be joined."""
    return frames[..., None] if frames.ndim in (1, 3) else frames


class _SlotMap:
    """Assigns slots to the agents of environments.

    Attributes:
        capacity: the number of slots that were ever in use.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._slots: dict[int, int] = {}  # by key
        self._free_slots: list[int] = []
        self._last: _RowSlots | None = None  # keys, slots of the last call

    def find(self, env_ids: ArrayLike, agents: ArrayLike | None, rows: int) -> _RowSlots:
        """Returns the slot of each row, and the indices of the rows with a new slot."""
        keys = _check_ids("env_ids", env_ids, rows) << _AGENT_BITS
        if agents is not None:
            keys = keys | _check_ids("agents", agents, rows)
        if self._last is not None and np.array_equal(keys, self._last[0]):
            return self._last[1], np.empty(0, np.int64)
        key_list = keys.tolist()
        if len(set(key_list)) < rows:
            raise UsageError(
                "Each row must be a different agent or environment, but `env_ids` and `agents` "
                "have the same pair twice. Give one row per agent."
            )
        new_rows = [i for i, key in enumerate(key_list) if key not in self._slots]
        for i in new_rows:
            if not self._free_slots:
                self._free_slots.append(self.capacity)
                self.capacity += 1
            self._slots[key_list[i]] = self._free_slots.pop()
        slots = np.array([self._slots[key] for key in key_list], np.int64)
        self._last = keys, slots
        return slots, np.array(new_rows, np.int64)

    def drop(self, env_ids: ArrayLike) -> None:
        """Frees the slots of all agents of some environments."""
        dropped_env_ids = set(np.ravel(env_ids).tolist())
        for key in [key for key in self._slots if key >> _AGENT_BITS in dropped_env_ids]:
            self._free_slots.append(self._slots.pop(key))
            self._last = None


def _check_ids(name: str, values: ArrayLike, rows: int) -> np.ndarray:
    ids = np.asarray(values)
    is_valid = ids.shape == (rows,) and (ids.dtype.kind in "iu" or rows == 0)
    if not is_valid or (rows and (ids.min() < 0 or ids.max() >= _LIMITS[name])):
        raise UsageError(
            f"`{name}` must be integers [{rows}] from 0 to below {_LIMITS[name]}, one per row, "
            f"but got {values!r}. Number them in the order of their first appearance."
        )
    return ids.astype(np.int64, copy=False)
