"""Distributions over the vectors of a Box of floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.models.distributions.base import Distribution, register_box_distribution
from tfpolicies.models.spaces import get_scale_and_center

LOG_STD_RANGE = (-5.0, 2.0)  # of SquashedGaussian
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class _GaussianBase(Distribution):
    """Base of distributions of k = prod(shape) independent normals.

    The inputs are k means and k logarithms of standard deviations.
    """

    @staticmethod
    def num_inputs(space: Any) -> int:
        return 2 * math.prod(space.shape)

    @staticmethod
    def noise_size(space: Any) -> int:
        return math.prod(space.shape)

    @property
    def log_std(self) -> tf.Tensor:
        """The logarithms of the standard deviations, `[B, k]`."""
        return _split_inputs(self.inputs)[1]


class DiagGaussian(_GaussianBase):
    """Independent normals, from k means and k logarithms of standard deviations, concatenated.

    Their density is the product of those of all components.
    """

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        mean, log_std = _split_inputs(self.inputs)
        return tf.reshape(mean + tf.exp(log_std) * noise, [-1, *self.space.shape])

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        mean, log_std = _split_inputs(self.inputs)
        z = (_flatten_like(actions, mean) - mean) * tf.exp(-log_std)
        return tf.reduce_sum(_log_density(z, log_std), axis=-1)

    def entropy(self) -> tf.Tensor:
        _, log_std = _split_inputs(self.inputs)
        return tf.reduce_sum(log_std + (_HALF_LOG_2PI + 0.5), axis=-1)

    def kl(self, other: Distribution) -> tf.Tensor:
        mean, log_std = _split_inputs(self.inputs)
        other_mean, other_log_std = _split_inputs(other.inputs)
        variance_ratio = tf.exp(2.0 * (log_std - other_log_std))
        distance = tf.square((mean - other_mean) * tf.exp(-other_log_std))
        terms = other_log_std - log_std + 0.5 * (variance_ratio + distance - 1.0)
        return tf.reduce_sum(terms, axis=-1)


class SquashedGaussian(_GaussianBase):
    """A DiagGaussian transformed by tanh: actions in [-1, 1]. Haarnoja et al. 2018, appendix C.

    Inputs are k means and k logarithms of standard deviations (arXiv:1801.01290); the latter are
    clipped to [-5, 2]. There is no closed form of the entropy nor of divergences.
    """

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._split_and_clip_inputs()
        return tf.reshape(tf.tanh(mean + tf.exp(log_std) * noise), [-1, *self.space.shape])

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        """Returns the log-density of `actions`, clipped to [-1 + 1e-6, 1 - 1e-6]."""
        mean, log_std = self._split_and_clip_inputs()
        flat = tf.clip_by_value(_flatten_like(actions, mean), -1.0 + 1e-6, 1.0 - 1e-6)
        u = 0.5 * (tf.math.log(1.0 + flat) - tf.math.log(1.0 - flat))  # atanh
        z = (u - mean) * tf.exp(-log_std)
        return tf.reduce_sum(_log_density(z, log_std) - _log_tanh_slope(u), axis=-1)

    def sampled_logp(self, noise: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._split_and_clip_inputs()
        u = mean + tf.exp(log_std) * noise
        return tf.reduce_sum(_log_density(noise, log_std) - _log_tanh_slope(u), axis=-1)

    def entropy(self) -> tf.Tensor:
        """Raises ConfigError: there is no closed form."""
        raise _make_no_closed_form_error("entropy")

    def kl(self, other: Distribution) -> tf.Tensor:
        """Raises ConfigError: there is no closed form."""
        raise _make_no_closed_form_error("KL divergence")

    @property
    def log_std(self) -> tf.Tensor:
        """The clipped logarithms of the standard deviations of the normals, `[B, k]`."""
        return self._split_and_clip_inputs()[1]

    def _split_and_clip_inputs(self) -> tuple[tf.Tensor, tf.Tensor]:
        mean, log_std = _split_inputs(self.inputs)
        return mean, tf.clip_by_value(log_std, *LOG_STD_RANGE)


class Deterministic(Distribution):
    """Actions equal to the model's outputs, with certainty: log-probability and entropy are 0."""

    @staticmethod
    def num_inputs(space: Any) -> int:
        return math.prod(space.shape)

    @staticmethod
    def noise_size(space: Any) -> int:
        return 0

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        return tf.reshape(self.inputs, [-1, *self.space.shape])

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        return self._zeros()

    def entropy(self) -> tf.Tensor:
        return self._zeros()

    def kl(self, other: Distribution) -> tf.Tensor:
        return self._zeros()

    def _zeros(self) -> tf.Tensor:
        return tf.zeros([tf.shape(self.inputs)[0]], tf.float32)


class SquashedDeterministic(Deterministic):
    """The tanh of the model's outputs, with certainty: actions in [-1, 1]."""

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        return tf.tanh(super().sample(noise))


class BoundedDeterministic(SquashedDeterministic):
    """The tanh of the model's outputs, scaled to the bounds of the Box, with certainty.

    Components without a lower or upper bound are in [-1, 1], clipped to the bound that exists.
    """

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        with np.errstate(over="ignore"):
            low, high = (x.astype(np.float32) for x in (self.space.low, self.space.high))
        half_width, middle = get_scale_and_center(low, high)
        return tf.clip_by_value(super().sample(noise) * half_width + middle, low, high)


def _split_inputs(inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    mean, log_std = tf.split(inputs, 2, axis=-1)
    return mean, log_std


def _flatten_like(actions: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(actions, tf.float32), tf.shape(like))


def _log_density(z: tf.Tensor, log_std: tf.Tensor) -> tf.Tensor:
    """Returns the log-density of normals at `z` standard deviations from their means."""
    return -(0.5 * z * z + log_std + _HALF_LOG_2PI)


def _log_tanh_slope(u: tf.Tensor) -> tf.Tensor:
    """Returns log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which is even in u."""
    size = tf.abs(u)
    return 2.0 * (math.log(2.0) - size - tf.math.log(1.0 + tf.exp(-2.0 * size)))


def _make_no_closed_form_error(quantity: str) -> ConfigError:
    return ConfigError(
        f"SquashedGaussian has no {quantity} in closed form. Estimate it from samples with "
        "`sampled_logp(noise)`, or set model['custom_action_dist'] to 'diag_gaussian'."
    )


register_box_distribution("diag_gaussian", DiagGaussian)
register_box_distribution("squashed_gaussian", SquashedGaussian)
register_box_distribution("deterministic", Deterministic)
register_box_distribution("squashed_deterministic", SquashedDeterministic)
register_box_distribution("bounded_deterministic", BoundedDeterministic)
