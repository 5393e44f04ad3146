"""The shared part of exploration: tensor code from a distribution and noise to actions.

A transform has a *base*, which chooses actions, and may be *mixed*: each row then takes a uniformly
random action instead with probability epsilon. All strategies use one of three bases, mixed or
not, so that many of them share one Program:

=================  =======  ======================================================
base               mixed    strategies
=================  =======  ======================================================
`Sample`           no       StochasticSampling, SoftQ
`Sample`           yes      the same with `random_timesteps` (epsilon is 1, later 0)
`Greedy`           yes      EpsilonGreedy, PerWorkerEpsilonGreedy, Random (epsilon is 1)
`AdditiveNoise`          yes      GaussianNoise, OrnsteinUhlenbeckNoise
=================  =======  ======================================================

Zero noise always gives exactly the greedy action, for any parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from tfpolicies.exploration.random_actions import ActionLeaf, ContinuousLeaf
from tfpolicies.models.distributions import (
    MASKED_LOGIT,
    ActionDistribution,
    Distribution,
    ProductDistribution,
)
from tfpolicies.models.distributions.noise import NOISE_KINDS, NoiseKind

AnyDistribution: TypeAlias = Distribution | ProductDistribution
SelectorOutput: TypeAlias = tuple[list[tf.Tensor], AnyDistribution | None]
MIN_TEMPERATURE = 1e-6


class BaseSelector(Protocol):
    """Chooses the actions of rows that do not take random ones."""

    key: Hashable
    """Equal for equal code, given the same action distribution."""
    noise_size: int
    """Number of noise columns that it reads."""
    num_params: int
    """Number of parameters that it reads."""

    def draw(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Draws its noise, float32 `[B, noise_size]`."""

    def choose(
        self, distribution: AnyDistribution, noise: tf.Tensor, params: tf.Tensor
    ) -> SelectorOutput:
        """Returns an action tensor per leaf, and their distribution or None."""


