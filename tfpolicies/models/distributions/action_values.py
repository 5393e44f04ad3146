"""Distributions over the outputs of Q-networks: duelling networks and distributional Q-learning.

Both are action distributions whose inputs are the values of all actions, greedy or as logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tensorflow as tf

from tfpolicies.models.distributions.action_distribution import ActionDistribution
from tfpolicies.models.distributions.base import MASKED_LOGIT


class DuelingValues(ActionDistribution):
    """The values of finitely many actions, Q = V + A - mean(A), greedy or as logits.

    A mask also excludes forbidden actions from the mean.
    """

    def apply_mask(self, inputs: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        return super().apply_mask(_center_over_allowed(inputs, tf.cast(mask, tf.bool)), mask)


@dataclass(frozen=True)
class AtomValues(ActionDistribution):
    """Distributions of the return of each action: C51, Bellemare et al. 2017 (arXiv:1707.06887).

    A model computes `[B, n * num_atoms]`, for each of n actions the logits of its atoms. The value
    of an action, by which actions are selected, is the mean of its distribution.

    Attributes:
        num_atoms: m.
        v_min: the smallest atom.
        v_max: the largest atom.
        dueling: whether logits are V + A - mean(A), atom by atom, so that a mask excludes
            forbidden actions from the mean.

    >>> from gymnasium import spaces
    >>> from tfpolicies.models.distributions import Categorical
    >>> two = AtomValues(spaces.Discrete(2), (Categorical,), 3, 0.0, 4.0, False)
    >>> two.compute_inputs(np.log([[0.5, 0.25, 0.25, 0.25, 0.25, 0.5]])).numpy()
    array([[1.5, 2.5]])
    """

    num_atoms: int
    v_min: float
    v_max: float
    dueling: bool

    @cached_property
    def atoms(self) -> np.ndarray:
        """The support of the distributions, float32 `[m]`."""
        return np.linspace(self.v_min, self.v_max, self.num_atoms, dtype=np.float32)

    @property
    def num_outputs(self) -> int:
        return self.num_inputs * self.num_atoms

    def to_logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns a model's outputs by action and atom: `[B, n, m]`."""
        return tf.reshape(outputs, [-1, self.num_inputs, self.num_atoms])

    def compute_inputs(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the values of all actions, `MASKED_LOGIT` where all logits are."""
        logits = self.to_logits(outputs)
        values = tf.reduce_sum(tf.nn.softmax(logits, axis=-1) * self.atoms, axis=-1)
        possible = tf.reduce_max(logits, axis=-1) > MASKED_LOGIT / 2
        return tf.where(possible, values, MASKED_LOGIT)

    def apply_mask(self, inputs: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Replaces all logits of forbidden actions by `MASKED_LOGIT`."""
        allowed, logits = tf.cast(mask, tf.bool)[:, :, None], self.to_logits(inputs)
        if self.dueling:
            logits = _center_over_allowed(logits, allowed)
        logits = tf.where(allowed, logits, MASKED_LOGIT)
        return tf.reshape(logits, [-1, self.num_outputs])


def _center_over_allowed(outputs: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
    """Returns V + A - mean(A) with the mean over the allowed actions, those of the second axis.

    It needs only Q: the mean of Q over all actions is V, so the result is
    Q - mean_allowed(Q) + mean_all(Q).
    """
    weights = tf.cast(allowed, tf.float32)
    count = tf.maximum(tf.reduce_sum(weights, axis=1, keepdims=True), 1.0)
    mean_allowed = tf.reduce_sum(outputs * weights, axis=1, keepdims=True) / count
    return outputs - mean_allowed + tf.reduce_mean(outputs, axis=1, keepdims=True)
