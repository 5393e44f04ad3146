"""A connector for the user's own observation filter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.connectors.agent_connectors import ObservationConnector, map_boxes
from tfpolicies.connectors.connector import AgentStep, register_connector
from tfpolicies.errors import ConfigError, ObservationError
from tfpolicies.models.spaces import (
    batch_leaves,
    get_at_path,
    has_mask,
    is_float_box,
    leaves,
    unflatten,
)


@register_connector
class OwnFilter(ObservationConnector):
    """The result of a function given as `observation_filter`; it gets one observation at a time.

    The filter is called as `filter(observation, update=...)` and returns an observation of the same
    shapes; float Boxes may have any values then. It may have `copy()`, `sync(other)`,
    `apply_changes(other, with_buffer=False)` and `reset_buffer()`, so that workers and evaluation
    use common statistics: `apply_changes` adds the observations since `reset_buffer` to another
        filter.
    Checkpoints do not contain it.

    Args:
        make: `f(shape)` that returns the filter; the shape is nested like the space, with None for
            leaves that are not float Boxes. None when a checkpoint is read: there is no filter yet.
        name: of the function.
        updates: whether the filter learns from observations.

    Raises:
        ConfigError: if `make` cannot be called.

    >>> def halves(shape):
    ...     return lambda observation, update: observation / 2
    >>> half = OwnFilter(halves)
    >>> half.connect(spaces.Box(-1.0, 1.0, (1,)))
    Box(-inf, inf, (1,), float32)
    >>> half(AgentStep(np.array([[1.0], [-1.0]], np.float32), np.arange(2))).obs.tolist()
    [[0.5], [-0.5]]
    """

    def __init__(
        self, make: Callable[[Any], Any] | None = None, name: str = "", updates: bool = True
    ) -> None:
        if make is not None and not callable(make):
            raise ConfigError(
                f"OwnFilter takes a function f(shape) that returns a filter, got {make!r}. Set it "
                "in the config: rollouts(observation_filter=...)."
            )
        self._make = make
        self._name = name or getattr(make, "__qualname__", type(make).__name__)
        self._updates = updates
        self._num_pending = 0  # observations that other workers do not have
        self.filter: Any = None

    def params(self) -> dict[str, Any]:
        return {"name": self._name}

    def connect(self, space: spaces.Space) -> spaces.Space:
        if self.filter is None and self._make is not None:
            obs_space: Any = space["observations"] if has_mask(space) else space  # type: ignore[index]
            shapes = [
                leaf.shape if is_float_box(leaf.space) else None for leaf in leaves(obs_space)
            ]
            self.filter = self._make(unflatten(obs_space, shapes))
        return super().connect(space)

    def apply_without_update(self, step: AgentStep) -> AgentStep:
        updates, self._updates = self._updates, False
        try:
            return self(step)
        finally:
            self._updates = updates

    def _transform_space(self, space: spaces.Space) -> spaces.Space:
        return map_boxes(space, _remove_bounds)

    def _transform(self, space: spaces.Space, arrays: list[np.ndarray], step: AgentStep) -> Any:
        if self.filter is None:
            raise ConfigError(
                f"The observation_filter {self._name!r} is your function, which no file contains. "
                "Set it in the config again: rollouts(observation_filter=...)."
            )
        rows = [
            self.filter(unflatten(space, [leaf[i] for leaf in arrays]), update=self._updates)
            for i in range(len(arrays[0]))
        ]
        self._num_pending += self._updates * len(rows)
        output_leaves = leaves(self._transform_space(space))
        try:
            batch = unflatten(
                space,
                [np.stack([get_at_path(row, leaf.path) for row in rows]) for leaf in output_leaves],
            )
            return unflatten(space, batch_leaves(output_leaves, batch, "obs"))
        except (ObservationError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ObservationError(
                f"The observation_filter {self._name!r} must return observations of the shapes of "
                f"{space}: {error}"
            ) from error

    # -- synchronization between workers ------------------------------------------------------

    @property
    def pending_count(self) -> int:
        """The number of observations that were not shared with other workers yet."""
        return self._num_pending

    def snapshot(self) -> OwnFilter:
        """Returns a copy with its own copy of the filter."""
        copied = copy.copy(self)
        copied._make = None  # not needed in other processes
        copy_filter = getattr(self.filter, "copy", None)
        copied.filter = copy.deepcopy(self.filter) if copy_filter is None else copy_filter()
        return copied

    def forget_pending(self) -> None:
        """Resets the filter's buffer of observations that other workers do not have."""
        self._num_pending = 0
        if hasattr(self.filter, "reset_buffer"):
            self.filter.reset_buffer()

    def apply_changes(self, other: OwnFilter) -> None:
        """Adds the pending observations of another filter, if the filter supports that."""
        if hasattr(self.filter, "apply_changes"):
            self.filter.apply_changes(other.filter, with_buffer=False)

    def sync(self, other: OwnFilter) -> None:
        """Copies the statistics of another filter."""
        if hasattr(self.filter, "sync"):
            self.filter.sync(other.filter)
        else:
            self.filter = other.snapshot().filter


def _remove_bounds(box: spaces.Box) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, box.shape, np.float32) if is_float_box(box) else box
