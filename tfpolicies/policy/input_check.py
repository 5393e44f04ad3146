"""Validation of inputs that users pass for acting.

Refuses NaN and infinity, choices outside of their space, and masks that allow no action. Samplers
do not use it: `envs/fault_tolerance.py` checks the results of environments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.base.finite_checks import find_first_non_finite, is_finite
from tfpolicies.errors import ObservationError
from tfpolicies.models.ports import PolicyPort
from tfpolicies.models.spaces import (
    MASK,
    Leaf,
    action_leaves,
    choices_per_cell,
    has_mask,
    is_choice,
    is_float_box,
    leaves,
)

_MAX_PYTHON_SUM_SIZE = 16
"""Up to this size, a sum in Python is faster than NumPy: 0.2 instead of 0.4 us."""

_isfinite, _vdot = math.isfinite, np.vdot  # looked up once: every step calls them
_HINT = "With debugging(check_inputs=False) inputs are not checked."


class InputValidator:
    """Validates the inputs of acting for policies with the same spaces.

    Args:
        observation_space: of the policy.
        action_space: of the policy; tells which columns of a mask belong to one choice.
        other_ports: the inputs after the observations.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        other_ports: Sequence[PolicyPort] = (),
    ) -> None:
        obs_leaves, is_masked = leaves(observation_space), has_mask(observation_space)
        names_and_dtypes = [(leaf.name("obs"), leaf.dtype) for leaf in obs_leaves]
        names_and_dtypes += [(port.name, port.dtype) for port in other_ports]
        self._floats = [
            (i, name) for i, (name, dtype) in enumerate(names_and_dtypes) if dtype.kind == "f"
        ]
        self._ranges = [
            (i, *_get_choice_range(leaf))
            for i, leaf in enumerate(obs_leaves)
            if is_choice(leaf.space)
        ]
        self._masks = [i for i, leaf in enumerate(obs_leaves) if is_masked and leaf.path[0] == MASK]
        self._choice_columns = _get_choice_columns(action_space) if is_masked else []

    def check(self, inputs: Sequence[np.ndarray]) -> None:
        """Raises an `ObservationError` unless actions can be chosen for all rows of the inputs.

        Args:
            inputs: one array `[N, ...]` per leaf and further port, of its dtype.
        """
        for i, name in self._floats:
            array = inputs[i]
            is_small = array.size <= _MAX_PYTHON_SUM_SIZE
            total = sum(array.ravel().tolist()) if is_small else _vdot(array, array)
            if not (_isfinite(total) or is_finite(array)):
                location, value = find_first_non_finite({name: array})  # type: ignore[misc]
                raise ObservationError(
                    f"Observations must be finite, but {location} is {value}; the first index is "
                    f"the row. Fix it in the environment, or before you act. {_HINT}"
                )
        for i, name, start, count in self._ranges:
            inside = (inputs[i] - start).view(np.uint64) < count  # less than start wraps around
            if 0 in inside.tobytes():
                index = tuple(np.argwhere(~inside)[0].tolist())
                low, size = (int(np.broadcast_to(x, inside.shape)[index]) for x in (start, count))
                raise ObservationError(
                    f"Choices must be in their space, from {low} to {low + size - 1}, but "
                    f"{name}{list(index)} is {inputs[i][index]}; the first index is the row. "
                    f"{_HINT}"
                )
        if self._masks:
            self._check_masks(inputs)

    def _check_masks(self, obs: Sequence[np.ndarray]) -> None:
        """Checks that the mask allows an action for each choice of each row."""
        masks = [obs[i] for i in self._masks]
        flat = [mask.reshape(len(mask), math.prod(mask.shape[1:])) for mask in masks]
        allowed = np.concatenate(flat, axis=1)
        for start, stop in self._choice_columns:
            is_allowed = allowed[:, start:stop].any(axis=1)
            if not is_allowed.all():
                row = int(np.argmin(is_allowed))
                columns = (
                    "" if len(self._choice_columns) == 1 else f", columns {start} to {stop - 1}"
                )
                raise ObservationError(
                    f"Each row of action_mask must allow an action, but row {row}{columns} is "
                    f"{allowed[row, start:stop].tolist()!s:.200}. Do not act after the end of an "
                    f"episode. {_HINT}"
                )


def _get_choice_range(leaf: Leaf) -> tuple[str, np.ndarray, np.ndarray]:
    """Returns the name of a leaf of choices, their starts, and their numbers."""
    space: Any = leaf.space
    count = space.n if isinstance(space, gym.spaces.Discrete) else space.nvec
    return leaf.name("obs"), np.asarray(space.start, np.int64), np.asarray(count, np.uint64)


def _get_choice_columns(action_space: gym.Space[Any]) -> list[tuple[int, int]]:
    """Returns ranges (start, stop) of mask columns, each of which must allow an action.

    A MultiBinary needs no allowed bit, and a Box of floats has no columns.
    """
    columns, start = [], 0
    for leaf in action_leaves(action_space):
        space: Any = leaf.space
        if isinstance(space, gym.spaces.MultiBinary):
            start += math.prod(leaf.shape)
            continue
        sizes: Sequence[int] = ()
        if isinstance(space, gym.spaces.Discrete):
            sizes = (int(space.n),)
        elif not is_float_box(space):
            sizes = choices_per_cell(space)
        for size in sizes:
            columns.append((start, start + size))
            start += size
    return columns
