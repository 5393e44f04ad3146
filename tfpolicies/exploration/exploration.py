"""Base classes of exploration strategies: a shared transform, and the numbers of one policy."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from tfpolicies.base.allowlist import allow_in_checkpoint
from tfpolicies.base.type_aliases import Structure
from tfpolicies.base.validators import is_finite, is_schedule
from tfpolicies.errors import ConfigError, UsageError, WeightsError
from tfpolicies.exploration.random_actions import ActionLeaf, make_action_leaves
from tfpolicies.exploration.schedules import piecewise_linear
from tfpolicies.exploration.transform import Transform
from tfpolicies.models.distributions.noise import NoiseKind

ScheduleFunction: TypeAlias = Callable[[int], float]
"""Maps the time step to a number."""
Schedule: TypeAlias = float | Sequence[Sequence[float]] | ScheduleFunction


class ExplorationContext(NamedTuple):
    """The context that a strategy is created for."""

    dist_class: Any  # the policy's action distribution
    make_strategy: Callable[
        [Any, ExplorationContext], Exploration
    ]  # creates a sub-strategy from its config
    worker_index: int = 0  # 0: the local worker
    num_workers: int = 0  # without the local one
    normalize_actions: bool = False  # a policy's own actions are in [-1, 1] where bounded

    @property
    def leaves(self) -> tuple[ActionLeaf, ...]:
        """The leaves of the action space, as exploration needs them."""
        return make_action_leaves(self.dist_class.space, self.normalize_actions)


@allow_in_checkpoint("exploration")
class Exploration(abc.ABC):
    """A strategy of one policy.

    The tensor code and the sizes are in `transform`, which has no numbers of the policy:
    policies whose transforms have the same `key` share one Program, and any of them may apply the
    noise and parameters of another. Everything else here belongs to the policy.

    To write your own strategy, subclass this; the constructor takes a `Setting` and, as keywords,
    the settings that users may put into `exploration_config`.

    Args:
        transform: the shared part.

    Attributes:
        transform: the shared part.
        needs_complete_episodes: whether `batch_mode` must be "complete_episodes".
        fixed_settings: keywords of the base's constructor that this class sets itself.
    """

    needs_complete_episodes = False
    fixed_settings: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def draw_noise(self, rng: np.random.Generator, rows: int, params: np.ndarray) -> np.ndarray:
        """Draws the noise of one call for B rows, float32 `[B, transform.noise_size]`.

        Args:
            rng: the policy's generator.
            rows: B.
            params: the result of `params` for this call.
        """
        return self.transform.draw_noise(rng, rows, params)

    @property
    def noise_kind(self) -> NoiseKind | None:
        """The kind of the noise, if `draw_noise` draws a single kind in one call; else None."""
        is_overridden = type(self).draw_noise is not Exploration.draw_noise
        return None if is_overridden else self.transform.noise_kind

    @abc.abstractmethod
    def get_params(self, timestep: int, explore: bool) -> np.ndarray:
        """Returns the parameters of the next call, float32 `[transform.num_params]`.

        Args:
            timestep: rows acted on so far.
            explore: False for greedy actions; the noise is then also zero.
        """

    def get_state(self) -> dict[str, Any]:
        """Returns the state to save: JSON values and arrays."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `state`.

        Raises:
            WeightsError: if `state` is that of another strategy. Nothing is changed then.
        """
        if state:
            raise WeightsError(
                f"{type(self).__name__} has no state, but got one with {list(state)}. Is it from "
                "another `exploration_config`?"
            )

    def adapt(self, clean: np.ndarray, perturbed: np.ndarray) -> float:
        """Adapts to the distance between the policy and the perturbed policy that acted.

        Args:
            clean: distribution inputs by the policy's own weights, float32 `[B, num_inputs]`.
            perturbed: the same, by the weights that acted.

        Returns:
            Their distance; 0 for strategies that do not perturb weights.
        """
        return 0.0

    def on_episode_start(self) -> None:  # noqa: B027 - most strategies have nothing to do
        """Called before the first action of an episode."""

    def on_episode_end(self) -> None:  # noqa: B027
        """Called after the last step of an episode."""


class ScheduledExploration(Exploration):
    """A strategy with one number that depends on the time step, such as epsilon.

    Args:
        transform: the shared part.
        schedule: from the time step to the number.
    """

    state_name: str
    """The key of the number in the state."""

    def __init__(self, transform: Transform, schedule: ScheduleFunction) -> None:
        super().__init__(transform)
        self._schedule = schedule
        self.last_timestep = 0

    def get_value(self, timestep: int) -> float:
        """Returns the number at a time step, and remembers that time step."""
        self.last_timestep = int(timestep)
        return self._schedule(self.last_timestep)

    @property
    def current_value(self) -> float:
        """The number at the last time step."""
        return self._schedule(self.last_timestep)

    def get_state(self) -> dict[str, Any]:
        return {self.state_name: self.current_value, "last_timestep": self.last_timestep}

    def set_state(self, state: Mapping[str, Any]) -> None:
        require_state(self, state, "last_timestep")
        if not is_finite(state["last_timestep"]):
            raise WeightsError(f"`last_timestep` must be a number, got {state['last_timestep']!r}.")
        self.last_timestep = int(state["last_timestep"])


def check_array(
    exploration: Exploration, method: str, result: Structure, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns the result of a strategy's method after checking dtype and shape.

    Args:
        exploration: the strategy.
        method: its method, for messages.
        result: the result.
        shape: the required shape; the dtype is float32.
    """
    if isinstance(result, np.ndarray) and result.shape == shape and result.dtype == np.float32:
        return result
    description = (
        f"{result.dtype} {list(result.shape)}"
        if isinstance(result, np.ndarray)
        else f"{result!r:.60}"
    )
    raise UsageError(
        f"{type(exploration).__name__}.{method} must return a NumPy array float32 {list(shape)}, "
        f"got {description}."
    )


