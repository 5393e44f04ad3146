"""Exploration by noise on the weights: Plappert et al. 2018, arXiv:1706.01905."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.base.validators import is_finite
from tfpolicies.errors import ConfigError, WeightsError
from tfpolicies.exploration.exploration import (
    Exploration,
    ExplorationContext,
    require_numbers,
    require_state,
    require_steps,
)
from tfpolicies.exploration.random_actions import MASKED_THRESHOLD, ChoicesLeaf
from tfpolicies.exploration.strategies import EpsilonGreedy, GaussianNoise, OrnsteinUhlenbeckNoise
from tfpolicies.exploration.transform import get_leaf_distributions
from tfpolicies.models.eager_mode import ensure_eager

ADAPTATION = 1.01
"""The paper's alpha, the factor by which sigma changes (appendix C)."""

_NORMALIZATION_ROLES = frozenset({"gamma", "beta", "moving_mean", "moving_variance"})


class ParameterNoise(Exploration):
    """Acts with normal noise added to the weights, the same noise for a whole episode.

    The standard deviation sigma of the noise adapts, so that the perturbed policy stays about as
    far from the unperturbed one as a simpler strategy, the sub-exploration, would. The
    sub-exploration is also applied on top. Callers that act do the following:

    1. at an episode's start call `on_episode_start()`; while `needs_perturbation`, act with the
       weights that `perturb(weights, rng)` returns;
    2. at its end call `adapt(clean, perturbed)` with the distribution inputs that both sets of
       weights give for the episode's observations.

    It is therefore only useful with complete episodes. Checkpoints do not contain the perturbed
    weights: a restored policy draws new noise.

    Args:
        context: the context that the strategy is created for.
        initial_stddev: the first sigma.
        random_timesteps: before this time step, actions of the default sub-exploration are random.
        sub_exploration: the config of another strategy: EpsilonGreedy for Discrete and
            MultiDiscrete spaces and Boxes of integers (by default with epsilon 0.01), GaussianNoise
            or OrnsteinUhlenbeckNoise (the default) for Boxes of floats.

    Attributes:
        sub_exploration: the strategy that is applied on top.
        stddev: the current sigma.
        needs_perturbation: whether an episode started since the last `perturb`.

    Raises:
        ConfigError: if an argument is out of range, or the action space does not fit.
    """

    needs_complete_episodes = True

    def __init__(
        self,
        context: ExplorationContext,
        *,
        initial_stddev: float = 1.0,
        random_timesteps: int = 10_000,
        sub_exploration: Mapping[str, Any] | None = None,
    ) -> None:
        require_numbers(initial_stddev=initial_stddev)
        require_steps(random_timesteps=random_timesteps)
        leaves = context.leaves
        self._sizes = [n for leaf in leaves if isinstance(leaf, ChoicesLeaf) for n in leaf.sizes]
        discrete = all(isinstance(leaf, ChoicesLeaf) for leaf in leaves)
        if sub_exploration is None:
            sub_exploration = _make_default_config(discrete, random_timesteps)
        sub = context.make_strategy(sub_exploration, context)
        if not isinstance(sub, EpsilonGreedy if discrete else GaussianNoise):
            raise ConfigError(
                "`sub_exploration` must be EpsilonGreedy for discrete action spaces, GaussianNoise "
                "or OrnsteinUhlenbeckNoise for Boxes of floats, because its scale limits "
                f"parameter noise; got {type(sub).__name__} for {context.dist_class.space}."
            )
        super().__init__(sub.transform)
        self.sub_exploration: EpsilonGreedy | GaussianNoise = sub
        self._dist_class = context.dist_class
        self.stddev = float(initial_stddev)
        self.needs_perturbation = True

    def perturb(
        self, weights: Mapping[str, np.ndarray], rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Returns `weights` with noise of standard deviation sigma added; copies, not in place.

        Arrays that are not floats, and the scales, offsets and statistics of normalisation layers,
        are returned unchanged.

        Args:
            weights: arrays by key; the last part of a key is the variable's role.
            rng: the policy's generator.
        """
        self.needs_perturbation = False
        return {
            key: self._add_noise(array, rng) if _is_perturbed(key, array) else array
            for key, array in weights.items()
        }

    def _add_noise(self, array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        noise = rng.standard_normal(array.shape, np.float32)
        return array + (self.stddev * noise).astype(array.dtype)

    def adapt(self, clean: np.ndarray, perturbed: np.ndarray) -> float:
        """Increases sigma if the perturbed policy is close enough, else decreases it.

        The paper's equation 8: sigma is multiplied by 1.01 if the distance is at most `threshold`,
        and divided by it if not.

        Args:
            clean: inputs of the action distribution by the policy's own weights, float32
                `[B, num_inputs]`.
            perturbed: the same by the perturbed weights.

        Returns:
            The distance (the paper's appendix C.1 and C.2): of discrete policies the mean KL
            divergence of the softmax policies, of continuous ones the root of the mean square
            difference of greedy actions.
        """
        if self._sizes:
            distance = compute_softmax_distance(clean, perturbed, self._sizes)
        else:
            distance = compute_action_distance(
                self._get_greedy_actions(clean), self._get_greedy_actions(perturbed)
            )
        self.stddev *= ADAPTATION if distance <= self.threshold else 1 / ADAPTATION
        return distance

    @ensure_eager()
    def _get_greedy_actions(self, inputs: np.ndarray) -> np.ndarray:
        parts = get_leaf_distributions(self._dist_class(tf.constant(inputs, tf.float32)))
        flat = [tf.reshape(part.deterministic_sample(), [len(inputs), -1]) for part in parts]
        return tf.concat(flat, axis=-1).numpy()

    @property
    def threshold(self) -> float:
        """Maximum distance between perturbed and unperturbed policy: the paper's delta.

        It depends on the sub-exploration: -log(1 - epsilon + epsilon / n), summed over cells of n
        actions; the scale times `stddev`; the scale times `ou_sigma`.
        """
        sub = self.sub_exploration
        if isinstance(sub, EpsilonGreedy):
            epsilon = sub.current_value
            return sum(-math.log(1 - epsilon + epsilon / n) for n in self._sizes)
        return sub.current_value * (
            sub.ou_sigma if isinstance(sub, OrnsteinUhlenbeckNoise) else sub.stddev
        )

    def draw_noise(self, rng: np.random.Generator, rows: int, params: np.ndarray) -> np.ndarray:
        return self.sub_exploration.draw_noise(rng, rows, params)

    def get_params(self, timestep: int, explore: bool) -> np.ndarray:
        return self.sub_exploration.get_params(timestep, explore)

    def on_episode_start(self) -> None:
        self.needs_perturbation = True
        self.sub_exploration.on_episode_start()

    def on_episode_end(self) -> None:
        self.sub_exploration.on_episode_end()

    def get_state(self) -> dict[str, Any]:
        return {"cur_stddev": self.stddev, "sub_exploration": self.sub_exploration.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        require_state(self, state, "cur_stddev", "sub_exploration")
        if not is_finite(state["cur_stddev"]):
            raise WeightsError(f"`cur_stddev` must be a number, got {state['cur_stddev']!r}.")
        self.sub_exploration.set_state(state["sub_exploration"])
        self.stddev = float(state["cur_stddev"])
        self.needs_perturbation = True


def compute_softmax_distance(
    clean: np.ndarray, perturbed: np.ndarray, sizes: Sequence[int]
) -> float:
    """Returns the mean of KL(softmax(clean) || softmax(perturbed)), summed over cells, in nats.

    Masked actions, of probability 0, do not count. Plappert et al. 2018, appendix C.1.

    Args:
        clean: logits or Q-values `[B, sum of sizes]`.
        perturbed: the same of the other policy.
        sizes: how many actions each cell has.

    >>> compute_softmax_distance(np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]]), [2])
    0.1438...
    """
    cuts = np.cumsum(sizes)[:-1]
    pairs = zip(np.split(clean, cuts, axis=-1), np.split(perturbed, cuts, axis=-1), strict=True)
    return float(sum(np.mean(_compute_softmax_divergence(p, q)) for p, q in pairs))


def compute_action_distance(clean: np.ndarray, perturbed: np.ndarray) -> float:
    """Returns the root of the mean square difference of actions `[B, k]`.

    Plappert et al. 2018, appendix C.2, equation 9.

    >>> compute_action_distance(np.array([[0.0, 0.0]]), np.array([[1.0, 7.0]]))
    5.0
    """
    return float(np.sqrt(np.mean(np.square(np.subtract(clean, perturbed, dtype=np.float64)))))


def _compute_softmax_divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
    is_allowed = np.asarray(p_logits) > MASKED_THRESHOLD
    return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1, where=is_allowed)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _is_perturbed(key: str, array: np.ndarray) -> bool:
    role = key.rsplit("/", 1)[-1].partition("#")[0]
    return np.issubdtype(array.dtype, np.floating) and role not in _NORMALIZATION_ROLES


def _make_default_config(discrete: bool, random_timesteps: int) -> dict[str, Any]:
    if not discrete:
        return {"type": "OrnsteinUhlenbeckNoise", "random_timesteps": random_timesteps}
    step_schedule = [[random_timesteps, 1.0], [random_timesteps + 1, 0.01]]
    schedule: Any = step_schedule if random_timesteps else 0.01
    return {"type": "EpsilonGreedy", "epsilon_schedule": schedule}
