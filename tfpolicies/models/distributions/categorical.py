"""Distributions over finitely many actions: one choice, or one per cell of an array."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.models.distributions.base import IMPOSSIBLE_LOG_PROB, Distribution, softplus
from tfpolicies.models.spaces import cell_sizes


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
        return _log_probs(self.inputs)

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        return _chosen(self.log_probs(), actions)

    def entropy(self) -> tf.Tensor:
        return _entropy(self.log_probs())

    def kl(self, other: Distribution) -> tf.Tensor:
        return _kl(self.log_probs(), _log_probs(other.inputs))


class MultiCategorical(Distribution):
    """An independent choice in each cell of a MultiDiscrete or an integer Box.

    The logits of the cells are concatenated in C order. An integer Box has `high - low + 1` actions
    in a cell. Actions `[B, *shape]` are 0-based int64; `ActionMapping` adds `start` or `low`.
    Log-probabilities, entropies and divergences are sums over cells.
    """

    noise_kind = "gumbel"

    @staticmethod
    def num_inputs(space: Any) -> int:
        return sum(cell_sizes(space))

    noise_size = num_inputs
    mask_size = num_inputs

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        groups = _groups(cell_sizes(self.space))
        disturbed = self.inputs + noise
        chosen = [tf.argmax(group.of(disturbed), -1, output_type=tf.int64) for group in groups]
        if len(groups) > 1:
            order = np.argsort(np.concatenate([group.cells for group in groups]))
            chosen = [tf.gather(tf.concat(chosen, axis=-1), order, axis=-1)]
        return tf.reshape(chosen[0], [-1, *self.space.shape])

    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        sizes = cell_sizes(self.space)
        flat = tf.reshape(actions, [-1, len(sizes)])
        terms = [
            _chosen(log_probs, tf.gather(flat, group.cells, axis=-1))
            for group, log_probs in zip(_groups(sizes), self._log_probs(), strict=True)
        ]
        return _total(terms)

    def entropy(self) -> tf.Tensor:
        return _total([_entropy(log_probs) for log_probs in self._log_probs()])

    def kl(self, other: MultiCategorical) -> tf.Tensor:
        pairs = zip(self._log_probs(), other._log_probs(), strict=True)
        return _total([_kl(log_p, log_q) for log_p, log_q in pairs])

    def _log_probs(self) -> list[tf.Tensor]:
        """Returns `[B, cells, n]` for each group of cells that have n actions."""
        groups = _groups(cell_sizes(self.space))
        return [_log_probs(group.of(self.inputs)) for group in groups]


class _Group(NamedTuple):
    """Cells with the same number of actions."""

    size: int  # actions of each cell
    cells: np.ndarray  # [C] positions among all cells
    columns: np.ndarray | None  # [C * size] columns of their logits; None for all, in order

    def of(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns the group's logits `[B, C, size]`, given all logits `[B, ...]`."""
        if self.columns is not None:
            logits = tf.gather(logits, self.columns, axis=-1)
        return tf.reshape(logits, [-1, len(self.cells), self.size])


@lru_cache(maxsize=256)
def _groups(sizes: tuple[int, ...]) -> tuple[_Group, ...]:
    """Groups cells by size, so that a thousand of them need no more operations than one."""
    distinct = sorted(set(sizes))
    if len(distinct) == 1:
        return (_Group(distinct[0], np.arange(len(sizes)), None),)
    all_sizes = np.array(sizes)
    first = np.cumsum(all_sizes) - all_sizes
    groups = []
    for size in distinct:
        (cells,) = np.nonzero(all_sizes == size)
        columns = (first[cells, None] + np.arange(size)).reshape(-1)
        groups.append(_Group(size, cells, columns))
    return tuple(groups)


def _log_probs(logits: tf.Tensor) -> tf.Tensor:
    return tf.maximum(tf.nn.log_softmax(logits, axis=-1), IMPOSSIBLE_LOG_PROB)


def _chosen(log_probs: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
    choice = tf.one_hot(tf.cast(actions, tf.int32), log_probs.shape[-1])
    return tf.reduce_sum(log_probs * choice, axis=-1)


def _entropy(log_probs: tf.Tensor) -> tf.Tensor:
    return -tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=-1)


def _kl(log_p: tf.Tensor, log_q: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), axis=-1)


def _total(terms: list[tf.Tensor]) -> tf.Tensor:
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
        return tf.maximum(self.inputs, IMPOSSIBLE_LOG_PROB)