def require_state(exploration: Exploration, state: Mapping[str, Any], *keys: str) -> None:
    """Raises a `WeightsError` unless `state` has all of `keys`."""
    missing = [key for key in keys if key not in state]
    if missing:
        raise WeightsError(
            f"The state of {type(exploration).__name__} needs {missing}, but this one has "
            f"{list(state)}. Is it from another `exploration_config`?"
        )


def make_schedule_function(
    name: str, value: Any, high: float, line: Sequence[Sequence[float]] = ()
) -> ScheduleFunction:
    """Returns a function from the time step to a number in [0, high].

    Args:
        name: the setting's name, for errors.
        value: a number; a list `[[timestep, number], ...]` with increasing time steps, between
            which the number changes linearly; or a function of the time step, whose results are
            clipped to the range; or None for `line`.
        high: the largest allowed number.
        line: points as in such a list, which are not checked.

    >>> make_schedule_function("epsilon_schedule", [[0, 1.0], [100, 0.0]], 1.0)(25)
    0.75
    """
    if value is None:
        return functools.partial(piecewise_linear, line)
    if callable(value):
        return lambda timestep: min(max(float(value(timestep)), 0.0), high)
    points = [[0, value]] if is_finite(value) else value
    if not is_schedule(points, is_finite) or not all(0.0 <= number <= high for _, number in points):
        raise ConfigError(
            f"`{name}` must be a number from 0.0 to {high}, a list [[timestep, number], ...] of "
            "such numbers with increasing timesteps, or a function of the timestep; got "
            f"{value!r}."
        )
    return functools.partial(piecewise_linear, points)


def require_numbers(low: float = 0.0, high: float = float("inf"), **settings: float) -> None:
    """Raises a `ConfigError` unless all of these settings are numbers in [low, high]."""
    for name, value in settings.items():
        if not is_finite(value) or not low <= value <= high:
            raise ConfigError(f"`{name}` must be a number from {low} to {high}, got {value!r}.")


def require_steps(**settings: float) -> None:
    """Raises a `ConfigError` unless all of these settings are integers from 0."""
    for name, value in settings.items():
        if not is_finite(value) or value != int(value) or value < 0:
            raise ConfigError(f"`{name}` must be an integer >= 0, got {value!r}.")
