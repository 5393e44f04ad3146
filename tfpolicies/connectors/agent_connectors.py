"""Stateless connectors for observations and rewards."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.base.validators import FINITE
from tfpolicies.connectors.connector import AgentConnector, AgentStep, register_connector
from tfpolicies.errors import ConfigError
from tfpolicies.models.rllib_flattening import flatten_observations
from tfpolicies.models.spaces import batch_leaves, has_mask, leaves, unflatten


class ObservationConnector(AgentConnector):
    """An agent connector that changes only observations, and leaves an action mask unchanged.

    For a space with a mask, a subclass gets only the part under `observations`.
    """

    def observation_space(self, space: spaces.Space) -> spaces.Space:
        if not has_mask(space):
            return self._transform_space(space)
        parts = [
            (key, self._transform_space(part) if key == "observations" else part)
            for key, part in space.items()  # type: ignore[attr-defined]
        ]
        return spaces.Dict(parts)

    def __call__(self, step: AgentStep) -> AgentStep:
        space, obs = self.space, step.obs
        arrays = batch_leaves(leaves(space), obs, "obs")
        if not has_mask(space):
            return step._replace(obs=self._transform(space, arrays, step))
        nested = unflatten(space, arrays)
        obs_space = space["observations"]  # type: ignore[index]
        obs_arrays = batch_leaves(leaves(obs_space), nested["observations"], "obs")
        return step._replace(
            obs={**nested, "observations": self._transform(obs_space, obs_arrays, step)}
        )

    @abc.abstractmethod
    def _transform_space(self, space: spaces.Space) -> spaces.Space:
        """Returns the space of the transformed observations of `space`."""

    @abc.abstractmethod
    def _transform(self, space: spaces.Space, arrays: list[np.ndarray], step: AgentStep) -> Any:
        """Transforms observations, given as one array `[N, *leaf.shape]` per leaf of `space`."""


def map_boxes(space: spaces.Space, function: Callable[[spaces.Box], spaces.Box]) -> spaces.Space:
    """Returns `space` with `function` applied to each Box in it."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, map_boxes(part, function)) for key, part in space.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_boxes(part, function) for part in space])
    return function(space) if isinstance(space, spaces.Box) else space


@register_connector
class ClipReward(AgentConnector):
    """Clips rewards, or replaces them by their sign.

    Args:
        sign: whether rewards become -1, 0 or 1.
        limit: otherwise, the largest magnitude of a reward, above 0.

    Raises:
        ConfigError: unless exactly one of both is given.

    >>> step = AgentStep(np.zeros((2, 1)), np.arange(2), np.array([-3.0, 0.5]))
    >>> ClipReward(limit=1.0)(step).rewards
    array([-1. ,  0.5])
    """

    changes_observations = False

    def __init__(self, sign: bool = False, limit: float | None = None) -> None:
        if not isinstance(sign, bool) or not (limit is None or FINITE.is_valid(limit)):
            raise ConfigError(
                f"ClipReward takes a bool and a number, but got sign={sign!r}, limit={limit!r}."
            )
        if sign == (limit is not None) or (limit is not None and limit <= 0):
            raise ConfigError(
                "ClipReward needs either `sign=True` or a `limit` above 0, but got "
                f"sign={sign!r}, limit={limit!r}."
            )
        self.sign = sign
        self.limit = limit

    def params(self) -> dict[str, Any]:
        return {"sign": self.sign, "limit": self.limit}

    def __call__(self, step: AgentStep) -> AgentStep:
        if step.rewards is None:
            return step
        if self.limit is None:
            return step._replace(rewards=np.sign(step.rewards))
        return step._replace(rewards=np.clip(step.rewards, -self.limit, self.limit))


@register_connector
class ClipObservations(ObservationConnector):
    """Clips the float Boxes in observations; other leaves stay unchanged.

    Args:
        low: the smallest value.
        high: the largest value, above `low`.

    Raises:
        ConfigError: if these are not finite numbers in that order.
    """

    def __init__(self, low: float, high: float) -> None:
        if not (FINITE.is_valid(low) and FINITE.is_valid(high) and low < high):
            raise ConfigError(
                "ClipObservations needs finite numbers `low` < `high`, but got "
                f"low={low!r}, high={high!r}."
            )
        self.low = low
        self.high = high

    def params(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}

    def _transform_space(self, space: spaces.Space) -> spaces.Space:
        return map_boxes(space, self._clip_box)

    def _clip_box(self, box: spaces.Box) -> spaces.Box:
        if not np.issubdtype(box.dtype, np.floating):
            return box
        low, high = (np.clip(bound, self.low, self.high) for bound in (box.low, box.high))
        return spaces.Box(low, high, dtype=box.dtype)

    def _transform(self, space: spaces.Space, arrays: list[np.ndarray], step: AgentStep) -> Any:
        clipped = [
            np.clip(array, self.low, self.high) if array.dtype == np.float32 else array
            for array in arrays
        ]
        return unflatten(space, clipped)


@register_connector
class FlattenObservations(ObservationConnector):
    """Flattens an observation into one float32 vector by concatenating its leaves.

    Discrete leaves become one-hot, MultiDiscrete ones several one-hots; other leaves are cast. A
    value outside its discrete space raises an ObservationError.
    """

    def _transform_space(self, space: spaces.Space) -> spaces.Space:
        leaves(space)  # raises for spaces without arrays of fixed shapes
        flat: Any = spaces.flatten_space(space)
        return spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32))

    def _transform(self, space: spaces.Space, arrays: list[np.ndarray], step: AgentStep) -> Any:
        return flatten_observations(leaves(space), arrays)
