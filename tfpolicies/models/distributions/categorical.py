"""Distributions over finitely many actions: one choice, or one per cell of an array."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.models.distributions.base import MIN_LOG_PROB, Distribution, softplus
from tfpolicies.models.spaces import choices_per_cell


class Categorical(Distribution):
    """One of n actions, from n logits. Gumbel noise, Maddison et al. 2014 (arXiv:1411.0030).

    Actions are 0-based int64; `ActionMapping` adds the environment's `start`.
    """

    noise_kind = "gumbel"

    @staticmethod
    def num_inputs(space: Any) -> int:
        return int(space.n)

    noise_size = num_inputs
    mask_size = num_inputs

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        return tf.argmax(self.inputs + noise, axis=-1, output_type=tf.int64)

    def log_probs(self) -> tf.Tensor:
        """Returns the log-probabilities of all actions, float32 `[B, n]`."""
        return _compute_log_probs(self.inputs)

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        return _select_log_probs(self.log_probs(), actions)

    def entropy(self) -> tf.Tensor:
        return _compute_entropy(self.log_probs())

    def kl(self, other: Distribution) -> tf.Tensor:
        return _compute_kl(self.log_probs(), _compute_log_probs(other.inputs))


class MultiCategorical(Distribution):
    """An independent choice in each cell of a MultiDiscrete or an integer Box.

    The logits of the cells are concatenated in C order. An integer Box has `high - low + 1` actions
    in a cell. Actions `[B, *shape]` are 0-based int64; `ActionMapping` adds `start` or `low`.
    Log-probabilities, entropies and divergences are sums over cells.
    """

    noise_kind = "gumbel"

    @staticmethod
    def num_inputs(space: Any) -> int:
        return sum(choices_per_cell(space))

    noise_size = num_inputs
    mask_size = num_inputs

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        groups = _group_cells(choices_per_cell(self.space))
        noisy_logits = self.inputs + noise
        choices = [
            tf.argmax(group.get_logits(noisy_logits), -1, output_type=tf.int64) for group in groups
        ]
        if len(groups) > 1:
            order = np.argsort(np.concatenate([group.cells for group in groups]))
            choices = [tf.gather(tf.concat(choices, axis=-1), order, axis=-1)]
        return tf.reshape(choices[0], [-1, *self.space.shape])

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        sizes = choices_per_cell(self.space)
        flat = tf.reshape(actions, [-1, len(sizes)])
        terms = [
            _select_log_probs(log_probs, tf.gather(flat, group.cells, axis=-1))
            for group, log_probs in zip(_group_cells(sizes), self._log_probs(), strict=True)
        ]
        return _sum_over_cells(terms)

    def entropy(self) -> tf.Tensor:
        return _sum_over_cells([_compute_entropy(log_probs) for log_probs in self._log_probs()])

    def kl(self, other: MultiCategorical) -> tf.Tensor:
        pairs = zip(self._log_probs(), other._log_probs(), strict=True)
        return _sum_over_cells([_compute_kl(log_p, log_q) for log_p, log_q in pairs])

    def _log_probs(self) -> list[tf.Tensor]:
        """Returns `[B, cells, n]` for each group of cells that have n actions."""
        groups = _group_cells(choices_per_cell(self.space))
        return [_compute_log_probs(group.get_logits(self.inputs)) for group in groups]


class _CellGroup(NamedTuple):
    """Cells with the same number of actions."""

    size: int  # actions of each cell
    cells: np.ndarray  # [C] positions among all cells
    columns: np.ndarray | None  # [C * size] columns of their logits; None for all, in order

    def get_logits(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns the group's logits `[B, C, size]`, given all logits `[B, ...]`."""
        if self.columns is not None:
            logits = tf.gather(logits, self.columns, axis=-1)
        return tf.reshape(logits, [-1, len(self.cells), self.size])


@lru_cache(maxsize=256)
def _group_cells(sizes: tuple[int, ...]) -> tuple[_CellGroup, ...]:
    """Groups cells by size, so that a thousand of them need no more operations than one."""
    distinct = sorted(set(sizes))
    if len(distinct) == 1:
        return (_CellGroup(distinct[0], np.arange(len(sizes)), None),)
    all_sizes = np.array(sizes)
    offsets = np.cumsum(all_sizes) - all_sizes
    groups = []
    for size in distinct:
        (cells,) = np.nonzero(all_sizes == size)
        columns = (offsets[cells, None] + np.arange(size)).reshape(-1)
        groups.append(_CellGroup(size, cells, columns))
    return tuple(groups)


def _compute_log_probs(logits: tf.Tensor) -> tf.Tensor:
    return tf.maximum(tf.nn.log_softmax(logits, axis=-1), MIN_LOG_PROB)


def _select_log_probs(log_probs: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
    choice = tf.one_hot(tf.cast(actions, tf.int32), log_probs.shape[-1])
    return tf.reduce_sum(log_probs * choice, axis=-1)


def _compute_entropy(log_probs: tf.Tensor) -> tf.Tensor:
    return -tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=-1)


def _compute_kl(log_p: tf.Tensor, log_q: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), axis=-1)


def _sum_over_cells(terms: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(term, axis=-1) for term in terms])


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
        return tf.maximum(self.inputs, MIN_LOG_PROB)
