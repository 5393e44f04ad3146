"""From what a policy computes to what the environment takes: one pipeline, applied once.

A policy's own actions are *normalised*: 0-based where they are integers, and with the range [-1, 1]
for Boxes of floats when `normalize_actions` is set. The pipeline maps each leaf into its space:

* Discrete, MultiDiscrete: `start` is added. Box of integers: `low` is added.
* MultiBinary: as it is.
* Box of floats with `normalize_actions`: where both bounds are finite,
  `low + (a + 1)(high - low) / 2`, clipped to the bounds; elsewhere the value is clipped to the
  bound that exists, if any.
* Box of floats without it: clipped to the bounds if `clip_actions`, else left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.models.spaces import Leaf, action_leaves, half_width_and_middle, is_float_box


@dataclass(frozen=True)
class ActionPipeline:
    """The mapping for one action space, nested or not; see the module's text for the rules.

    Attributes:
        space: the action space.
        normalize: whether Boxes of floats are mapped from [-1, 1].
        clip: whether they are clipped if they are not mapped.
    """

    space: Any
    normalize: bool
    clip: bool

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The action space's leaves."""
        return action_leaves(self.space)

    @cached_property
    def is_identity(self) -> bool:
        """Whether the environment takes the policy's actions as they are, dtypes included."""
        return all(self._keeps(leaf) for leaf in self.leaves)

    def _keeps(self, leaf: Leaf) -> bool:
        if leaf.space.dtype != leaf.dtype:
            return False
        if is_float_box(leaf.space):
            return not self.normalize and not self.clip
        return not np.any(_offset(leaf.space))

    def to_env(self, actions: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Maps a policy's actions to the environment's, in the dtypes of the space.

        Args:
            actions: a tensor `[B, *shape]` per leaf.

        Returns:
            The same; members of the space, but for floats if neither `normalize` nor `clip` is set.
        """
        return [self._leaf_to_env(*pair) for pair in zip(self.leaves, actions, strict=True)]

    def from_env(self, actions: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Inverts `to_env` (but for the clipping) on a NumPy batch `[B, *shape]` per leaf."""
        return [self._leaf_from_env(*pair) for pair in zip(self.leaves, actions, strict=True)]

    def _leaf_to_env(self, leaf: Leaf, actions: tf.Tensor) -> tf.Tensor:
        if not is_float_box(leaf.space):
            offset = _offset(leaf.space)
            if np.any(offset):
                actions = tf.cast(actions, tf.int64) + offset
            return tf.cast(actions, leaf.space.dtype)
        # Double precision where the space has it: a bound such as 0.3 is no float32 number.
        compute = np.float64 if leaf.space.dtype == np.float64 else np.float32
        actions = tf.cast(actions, compute)
        if self.normalize or self.clip:
            low, high = _finite_bounds(leaf.space, compute)
            if self.normalize:
                half_width, middle = _range(leaf.space, compute)
                actions = actions * half_width + middle
            actions = tf.clip_by_value(actions, low, high)
        return tf.cast(actions, leaf.space.dtype)

    def _leaf_from_env(self, leaf: Leaf, actions: np.ndarray) -> np.ndarray:
        actions = np.asarray(actions)
        if not is_float_box(leaf.space):
            return (actions.astype(np.int64) - _offset(leaf.space)).astype(leaf.dtype)
        if not self.normalize:
            return actions.astype(leaf.dtype)
        half_width, middle = _range(leaf.space, np.float64)
        return ((actions - middle) / half_width).astype(leaf.dtype)


def _offset(space: Any) -> np.ndarray:
    """Returns what the environment's integers have on top of 0-based ones, int64."""
    if isinstance(space, spaces.MultiBinary):
        return np.zeros((), np.int64)
    # Bounds beyond int64 wrap around, and wrap back when the sum is cast to the space's uint64.
    return np.asarray(space.low if isinstance(space, spaces.Box) else space.start).astype(np.int64)


def _finite_bounds(space: Any, compute: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds; where one is missing, the largest finite number of the space's dtype."""
    largest = np.finfo(space.dtype).max
    return (
        np.maximum(space.low, -largest).astype(compute),
        np.minimum(space.high, largest).astype(compute),
    )


def _range(space: Any, compute: Any) -> tuple[np.ndarray, np.ndarray]:
    return half_width_and_middle(space.low.astype(compute), space.high.astype(compute))
