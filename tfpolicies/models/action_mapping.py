"""The mapping from a policy's actions to the environment's, in NumPy and in TensorFlow.

A policy with a Program computes *normalised* actions: discrete actions count from 0, and Boxes of
floats have the range [-1, 1] when `normalize_actions` is set. Each leaf is mapped into its space:

* Discrete, MultiDiscrete: `start` is added. Box of integers: `low` is added where
  it is finite.
* MultiBinary: unchanged.
* Box of floats with `normalize_actions`: where both bounds are finite,
  `low + (a + 1)(high - low) / 2`, clipped to the bounds; elsewhere the value is clipped to the
  bound that exists, if any.
* Box of floats without it: clipped to the bounds if `clip_actions`, else unchanged.

A custom policy computes members of the space itself (`zero_based=False`): of its integers, only
those of a Box are shifted, by a finite `low`, and only with `normalize_actions`; with only
`clip_actions` they are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import spaces
from numpy.typing import ArrayLike, DTypeLike

from tfpolicies.models.spaces import Leaf, action_leaves, get_scale_and_center, is_float_box


def _cast(array: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    return np.array(array, dtype)


@dataclass(frozen=True)
class ActionMapping:
    """The mapping for one action space, nested or not; the module docstring has the rules.

    Attributes:
        space: the action space.
        normalize: whether Boxes of floats are mapped from [-1, 1].
        clip: whether Boxes are clipped if they are not mapped.
        zero_based: whether discrete actions count from 0; otherwise they are the environment's.

    >>> mapping = ActionMapping(spaces.Box(0.0, 4.0, (1,)), normalize=True, clip=False)
    >>> mapping.to_env([np.array([[0.5], [3.0]])])[0].tolist()
    [[3.0], [4.0]]
    """

    space: Any
    normalize: bool
    clip: bool
    zero_based: bool = True

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        return action_leaves(self.space)

    @cached_property
    def is_identity(self) -> bool:
        """True if the environment takes the policy's actions unchanged, dtypes included."""
        return all(self._is_unchanged(leaf) for leaf in self.leaves)

    def _is_unchanged(self, leaf: Leaf) -> bool:
        if leaf.space.dtype != leaf.dtype:
            return False
        if is_float_box(leaf.space):
            return not self.normalize and not self.clip
        return not np.any(self._offset(leaf.space))

    def override(self, normalize: bool | None, clip: bool | None) -> ActionMapping:
        """Returns a copy with other rules; None keeps a rule."""
        if normalize is None and clip is None:
            return self
        return replace(
            self,
            normalize=self.normalize if normalize is None else normalize,
            clip=self.clip if clip is None else clip,
        )

    def to_env(
        self,
        actions: Sequence[Any],
        *,
        cast: Callable[[Any, Any], Any] = _cast,
        clip: Callable[[Any, Any, Any], Any] = np.clip,
    ) -> list[Any]:
        """Maps a policy's actions to the environment's, in the dtypes of the space.

        Args:
            actions: an array `[B, *shape]` per leaf.
            cast: the cast of the arrays' library; for tensors `tf.group_agents`.
            clip: the clip of the arrays' library; for tensors `tf.clip_by_value`.

        Returns:
            New arrays of the same shapes. They are members of the space, except floats if neither
            `normalize` nor `clip` is set.
        """
        pairs = zip(self.leaves, actions, strict=True)
        return [self.leaf_to_env(leaf, array, cast, clip) for leaf, array in pairs]

    def from_env(self, actions: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Inverts `to_env` (except clipping) on a NumPy batch `[B, *shape]` per leaf."""
        return [self._leaf_from_env(*pair) for pair in zip(self.leaves, actions, strict=True)]

    def leaf_to_env(
        self,
        leaf: Leaf,
        actions: np.ndarray | tf.Tensor,
        cast: Callable[[Any, Any], Any] = _cast,
        clip: Callable[[Any, Any, Any], Any] = np.clip,
    ) -> Any:
        """Maps the actions `[B, *shape]` of one leaf; see `to_env`."""
        space: Any = leaf.space
        if not is_float_box(space):
            offset = self._offset(space)
            if np.any(offset):
                actions = cast(actions, np.int64) + offset
            elif self.clip and not self.zero_based and isinstance(space, spaces.Box):
                actions = clip(actions, space.low, space.high)
            return cast(actions, space.dtype)
        # Double precision if the space has it: a bound such as 0.3 is not a float32 number.
        compute_dtype = np.float64 if space.dtype == np.float64 else np.float32
        actions = cast(actions, compute_dtype)
        if self.normalize or self.clip:
            if self.normalize:
                scale, center = _get_scale_and_center(space, compute_dtype)
                with np.errstate(over="ignore"):  # overflows are clipped
                    actions = actions * scale + center
            actions = clip(actions, *_finite_bounds(space, compute_dtype))
        return cast(actions, space.dtype)

    def _leaf_from_env(self, leaf: Leaf, actions: np.ndarray) -> np.ndarray:
        actions = np.asarray(actions)
        if not is_float_box(leaf.space):
            return (actions.astype(np.int64) - self._offset(leaf.space)).astype(leaf.dtype)
        if not self.normalize:
            return actions.astype(leaf.dtype)
        scale, center = _get_scale_and_center(leaf.space, np.float64)
        return ((actions - center) / scale).astype(leaf.dtype)

    def _offset(self, space: spaces.Space) -> np.ndarray:
        """Returns the difference of the environment's and the policy's integers, int64."""
        # Bounds beyond int64 wrap around, and wrap back when the sum is cast to the space's uint64.
        if isinstance(space, spaces.Box) and (self.zero_based or self.normalize):
            return np.where(space.bounded_below, space.low, 0).astype(np.int64)
        if self.zero_based and isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            return np.asarray(space.start).astype(np.int64)
        return np.zeros((), np.int64)


def find_unscaled(leaves: Sequence[Leaf], actions: Sequence[np.ndarray]) -> float | None:
    """Returns a number outside [-1, 1] that `normalize_actions` would scale; None without."""
    for leaf, action in zip(leaves, actions, strict=True):
        if is_float_box(leaf.space):
            space: Any = leaf.space
            is_scaled = np.isfinite(space.low) & np.isfinite(space.high)
            outside = action[(abs(action) > 1) & is_scaled]
            if outside.size:
                return float(max(outside, key=abs))
    return None


def _finite_bounds(space: Any, compute_dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds; a missing one is the largest finite number of the space's dtype."""
    largest = np.finfo(space.dtype).max
    return (
        np.maximum(space.low, -largest).astype(compute_dtype),
        np.minimum(space.high, largest).astype(compute_dtype),
    )


def _get_scale_and_center(
    space: spaces.Box, compute_dtype: DTypeLike
) -> tuple[np.ndarray, np.ndarray]:
    return get_scale_and_center(space.low.astype(compute_dtype), space.high.astype(compute_dtype))
