"""The mathematics of Q-learning that algorithms share: selection, targets, errors.

All functions take tensors or arrays, for traced losses and NumPy callers.
"""

from __future__ import annotations

from typing import TypeAlias

import tensorflow as tf

from tfpolicies.models.distributions import MASKED_LOGIT

Tensor: TypeAlias = tf.Tensor
_MASKED = MASKED_LOGIT / 2  # values up to this one belong to forbidden actions


def chosen_values(values: Tensor, actions: Tensor) -> Tensor:
    """Returns the values `[B]` of `actions` `[B]` among those of all actions, `[B, n]`."""
    choice = tf.one_hot(tf.cast(actions, tf.int32), values.shape[-1])
    return tf.reduce_sum(values * choice, axis=-1)


def chosen_rows(numbers: Tensor, actions: Tensor) -> Tensor:
    """Returns the rows `[B, m]` of `actions` `[B]` among those of all actions, `[B, n, m]`."""
    choice = tf.one_hot(tf.cast(actions, tf.int32), numbers.shape[-2])
    return tf.reduce_sum(numbers * choice[:, :, None], axis=-2)


def td_targets(rewards: Tensor, discounts: Tensor, next_values: Tensor, chooser: Tensor) -> Tensor:
    """Returns r + discount * Q'(s', argmax chooser), `[B]`.

    Mnih et al. 2015 (doi:10.1038/nature14236) with Q' as the chooser; double Q-learning, van
    Hasselt et al. 2016 (arXiv:1509.06461), equation 4, with the online network. If a mask
    forbids every action in s', the value of s' is 0.

    Args:
        rewards: `[B]`.
        discounts: `[B]`, 0 where terminated.
        next_values: Q'(s', .), `[B, n]`.
        selection_values: the values whose maximum selects the action, `[B, n]`.
    """
    best = chosen_values(next_values, tf.argmax(chooser, axis=-1))
    return rewards + discounts * tf.where(best > _MASKED, best, 0.0)


def atom_targets(
    rewards: Tensor, discounts: Tensor, next_logits: Tensor, chooser: Tensor, atoms: Tensor
) -> Tensor:
    """Returns the distribution of r + discount * Z'(s', argmax chooser) on the atoms, `[B, m]`.

    Bellemare et al. 2017 (arXiv:1707.06887), algorithm 1; otherwise as in `td_targets`.

    Args:
        rewards: `[B]`.
        discounts: `[B]`, 0 where terminated.
        next_logits: the logits of Z'(s', .), `[B, n, m]`.
        selection_values: the values whose maximum selects the action, `[B, n]`.
        atoms: `[m]`, increasing by equal steps.
    """
    logits = chosen_rows(next_logits, tf.argmax(chooser, axis=-1))
    goes_on = tf.cast(tf.reduce_max(logits, axis=-1) > _MASKED, tf.float32)
    return projected(tf.nn.softmax(logits, axis=-1), rewards, discounts * goes_on, atoms)


def projected(probabilities: Tensor, rewards: Tensor, discounts: Tensor, atoms: Tensor) -> Tensor:
    """Projects the distribution of r + discount * Z onto the atoms, `[B, m]`.

    Mass beyond the first or the last atom moves to that atom; mass between two atoms is split
    between them in proportion to proximity. Bellemare et al. 2017 (arXiv:1707.06887), equation 7.
    Positions are in steps from the first atom, so that each row sums to 1 for any atoms.

    Args:
        probabilities: of the atoms of Z, `[B, m]`.
        rewards: `[B]`.
        discounts: `[B]`, 0 where no value follows.
        atoms: `[m]`, increasing by equal steps.
    """
    least, last = atoms[0], atoms.shape[0] - 1
    step, numbers = (atoms[-1] - least) / last, tf.range(last + 1.0)
    shift = rewards + (discounts - 1.0) * least  # of the first atom, [B]
    moved = shift[:, None] / step + discounts[:, None] * numbers
    moved = tf.clip_by_value(moved, 0.0, last)  # [B, from]
    apart = tf.abs(moved[:, None, :] - numbers[:, None])  # [B, to, from]
    shares = tf.maximum(1.0 - apart, 0.0)
    return tf.reduce_sum(shares * probabilities[:, None, :], axis=-1)


def atom_errors(logits: Tensor, actions: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy of the targets and Z(s, a), in nats, `[B]`.

    It is 0 where a mask forbids the action that was taken.

    Args:
        logits: the logits of Z(s, .), `[B, n, m]`.
        actions: `[B]`.
        targets: probabilities of the atoms, `[B, m]`.
    """
    chosen = chosen_rows(logits, actions)
    entropies = -tf.reduce_sum(targets * tf.nn.log_softmax(chosen, axis=-1), axis=-1)
    return tf.where(tf.reduce_max(chosen, axis=-1) > _MASKED, entropies, 0.0)


def td_errors(chosen: Tensor, targets: Tensor) -> Tensor:
    """Returns Q(s, a) - y, `[B]`; 0 where a mask forbids the action that was taken."""
    return tf.where(chosen > _MASKED, chosen - targets, 0.0)