class Sample:
    """Samples the distribution, with logits divided by a temperature if `tempered`.

    The temperature, if tempered, is its only parameter.
    """

    def __init__(self, dist_class: ActionDistribution, tempered: bool = False) -> None:
        self._dist_class = dist_class
        self._tempered = tempered
        self.key: Hashable = ("sample", tempered)
        self.noise_size: int = dist_class.noise_size
        self.num_params = int(tempered)

    @property
    def noise_kind(self) -> NoiseKind | None:
        """The kind of the distribution's noise, if it is a single kind."""
        blocks = self._dist_class.noise_blocks
        return NOISE_KINDS[blocks[0][0]] if len(blocks) == 1 else None

    def draw(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Draws the distribution's own noise."""
        return self._dist_class.draw_noise(rng, rows)

    def choose(
        self, distribution: AnyDistribution, noise: tf.Tensor, params: tf.Tensor
    ) -> SelectorOutput:
        """Samples the distribution."""
        if self._tempered:
            temperature = tf.maximum(params[0], MIN_TEMPERATURE)
            logits = tf.maximum(distribution.inputs / temperature, MASKED_LOGIT)  # never -inf
            distribution = self._dist_class(logits)
        return distribution.sample_leaves(noise), distribution


class Greedy:
    """Takes the mode of the distribution."""

    key: Hashable = ("greedy",)
    noise_size = 0
    num_params = 0

    def draw(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Returns no noise, `[B, 0]`."""
        return np.zeros((rows, 0), np.float32)

    def choose(
        self, distribution: AnyDistribution, noise: tf.Tensor, params: tf.Tensor
    ) -> SelectorOutput:
        """Returns the mode."""
        return _get_greedy_actions(distribution), None


class AdditiveNoise:
    """Adds scaled noise to the mode, clipped to the bounds. Its only parameter is the scale.

    The first column of noise is 1, so that zero noise leaves the mode unchanged and unclipped; the
    others are added to the components of all leaves, in their order.
    """

    num_params = 1

    def __init__(self, leaves: Sequence[ContinuousLeaf]) -> None:
        self._leaves = leaves
        self._sizes = [math.prod(leaf.shape) for leaf in leaves]
        bounds = tuple((leaf.low.tobytes(), leaf.high.tobytes()) for leaf in leaves)
        self.key: Hashable = ("disturb", bounds)
        self.noise_size = 1 + sum(self._sizes)

    def draw(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Draws standard normal noise."""
        noise = np.ones((rows, self.noise_size), np.float32)
        noise[:, 1:] = rng.standard_normal((rows, self.noise_size - 1), np.float32)
        return noise

    def choose(
        self, distribution: AnyDistribution, noise: tf.Tensor, params: tf.Tensor
    ) -> SelectorOutput:
        """Adds the noise to the mode."""
        gate = noise[:, :1] > 0.0
        parts = tf.split(noise[:, 1:] * params[0], self._sizes, axis=-1)
        actions = []
        for leaf, mode, part in zip(
            self._leaves, _get_greedy_actions(distribution), parts, strict=True
        ):
            flat = tf.reshape(mode, [-1, math.prod(leaf.shape)])
            flat = tf.where(gate, leaf.clip(flat + part), flat)
            actions.append(tf.reshape(flat, [-1, *leaf.shape]))
        return actions, None


class Transform:
    """The part of exploration that policies with the same Program share.

    Args:
        base: chooses the actions.
        leaves: the leaves of the action space.
        mixed: whether rows may take random actions instead. The first parameter is then epsilon,
            the probability of that; the base's follow.

    Attributes:
        key: hashable, equal for transforms that compile to the same code, given the same class,
            spaces and distribution.
        noise_size: columns of the whole noise: a network's (see `with_network_noise`), the base's,
            then, if mixed, one that decides whether the action is random, and those of random
            actions.
        num_params: number of float32 parameters.
        noise_kind: the kind of the noise, if it is a single kind and every call draws all of it;
            else None.
    """

    _num_network_columns = 0  # columns of a network's noise, which come first

    def __init__(self, base: BaseSelector, leaves: Sequence[ActionLeaf], mixed: bool) -> None:
        self._base = base
        self._leaves = leaves
        self._mixed = mixed
        self._sizes = [leaf.num_columns for leaf in leaves]
        bounds = [
            (x.low.tobytes(), x.high.tobytes()) for x in leaves if isinstance(x, ContinuousLeaf)
        ]
        self.key: Hashable = (base.key, mixed and tuple(bounds), mixed)
        self.noise_size = base.noise_size + (1 + sum(self._sizes) if mixed else 0)
        self.num_params = base.num_params + int(mixed)
        self.noise_kind: NoiseKind | None = None
        if isinstance(base, Sample) and not mixed:
            self.noise_kind = base.noise_kind

    def with_network_noise(self, columns: int) -> Transform:
        """Returns a transform whose noise starts with that of a network, which it also draws.

        Args:
            columns: of the network's noise, standard normal; 0 for the transform itself.
        """
        if not columns:
            return self
        result = copy.copy(self)
        result._num_network_columns, result.noise_kind = columns, None
        result.key = (columns, self.key)
        result.noise_size = columns + self.noise_size
        return result

    @cached_property
    def _normal_columns(self) -> np.ndarray:
        """The standard normal columns of the noise of random actions."""
        return np.flatnonzero(np.concatenate([leaf.normal for leaf in self._leaves]))

    def draw_noise(
        self,
        rng: np.random.Generator,
        rows: int,
        params: np.ndarray,
        base_noise: np.ndarray | None = None,
    ) -> np.ndarray:
        """Draws the noise of one call, float32 `[B, noise_size]`, only as far as `params` need it.

        Args:
            rng: the policy's generator.
            rows: B.
            params: float32 `[num_params]`.
            base_noise: `[B, base.noise_size]`, used instead of drawing the base's part.
        """
        if not self._num_network_columns:
            return self._draw_exploration_noise(rng, rows, params, base_noise)
        network_noise = rng.standard_normal((rows, self._num_network_columns), np.float32)
        return np.concatenate(
            [network_noise, self._draw_exploration_noise(rng, rows, params, base_noise)], axis=1
        )

    def _draw_exploration_noise(
        self, rng: np.random.Generator, rows: int, params: np.ndarray, base_noise: np.ndarray | None
    ) -> np.ndarray:
        epsilon = float(params[0]) if self._mixed else 0.0
        if base_noise is None and epsilon < 1.0:
            base_noise = self._base.draw(rng, rows)
        if not self._mixed and base_noise is not None:
            return base_noise
        base_size = self._base.noise_size
        noise = np.zeros((rows, self.noise_size - self._num_network_columns), np.float32)
        if base_noise is not None:
            noise[:, :base_size] = base_noise
        if epsilon > 0.0:
            random_noise = rng.random((rows, noise.shape[1] - base_size), np.float32)
            random_noise[:, 0] = (
                1.0 - random_noise[:, 0]
            )  # the coin, in (0, 1], because 0 means no noise
            if len(self._normal_columns):
                shape = (rows, len(self._normal_columns))
                random_noise[:, 1 + self._normal_columns] = rng.standard_normal(shape, np.float32)
            noise[:, base_size:] = random_noise
        return noise

    def apply(
        self, distribution: AnyDistribution, noise: tf.Tensor, params: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns an action tensor `[B, *shape]` per leaf, and their log-probabilities `[B]`.

        Log-probabilities are those of the sampled distribution, also for random actions; 0 if
        the base has no distribution. Zero noise gives the greedy actions.

        Args:
            distribution: `[B]` distributions, with `inputs`, `sample_leaves`, `logp_leaves`, and
                `parts` if the action space is nested.
            noise: float32 `[B, noise_size]`.
            params: float32 `[num_params]`.
        """
        if self._num_network_columns:
            noise = noise[:, self._num_network_columns :]
        if not self._mixed:
            actions, sampled = self._base.choose(distribution, noise, params)
            if sampled is None:
                return actions, tf.zeros([tf.shape(noise)[0]], tf.float32)
            return actions, sampled.sampled_logp(noise)
        base_noise, coin, columns = tf.split(
            noise, [self._base.noise_size, 1, sum(self._sizes)], axis=-1
        )
        epsilon, base_params = tf.split(params, [1, self._base.num_params])
        actions, sampled = self._base.choose(distribution, base_noise, base_params)
        coin = tf.squeeze(coin, axis=-1)
        explores = coin > 1.0 - epsilon
        actions = self._mix(distribution, actions, explores, columns)
        if sampled is None:
            return actions, tf.minimum(coin, 0.0)  # zeros: coins are not negative
        exact = sampled.sampled_logp(base_noise)
        return actions, tf.where(explores, sampled.logp_leaves(actions), exact)

    def _mix(
        self,
        distribution: AnyDistribution,
        actions: list[tf.Tensor],
        explores: tf.Tensor,
        columns: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Replaces the actions of the rows that explore, `[B]`, by random ones."""
        leaf_noise = tf.split(columns, self._sizes, axis=-1) if len(self._sizes) > 1 else [columns]
        result = []
        for leaf, part, action, noise in zip(
            self._leaves, get_leaf_distributions(distribution), actions, leaf_noise, strict=True
        ):
            random_action = leaf.sample_random(part, noise)
            is_random = (
                tf.reshape(explores, [-1] + [1] * len(leaf.shape)) if leaf.shape else explores
            )
            if leaf.is_discrete:  # exact for integers, and half the operations of `where` in ONNX
                difference = random_action - tf.cast(action, random_action.dtype)
                action += tf.cast(
                    tf.cast(is_random, random_action.dtype) * difference, action.dtype
                )
            else:
                action = tf.where(is_random, random_action, action)
            result.append(action)
        return result


def get_leaf_distributions(distribution: AnyDistribution) -> list[Any]:
    parts = getattr(distribution, "parts", None)
    return list(parts) if isinstance(parts, list | tuple) else [distribution]


def _get_greedy_actions(distribution: AnyDistribution) -> list[tf.Tensor]:
    return [part.deterministic_sample() for part in get_leaf_distributions(distribution)]
