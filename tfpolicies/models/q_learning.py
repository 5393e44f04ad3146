"""The mathematics of Q-learning that algorithms share: selection, targets, errors.

All functions take tensors or arrays, for traced losses and NumPy callers.
"""

from __future__ import annotations

from typing import TypeAlias

import tensorflow as tf

from tfpolicies.models.distributions import MASKED_LOGIT

Tensor: TypeAlias = tf.Tensor
_MASKED = MASKED_LOGIT / 2  # values up to this one belong to forbidden actions


def select_values(values: Tensor, actions: Tensor) -> Tensor:
    """Returns the values `[B]` of `actions` `[B]` among those of all actions, `[B, n]`."""
    choice = tf.one_hot(tf.cast(actions, tf.int32), values.shape[-1])
    return tf.reduce_sum(values * choice, axis=-1)


def select_rows(numbers: Tensor, actions: Tensor) -> Tensor:
    """Returns the rows `[B, m]` of `actions` `[B]` among those of all actions, `[B, n, m]`."""
    choice = tf.one_hot(tf.cast(actions, tf.int32), numbers.shape[-2])
    return tf.reduce_sum(numbers * choice[:, :, None], axis=-2)


def td_targets(
    rewards: Tensor, discounts: Tensor, next_values: Tensor, selection_values: Tensor
) -> Tensor:
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
    best = select_values(next_values, tf.argmax(selection_values, axis=-1))
    return rewards + discounts * tf.where(best > _MASKED, best, 0.0)


def atom_targets(
    rewards: Tensor, discounts: Tensor, next_logits: Tensor, selection_values: Tensor, atoms: Tensor
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
    logits = select_rows(next_logits, tf.argmax(selection_values, axis=-1))
    continues = tf.cast(tf.reduce_max(logits, axis=-1) > _MASKED, tf.float32)
    return project_distribution(
        tf.nn.softmax(logits, axis=-1), rewards, discounts * continues, atoms
    )


def project_distribution(
    probabilities: Tensor, rewards: Tensor, discounts: Tensor, atoms: Tensor
) -> Tensor:
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
    first_atom, last_index = atoms[0], atoms.shape[0] - 1
    step, numbers = (atoms[-1] - first_atom) / last_index, tf.range(last_index + 1.0)
    shift = rewards + (discounts - 1.0) * first_atom  # of the first atom, [B]
    positions = shift[:, None] / step + discounts[:, None] * numbers
    positions = tf.clip_by_value(positions, 0.0, last_index)  # [B, from]
    distances = tf.abs(positions[:, None, :] - numbers[:, None])  # [B, to, from]
    weights = tf.maximum(1.0 - distances, 0.0)
    return tf.reduce_sum(weights * probabilities[:, None, :], axis=-1)


def atom_errors(logits: Tensor, actions: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy of the targets and Z(s, a), in nats, `[B]`.

    It is 0 where a mask forbids the action that was taken.

    Args:
        logits: the logits of Z(s, .), `[B, n, m]`.
        actions: `[B]`.
        targets: probabilities of the atoms, `[B, m]`.
    """
    action_logits = select_rows(logits, actions)
    cross_entropies = -tf.reduce_sum(targets * tf.nn.log_softmax(action_logits, axis=-1), axis=-1)
    return tf.where(tf.reduce_max(action_logits, axis=-1) > _MASKED, cross_entropies, 0.0)


def td_errors(values: Tensor, targets: Tensor) -> Tensor:
    """Returns Q(s, a) - y, `[B]`; 0 where a mask forbids the action that was taken."""
    return tf.where(values > _MASKED, values - targets, 0.0)
