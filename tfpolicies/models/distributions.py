"""Action distributions that transform noise.

A distribution is pure: it turns its inputs (a model's outputs) and noise into actions. The noise is
drawn by a NumPy generator that belongs to the policy, so one seed gives the same actions wherever
the distribution runs. Zero noise gives the mode, which is how greedy actions are computed.

Only operations of the Exp/Log/Abs class are used, so that every distribution converts to ONNX.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.errors import UnsupportedSpaceError


class Distribution(abc.ABC):
    """A batch of distributions over the actions of one leaf space.

    Args:
        inputs: `[B, num_inputs]` float32, as the model computed them.
        space: the action space.

    Attributes:
        noise_kind: the name of the noise's distribution, "gumbel" or "normal".
    """

    noise_kind: ClassVar[str]

    def __init__(self, inputs: tf.Tensor, space: spaces.Space) -> None:
        self.inputs = inputs
        self.space: Any = space

    @staticmethod
    @abc.abstractmethod
    def num_inputs(space: spaces.Space) -> int:
        """Returns how many numbers a model must compute per row."""

    @staticmethod
    @abc.abstractmethod
    def draw_noise(space: spaces.Space, rng: np.random.Generator, batch_size: int) -> np.ndarray:
        """Draws the noise of one call, float32 `[B, noise_size]`."""

    @staticmethod
    @abc.abstractmethod
    def noise_size(space: spaces.Space) -> int:
        """Returns how many numbers of noise a row takes."""

    @abc.abstractmethod
    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Turns noise `[B, noise_size]` into actions `[B, *shape]`; zero noise into the mode."""

    @abc.abstractmethod
    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        """Returns the log-probability (density) of `actions`, float32 `[B]`."""

    @abc.abstractmethod
    def entropy(self) -> tf.Tensor:
        """Returns the entropy in nats, float32 `[B]`."""

    @abc.abstractmethod
    def kl(self, other: Distribution) -> tf.Tensor:
        """Returns KL(self || other) in nats, float32 `[B]`."""

    def deterministic_sample(self) -> tf.Tensor:
        """Returns the mode, `[B, *shape]`."""
        size = self.noise_size(self.space)
        return self.sample(tf.zeros([tf.shape(self.inputs)[0], size], tf.float32))


class Categorical(Distribution):
    """One of n actions, from n logits. Gumbel noise, Maddison et al. 2014 (arXiv:1411.0030).

    Actions are 0-based int64; the environment's `start` is added behind the policy.
    """

    noise_kind = "gumbel"

    @staticmethod
    def num_inputs(space: Any) -> int:
        return int(space.n)

    @staticmethod
    def noise_size(space: Any) -> int:
        return int(space.n)

    @staticmethod
    def draw_noise(space: Any, rng: np.random.Generator, batch_size: int) -> np.ndarray:
        # -log of a standard exponential variable is a standard Gumbel variable.
        noise = rng.standard_exponential((batch_size, int(space.n)), np.float32)
        np.maximum(noise, np.finfo(np.float32).tiny, out=noise)
        np.log(noise, out=noise)
        return np.negative(noise, out=noise)

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        return tf.argmax(self.inputs + noise, axis=-1, output_type=tf.int64)

    def _log_probs(self) -> tf.Tensor:
        return tf.nn.log_softmax(self.inputs, axis=-1)

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        chosen = tf.one_hot(tf.cast(actions, tf.int32), int(self.space.n))
        return tf.reduce_sum(self._log_probs() * chosen, axis=-1)

    def entropy(self) -> tf.Tensor:
        log_probs = self._log_probs()
        return -tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=-1)

    def kl(self, other: Distribution) -> tf.Tensor:
        log_p = self._log_probs()
        log_q = tf.nn.log_softmax(other.inputs, axis=-1)
        return tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), axis=-1)


class DiagGaussian(Distribution):
    """Independent normals, from k means and k logarithms of standard deviations, concatenated.

    An action of shape `shape` has k = prod(shape) components; its density is their product.
    """

    noise_kind = "normal"

    @staticmethod
    def num_inputs(space: Any) -> int:
        return 2 * math.prod(space.shape)

    @staticmethod
    def noise_size(space: Any) -> int:
        return math.prod(space.shape)

    @staticmethod
    def draw_noise(space: Any, rng: np.random.Generator, batch_size: int) -> np.ndarray:
        return rng.standard_normal((batch_size, math.prod(space.shape)), np.float32)

    def _parts(self) -> tuple[tf.Tensor, tf.Tensor]:
        mean, log_std = tf.split(self.inputs, 2, axis=-1)
        return mean, log_std

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._parts()
        return tf.reshape(mean + tf.exp(log_std) * noise, [-1, *self.space.shape])

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._parts()
        flat = tf.reshape(tf.cast(actions, tf.float32), tf.shape(mean))
        z = (flat - mean) * tf.exp(-log_std)
        return -tf.reduce_sum(0.5 * z * z + log_std + 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> tf.Tensor:
        _, log_std = self._parts()
        return tf.reduce_sum(log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def kl(self, other: Distribution) -> tf.Tensor:
        mean, log_std = self._parts()
        other_mean, other_log_std = tf.split(other.inputs, 2, axis=-1)
        variance_ratio = tf.exp(2.0 * (log_std - other_log_std))
        distance = tf.square((mean - other_mean) * tf.exp(-other_log_std))
        terms = other_log_std - log_std + 0.5 * (variance_ratio + distance - 1.0)
        return tf.reduce_sum(terms, axis=-1)


@dataclass(frozen=True)
class ActionDistribution:
    """The distribution class of one action space: `dist_class(inputs)` gives a `Distribution`.

    >>> dist_class = ActionDistribution.of(spaces.Discrete(3))
    >>> dist_class.num_inputs, dist_class.noise_size
    (3, 3)
    """

    kind: type[Distribution]
    space: spaces.Space

    @classmethod
    def of(cls, space: spaces.Space) -> ActionDistribution:
        """Returns the usual distribution for `space`.

        Raises:
            UnsupportedSpaceError: if there is none.
        """
        if isinstance(space, spaces.Discrete):
            return cls(Categorical, space)
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            return cls(DiagGaussian, space)
        raise UnsupportedSpaceError(
            f"No action distribution for {space}; supported action spaces are Discrete and Box of "
            "floats. Wrap the environment with a gymnasium.ActionWrapper."
        )

    def __call__(self, inputs: tf.Tensor, model: Any = None) -> Distribution:
        """Builds the distributions of a batch; `model` is accepted for ported code and unused."""
        del model
        return self.kind(inputs, self.space)

    @property
    def num_inputs(self) -> int:
        """How many numbers a model must compute per row."""
        return self.kind.num_inputs(self.space)

    @property
    def noise_kind(self) -> str:
        """The name of the noise's distribution, "gumbel" or "normal"."""
        return self.kind.noise_kind

    @property
    def noise_size(self) -> int:
        """How many numbers of noise a row takes."""
        return self.kind.noise_size(self.space)

    def draw_noise(self, rng: np.random.Generator, batch_size: int) -> np.ndarray:
        """Draws the noise for `batch_size` rows, float32 `[B, noise_size]`."""
        return self.kind.draw_noise(self.space, rng, batch_size)
