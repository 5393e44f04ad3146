"""The mathematics of Q-learning that algorithms share: choices, targets, errors.

Everything takes tensors or arrays, so it serves traced losses and NumPy callers alike.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfpolicies.models.distributions import MASKED_LOGIT

_MASKED = MASKED_LOGIT / 2  # values up to this one belong to forbidden actions


def chosen_values(values: Any, actions: Any) -> tf.Tensor:
    """Returns the values `[B]` of `actions` `[B]` among those of all actions, `[B, n]`."""
    choice = tf.one_hot(tf.cast(actions, tf.int32), values.shape[-1])
    return tf.reduce_sum(values * choice, axis=-1)


def td_targets(rewards: Any, discounts: Any, next_values: Any, chooser: Any) -> tf.Tensor:
    """Returns r + discount * Q'(s', argmax chooser), `[B]`.

    Mnih et al. 2015 (doi:10.1038/nature14236) with Q' as the chooser; double Q-learning, van
    Hasselt et al. 2016 (arXiv:1509.06461), equation 4, with the online network. Where a mask
    forbids every action in s', nothing comes after it.

    Args:
        rewards: `[B]`.
        discounts: `[B]`, 0 where terminated.
        next_values: Q'(s', .), `[B, n]`.
        chooser: the values whose largest one chooses the action, `[B, n]`.
    """
    best = chosen_values(next_values, tf.argmax(chooser, axis=-1))
    return rewards + discounts * tf.where(best > _MASKED, best, 0.0)


def td_errors(chosen: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Returns Q(s, a) - y, `[B]`; 0 where a mask forbids the action that was taken."""
    return tf.where(chosen > _MASKED, chosen - targets, 0.0)
