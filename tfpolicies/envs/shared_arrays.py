"""Memory that a worker shares with the processes of its environments.

The memory has no name, so the system frees it when the last process that maps it ends, even after
a crash.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.errors import EnvError

_ALIGNMENT = 64  # bytes; a cache line

LeafLayouts = list[tuple[tuple[int, ...], np.dtype]]


def make_unnamed_file() -> Any:
    """Returns a new, empty file without a name: in memory if the system offers it, else on disk."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tfpolicies"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def flatten(space: gym.Space, nested: Any) -> list[Any]:
    """Returns the leaves of a value that is nested as a space.

    >>> inner = gym.spaces.Tuple([gym.spaces.Box(0, 1)])
    >>> space = gym.spaces.Dict(a=gym.spaces.Discrete(2), b=inner)
    >>> flatten(space, {"b": (0.5,), "a": 1})
    [1, 0.5]
    """
    if isinstance(space, gym.spaces.Dict):
        return [leaf for key, part in space.items() for leaf in flatten(part, nested[key])]
    if isinstance(space, gym.spaces.Tuple):
        pairs = zip(space.spaces, nested, strict=True)
        return [leaf for part, value in pairs for leaf in flatten(part, value)]
    return [nested]


def unflatten(space: gym.Space, leaves: Iterator[Any]) -> Any:
    """Nests the leaves of `flatten` like the space."""
    if isinstance(space, gym.spaces.Dict):
        return {key: unflatten(part, leaves) for key, part in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(unflatten(part, leaves) for part in space.spaces)
    return next(leaves)


def get_layout(space: gym.Space, *, is_observed: bool) -> LeafLayouts:
    """Returns shape and dtype of each leaf of a space.

    Args:
        space: of observations or of actions.
        is_observed: whether it is for observations, whose float64 become float32.
    """
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.values() if isinstance(space, gym.spaces.Dict) else space.spaces
        return [leaf for part in parts for leaf in get_layout(part, is_observed=is_observed)]
    if space.shape is None or space.dtype is None:
        raise EnvError(
            f"env_processes needs spaces of arrays, got {space!r:.200}. Use Box, Discrete, "
            "MultiDiscrete, MultiBinary, and Dict or Tuple of these."
        )
    is_double = is_observed and space.dtype == np.float64
    return [(tuple(space.shape), np.dtype(np.float32) if is_double else space.dtype)]


class SharedArrays:
    """The arrays of N environments in P processes, mapped from one file.

    Args:
        file: descriptor of the file.
        observation_space: of one environment.
        action_space: of one environment.
        num_envs: N.
        num_processes: P.
        is_new: whether the file has no memory yet.

    Attributes:
        obs: per leaf `[N, ...]`.
        actions: per leaf `[N, ...]`.
        rewards: float32 `[N]`.
        terminateds: bool `[N]`.
        truncateds: bool `[N]`.
        call_start: float64 `[P]`: start of the latest call of an environment, by `time.monotonic`.
        call_env_index: int64 `[P]`: the environment of that call; -1 before the first call of a
            request.
        call_is_step: bool `[P]`: whether that call is of `step`, and not of `reset`.

    Raises:
        EnvError: if a leaf of the spaces is not an array of fixed shape.
    """

    def __init__(
        self,
        file: int,
        observation_space: gym.Space,
        action_space: gym.Space,
        num_envs: int,
        num_processes: int,
        *,
        is_new: bool = False,
    ) -> None:
        obs_layouts = get_layout(observation_space, is_observed=True)
        action_layouts = get_layout(action_space, is_observed=False)
        envs, processes = (num_envs,), (num_processes,)
        specs = [((*envs, *shape), dtype) for shape, dtype in (*obs_layouts, *action_layouts)]
        specs += [(envs, np.dtype(kind)) for kind in (np.float32, bool, bool)]
        specs += [(processes, np.dtype(kind)) for kind in (np.float64, np.int64, bool)]
        offsets = [0]
        for shape, dtype in specs:
            size = math.prod(shape) * dtype.itemsize
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        if is_new:
            os.truncate(file, offsets[-1])
        memory = mmap.mmap(file, offsets[-1])
        specs_and_offsets = zip(specs, offsets[:-1], strict=True)
        arrays = [
            np.ndarray(shape, dtype, memory, offset) for (shape, dtype), offset in specs_and_offsets
        ]
        self.obs = arrays[: len(obs_layouts)]
        self.actions = arrays[len(obs_layouts) : len(obs_layouts) + len(action_layouts)]
        self.rewards, self.terminateds, self.truncateds = arrays[-6:-3]
        self.call_start, self.call_env_index, self.call_is_step = arrays[-3:]
