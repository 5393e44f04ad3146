"""From what a policy computes to what the environment takes: one pipeline, applied once.

A policy's own actions are *normalised*: 0-based for Discrete spaces, and with the range [-1, 1] for
float Boxes when `normalize_actions` is set. The pipeline maps them into the space:

* Discrete: `start` is added.
* float Box with `normalize_actions`: where both bounds are finite, `low + (a + 1)(high - low) / 2`,
  clipped to the bounds; elsewhere the value is clipped to the bound that exists, if any.
* float Box without it: clipped to the bounds if `clip_actions`, else left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.models.spaces import half_width_and_middle


@dataclass(frozen=True)
class ActionPipeline:
    """The mapping for one leaf action space; see the module's text for the rules."""

    space: Any  # the leaf action space
    normalize: bool
    clip: bool

    @property
    def is_identity(self) -> bool:
        """Whether the environment takes the policy's actions as they are."""
        if isinstance(self.space, spaces.Discrete):
            return int(self.space.start) == 0
        return not self.normalize and not self.clip

    def to_env(self, actions: tf.Tensor) -> tf.Tensor:
        """Maps a policy's actions `[B, *shape]` to the environment's, in the space's dtype."""
        if isinstance(self.space, spaces.Discrete):
            return actions + int(self.space.start)
        # Double precision where the space has it: a bound such as 0.3 is no float32 number.
        compute = np.float64 if self.space.dtype == np.float64 else np.float32
        actions = tf.cast(actions, compute)
        if not self.is_identity:
            low, high = self.space.low.astype(compute), self.space.high.astype(compute)
            if self.normalize:
                half_width, middle = half_width_and_middle(low, high)
                actions = actions * half_width + middle
            actions = tf.clip_by_value(actions, low, high)
        return tf.cast(actions, self.space.dtype)

    def from_env(self, actions: np.ndarray) -> np.ndarray:
        """Inverts `to_env` (but for the clipping) on a NumPy batch `[B, *shape]`."""
        if isinstance(self.space, spaces.Discrete):
            return np.asarray(actions, np.int64) - int(self.space.start)
        actions = np.asarray(actions)
        if not self.normalize:
            return actions.astype(np.float32)
        half_width, middle = half_width_and_middle(
            *(x.astype(np.float64) for x in (self.space.low, self.space.high))
        )
        return ((actions - middle) / half_width).astype(np.float32)
