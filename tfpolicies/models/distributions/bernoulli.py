"""Independent yes-or-no choices: the actions of MultiBinary spaces."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfpolicies.models.distributions.base import IMPOSSIBLE_LOG_PROB, Distribution, softplus


class Bernoulli(Distribution):
    """One bit per logit, int8 `[B, *shape]`; a masked bit stays 0.

    A bit is 1 where logit plus standard logistic noise is positive, since the logistic
    distribution's CDF is the sigmoid (Maddison et al. 2017, arXiv:1611.00712, appendix B).
    """

    noise_kind = "logistic"

    @staticmethod
    def num_inputs(space: Any) -> int:
        return math.prod(space.shape)

    noise_size = num_inputs
    mask_size = num_inputs

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        bits = tf.cast(self.inputs + noise > 0.0, tf.int8)
        return tf.reshape(bits, [-1, *self.space.shape])

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        logits = self._logits()
        bits = tf.reshape(tf.cast(actions, tf.float32), tf.shape(logits))
        return -tf.reduce_sum(softplus((1.0 - 2.0 * bits) * logits), axis=-1)

    def entropy(self) -> tf.Tensor:
        logits = self._logits()
        yes, no = tf.sigmoid(logits), tf.sigmoid(-logits)
        return tf.reduce_sum(yes * softplus(-logits) + no * softplus(logits), axis=-1)

    def kl(self, other: Bernoulli) -> tf.Tensor:
        p, q = self._logits(), other._logits()
        yes = tf.sigmoid(p) * (softplus(-q) - softplus(-p))
        no = tf.sigmoid(-p) * (softplus(q) - softplus(p))
        return tf.reduce_sum(yes + no, axis=-1)

    def _logits(self) -> tf.Tensor:
        return tf.maximum(self.inputs, IMPOSSIBLE_LOG_PROB)
