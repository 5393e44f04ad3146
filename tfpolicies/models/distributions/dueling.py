"""Action values of a duelling network behind an action mask."""

from __future__ import annotations

import tensorflow as tf

from tfpolicies.models.distributions.action_distribution import ActionDistribution


class DuelingValues(ActionDistribution):
    """The values of finitely many actions, Q = V + A - mean(A), greedy or as logits.

    A mask also takes forbidden actions out of the mean. That needs no look into the network: the
    mean of Q over all actions is V, so what the mask gives is Q - mean_allowed(Q) + mean_all(Q).
    """

    def masked(self, inputs: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        allowed = tf.cast(tf.cast(mask, tf.bool), tf.float32)
        count = tf.maximum(tf.reduce_sum(allowed, axis=-1, keepdims=True), 1.0)
        mean_allowed = tf.reduce_sum(inputs * allowed, axis=-1, keepdims=True) / count
        mean_all = tf.reduce_mean(inputs, axis=-1, keepdims=True)
        return super().masked(inputs - mean_allowed + mean_all, mask)
