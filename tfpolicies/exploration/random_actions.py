"""Random actions: the leaves of an action space, with uniform sampling and clipping.

A random action is computed from noise values, a few columns per leaf. It is never an action that a
mask forbids: one whose logit is at most half of the smallest float32.
"""

from __future__ import annotations

import abc
import math
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.models.distributions import MASKED_LOGIT, Distribution
from tfpolicies.models.spaces import action_leaves, choices_per_cell, is_float_box

MASKED_THRESHOLD = MASKED_LOGIT / 2
"""Logits up to this value belong to masked actions."""


class ActionLeaf(abc.ABC):
    """One leaf of an action space.

    Attributes:
        shape: of one action.
        num_columns: the number of noise values that a random action needs.
        normal: bool `[num_columns]`, whether a column is standard normal; the others are uniform in
            [0, 1).
    """

    is_discrete: bool

    def __init__(self, shape: tuple[int, ...], num_columns: int) -> None:
        self.shape = shape
        self.num_columns = num_columns
        self.normal = np.zeros(num_columns, bool)

    @abc.abstractmethod
    def sample_random(self, part: Distribution, noise: tf.Tensor) -> tf.Tensor:
        """Returns random valid actions: int64 or float32 `[B, *shape]`.

        Args:
            part: the leaf's distribution, whose inputs are logits where the leaf is discrete.
            noise: float32 `[B, num_columns]`.
        """


class ChoicesLeaf(ActionLeaf):
    """A Discrete, MultiDiscrete or integer Box: one of n actions in each cell, 0-based."""

    is_discrete = True

    def __init__(self, space: Any) -> None:
        self.sizes = choices_per_cell(space)
        super().__init__(tuple(space.shape), len(self.sizes))

    @cached_property  # lazy, because a space may be too large for any model
    def _is_action(self) -> np.ndarray:
        """Marks columns that are actions of a cell, bool `[cells, most actions]`."""
        return np.arange(max(self.sizes)) < np.array(self.sizes)[:, None]

    @cached_property
    def _logit_columns(self) -> np.ndarray:
        """The columns of logits that belong to the actions, int `[cells, most actions]`."""
        starts = np.cumsum(self.sizes) - self.sizes
        return np.where(self._is_action, starts[:, None] + np.arange(max(self.sizes)), 0)

    def _get_allowed_actions(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns 1.0 for each allowed action, float32 `[B, cells, most actions]`."""
        allowed = tf.cast(logits > MASKED_THRESHOLD, tf.float32)
        if self._is_action.all():
            return tf.reshape(allowed, [-1, *self._is_action.shape])
        flat = tf.gather(allowed, self._logit_columns.ravel(), axis=-1)
        return tf.reshape(flat, [-1, *self._is_action.shape]) * self._is_action.astype(np.float32)

    def sample_random(self, part: Distribution, noise: tf.Tensor) -> tf.Tensor:
        """Picks the valid action of rank floor(noise * number of valid ones); 0 if none is."""
        valid = self._get_allowed_actions(part.inputs)
        num_valid = tf.reduce_sum(valid, axis=-1)
        rank = tf.minimum(tf.floor(noise * num_valid), num_valid - 1.0)  # the product may round up
        is_below = tf.cumsum(valid, axis=-1) <= tf.expand_dims(rank, -1)
        actions = tf.reduce_sum(tf.cast(is_below, tf.float32), axis=-1)
        return tf.reshape(tf.cast(actions, tf.int64), [-1, *self.shape])


class BinaryLeaf(ActionLeaf):
    """A MultiBinary: each bit is 0 or 1 with equal probability; a masked bit stays 0."""

    is_discrete = True

    def __init__(self, space: spaces.MultiBinary) -> None:
        super().__init__(tuple(space.shape), math.prod(space.shape))

    def sample_random(self, part: Distribution, noise: tf.Tensor) -> tf.Tensor:
        ones = tf.logical_and(noise >= 0.5, part.inputs > MASKED_THRESHOLD)
        return tf.reshape(tf.cast(ones, tf.int64), [-1, *self.shape])


class ContinuousLeaf(ActionLeaf):
    """A Box of floats: uniform where both bounds are finite, otherwise normal.

    Args:
        space: the Box.
        normalize: whether a policy's own actions are in [-1, 1] where both bounds are finite.

    Attributes:
        low: float32 `[k]`, the lower bounds of a policy's own actions, -inf without a bound.
        high: the upper bounds.
        width: float32 `[k]`, high - low, or 1 where that is not finite.
    """

    is_discrete = False

    def __init__(self, space: spaces.Box, normalize: bool) -> None:
        super().__init__(tuple(space.shape), math.prod(space.shape))
        low, high = _round_bounds_inward(space.low.ravel(), space.high.ravel())
        bounded = np.isfinite(low) & np.isfinite(high)
        scaled = bounded & (low < high) & normalize
        self.low = np.where(scaled, np.float32(-1), low)
        self.high = np.where(scaled, np.float32(1), high)
        with np.errstate(over="ignore"):
            width = self.high - self.low
        self.width = np.where(np.isfinite(width), width, np.float32(1))
        self.normal = ~bounded

    def sample_random(self, part: Distribution, noise: tf.Tensor) -> tf.Tensor:
        low, high = np.where(self.normal, 0, self.low), np.where(self.normal, 0, self.high)
        actions = low * (1.0 - noise) + high * noise  # high - low may overflow
        if self.normal.any():
            actions = tf.where(self.normal, noise, actions)
        return tf.reshape(self.clip(actions), [-1, *self.shape])

    def clip(self, flat: tf.Tensor) -> tf.Tensor:
        return tf.minimum(tf.maximum(flat, self.low), self.high)


def make_action_leaves(space: spaces.Space, normalize: bool) -> tuple[ActionLeaf, ...]:
    """Returns the action leaves of `space`, in their order.

    Args:
        space: the action space, which may be nested.
        normalize: whether the policy's own actions are in [-1, 1] where a Box is bounded.

    Raises:
        UnsupportedSpaceError: for spaces that policies cannot use.
    """
    return tuple(_make_action_leaf(leaf.space, normalize) for leaf in action_leaves(space))


def _make_action_leaf(space: spaces.Space, normalize: bool) -> ActionLeaf:
    if isinstance(space, spaces.MultiBinary):
        return BinaryLeaf(space)
    if is_float_box(space):
        return ContinuousLeaf(space, normalize)
    return ChoicesLeaf(space)


def _round_bounds_inward(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds float64 bounds inward to float32, so that no number is outside of them."""
    with np.errstate(over="ignore"):
        low32, high32 = low.astype(np.float32), high.astype(np.float32)
    low32 = np.where(low32 < low, np.nextafter(low32, np.float32(np.inf)), low32)
    high32 = np.where(high32 > high, np.nextafter(high32, np.float32(-np.inf)), high32)
    return low32, high32
