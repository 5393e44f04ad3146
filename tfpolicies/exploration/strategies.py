"""Strategies that add noise to actions; `parameter_noise.py` has the one that perturbs weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfpolicies.errors import ConfigError, WeightsError
from tfpolicies.exploration.exploration import (
    Exploration,
    ExplorationContext,
    Schedule,
    ScheduledExploration,
    make_schedule_function,
    require_numbers,
    require_state,
    require_steps,
)
from tfpolicies.exploration.random_actions import ActionLeaf, ChoicesLeaf, ContinuousLeaf
from tfpolicies.exploration.transform import (
    MIN_TEMPERATURE,
    AdditiveNoise,
    Greedy,
    Sample,
    Transform,
)


class StochasticSampling(Exploration):
    """Samples the distribution.

    Args:
        context: the context that the strategy is created for.
        random_timesteps: before this time step, actions are uniform over the space (standard
            normal where a Box is unbounded); policies with 0 and with another number have different
            Programs.

    Raises:
        ConfigError: if an argument is out of range.
    """

    _temperature: float | None = None  # a subclass may divide the logits

    def __init__(self, context: ExplorationContext, *, random_timesteps: int = 0) -> None:
        require_steps(random_timesteps=random_timesteps)
        self._random_timesteps = int(random_timesteps)
        base = Sample(context.dist_class, tempered=self._temperature is not None)
        super().__init__(Transform(base, context.leaves, mixed=random_timesteps > 0))

    def get_params(self, timestep: int, explore: bool) -> np.ndarray:
        numbers = [float(explore and timestep < self._random_timesteps)]
        if not self._random_timesteps:
            numbers = []
        if self._temperature is not None:
            numbers.append(self._temperature)
        return np.array(numbers, np.float32)


class SoftQ(StochasticSampling):
    """Samples the softmax of logits (or Q-values) divided by a temperature.

    Log-probabilities are those of that softmax. Sutton and Barto 2018, section 2.8.

    Args:
        context: the context; its spaces must be Discrete, MultiDiscrete, Boxes of integers, or
            Dicts and Tuples of them.
        temperature: from 1e-6; 1 leaves the logits unchanged.
        random_timesteps: as in `StochasticSampling`.

    Raises:
        ConfigError: if an argument is out of range, or the action space does not fit.
    """

    def __init__(
        self, context: ExplorationContext, *, temperature: float = 1.0, random_timesteps: int = 0
    ) -> None:
        _require_leaves(self, context, lambda leaf: isinstance(leaf, ChoicesLeaf), _CHOICE_SPACES)
        require_numbers(MIN_TEMPERATURE, temperature=temperature)
        self._temperature = float(temperature)
        super().__init__(context, random_timesteps=random_timesteps)


class Random(Exploration):
    """Picks actions uniformly from the space; standard normal ones where a Box is unbounded."""

    def __init__(self, context: ExplorationContext) -> None:
        super().__init__(Transform(Greedy(), context.leaves, mixed=True))

    def get_params(self, timestep: int, explore: bool) -> np.ndarray:
        return np.array([float(explore)], np.float32)


class EpsilonGreedy(ScheduledExploration):
    """Takes the greedy action, or with probability epsilon, for each row, a random valid one.

    Mnih et al. 2015 (doi:10.1038/nature14236).

    Args:
        context: the context; its spaces must be discrete.
        initial_epsilon: the probability before `warmup_timesteps`.
        final_epsilon: the probability at the end.
        warmup_timesteps: how long it stays at `initial_epsilon`.
        epsilon_timesteps: how long it then takes to reach `final_epsilon`, linearly.
        epsilon_schedule: used instead of the four: a number, `[[timestep, epsilon], ...]` or a
            function of the time step.

    Raises:
        ConfigError: if an argument is out of range, or the action space does not fit.
    """

    state_name = "cur_epsilon"

    def __init__(
        self,
        context: ExplorationContext,
        *,
        initial_epsilon: float = 1.0,
        final_epsilon: float = 0.05,
        warmup_timesteps: int = 0,
        epsilon_timesteps: int = 100_000,
        epsilon_schedule: Schedule | None = None,
    ) -> None:
        _require_leaves(self, context, lambda leaf: leaf.is_discrete, _DISCRETE_SPACES)
        require_numbers(0.0, 1.0, initial_epsilon=initial_epsilon, final_epsilon=final_epsilon)
        require_steps(warmup_timesteps=warmup_timesteps, epsilon_timesteps=epsilon_timesteps)
        stop = warmup_timesteps + epsilon_timesteps
        default_points = (warmup_timesteps, initial_epsilon), (stop, final_epsilon)
        schedule = make_schedule_function("epsilon_schedule", epsilon_schedule, 1.0, default_points)
        super().__init__(Transform(Greedy(), context.leaves, mixed=True), schedule)

    def get_params(self, timestep: int, explore: bool) -> np.ndarray:
        epsilon = self.get_value(timestep)
        return np.array([epsilon if explore else 0.0], np.float32)


class PerWorkerEpsilonGreedy(EpsilonGreedy):
    """Gives each worker a separate, constant epsilon: Horgan et al. 2018, section 4.1.

    Worker i of N has epsilon 0.4^(1 + 7 (i - 1) / (N - 1)) (arXiv:1803.00933). The local worker is
    greedy; without other workers it acts as `EpsilonGreedy`, with the arguments given here.
    """

    def __init__(self, context: ExplorationContext, **settings: Any) -> None:
        index, workers = context.worker_index, context.num_workers
        if workers > 0:
            exponent = 1 + 7 * (index - 1) / max(workers - 1, 1)
            settings = {**settings, "epsilon_schedule": 0.4**exponent if index > 0 else 0.0}
        super().__init__(context, **settings)


class GaussianNoise(ScheduledExploration):
    """Adds normal noise to the greedy action, and clips the sum to the bounds.

    Fujimoto et al. 2018 (arXiv:1802.09477), section 6.1.

    Args:
        context: the context; its spaces must be Boxes of floats.
        random_timesteps: before this time step, actions are uniform over the space.
        stddev: of the noise at scale 1, for actions as the policy computes them.
        initial_scale: the scale at `random_timesteps`.
        final_scale: the scale at the end.
        scale_timesteps: how long it takes to reach `final_scale`, linearly.
        scale_schedule: used instead of the three: a number, `[[timestep, scale], ...]` or a
            function of the time step.

    Raises:
        ConfigError: if an argument is out of range, or the action space does not fit.
    """

    state_name = "cur_scale"

    def __init__(
        self,
        context: ExplorationContext,
        *,
        random_timesteps: int = 1000,
        stddev: float = 0.1,
        initial_scale: float = 1.0,
        final_scale: float = 0.02,
        scale_timesteps: int = 10_000,
        scale_schedule: Schedule | None = None,
    ) -> None:
        leaves = context.leaves
        boxes = [leaf for leaf in leaves if isinstance(leaf, ContinuousLeaf)]
        _require_leaves(self, context, lambda leaf: not leaf.is_discrete, "Boxes of floats")
        require_steps(random_timesteps=random_timesteps, scale_timesteps=scale_timesteps)
        require_numbers(stddev=stddev, initial_scale=initial_scale, final_scale=final_scale)
        stop = random_timesteps + scale_timesteps
        default_points = (random_timesteps, initial_scale), (stop, final_scale)
        schedule = make_schedule_function(
            "scale_schedule", scale_schedule, math.inf, default_points
        )
        self.stddev = float(stddev)
        self._random_timesteps = int(random_timesteps)
        super().__init__(Transform(AdditiveNoise(boxes), leaves, mixed=True), schedule)

    def get_params(self, timestep: int, explore: bool) -> np.ndarray:
        scale = self.get_value(timestep) * self.stddev
        is_random = float(explore and timestep < self._random_timesteps)
        return np.array([is_random, scale], np.float32)


class OrnsteinUhlenbeckNoise(GaussianNoise):
    """Adds Ornstein-Uhlenbeck noise: one noise state for all rows, which is updated in every call.

    A call first does state += -theta * state + sigma * N(0, 1), then adds
    scale * base_scale * state * (high - low) to the greedy actions of all its rows, the last factor
    being 1 where a bound is missing. The state carries over between episodes. Lillicrap et al. 2016
    (arXiv:1509.02971), section 7.

    Args:
        context: the context; its spaces must be Boxes of floats.
        ou_theta: how fast the state returns to 0, in [0, 1].
        ou_sigma: the standard deviation of a step.
        ou_base_scale: a factor of all noise.
        **settings: those of `GaussianNoise`, without `stddev`.

    Raises:
        ConfigError: if an argument is out of range, or the action space does not fit.
    """

    fixed_settings = frozenset({"stddev"})

    def __init__(
        self,
        context: ExplorationContext,
        *,
        ou_theta: float = 0.15,
        ou_sigma: float = 0.2,
        ou_base_scale: float = 0.1,
        **settings: Any,
    ) -> None:
        require_numbers(0.0, 1.0, ou_theta=ou_theta)
        require_numbers(ou_sigma=ou_sigma, ou_base_scale=ou_base_scale)
        super().__init__(context, stddev=ou_base_scale, **settings)
        self._theta, self.ou_sigma = float(ou_theta), float(ou_sigma)
        boxes = [leaf for leaf in context.leaves if isinstance(leaf, ContinuousLeaf)]
        self._width = np.concatenate([leaf.width for leaf in boxes])
        self._ou_state = np.zeros(len(self._width), np.float32)

    def draw_noise(self, rng: np.random.Generator, rows: int, params: np.ndarray) -> np.ndarray:
        step = self.ou_sigma * rng.standard_normal(len(self._ou_state), np.float32)
        self._ou_state += step - self._theta * self._ou_state
        noise = np.ones((rows, 1 + len(self._ou_state)), np.float32)
        noise[:, 1:] = self._ou_state * self._width
        return self.transform.draw_noise(rng, rows, params, base_noise=noise)

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "ou_state": self._ou_state.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        require_state(self, state, "last_timestep", "ou_state")
        ou_state = np.array(state["ou_state"], np.float32).ravel()
        if ou_state.shape != self._ou_state.shape:
            raise WeightsError(
                f"`ou_state` must have {len(self._ou_state)} numbers, one per component of the "
                f"action, but has {len(ou_state)}. Is it from another action space?"
            )
        super().set_state(state)
        self._ou_state = ou_state


_CHOICE_SPACES = "Discrete, MultiDiscrete and Boxes of integers"
_DISCRETE_SPACES = "Discrete, MultiDiscrete, MultiBinary and Boxes of integers"


def _require_leaves(
    strategy: Exploration,
    context: ExplorationContext,
    is_supported: Callable[[ActionLeaf], bool],
    supported: str,
) -> None:
    if not all(is_supported(leaf) for leaf in context.leaves):
        raise ConfigError(
            f"{type(strategy).__name__} supports the action spaces {supported}, and Dicts and "
            f"Tuples of them, but got {context.dist_class.space}. Choose another `type` in "
            "`exploration_config`; StochasticSampling supports any space."
        )
