"""Observations as a model sees them: floats, with one-hot rows for discrete parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from gymnasium import spaces

from tfpolicies.models.spaces import Leaf


def encoded_shape(leaf: Leaf) -> tuple[int, ...]:
    """Returns the shape of one encoded leaf: `(n,)` for Discrete(n), a Box's own shape, ..."""
    if isinstance(leaf.space, spaces.Discrete):
        return (int(leaf.space.n),)
    if isinstance(leaf.space, spaces.MultiDiscrete):
        return (int(leaf.space.nvec.sum()),)
    return leaf.shape


def encode(leaf: Leaf, batch: tf.Tensor) -> tf.Tensor:
    """Encodes a batch `[B, *leaf.shape]` as float32 `[B, *encoded_shape(leaf)]`."""
    space = leaf.space
    if isinstance(space, spaces.Discrete):
        return tf.one_hot(batch - int(space.start), int(space.n), dtype=tf.float32)
    if isinstance(space, spaces.MultiDiscrete):
        flat = tf.reshape(batch - space.start, [-1, math.prod(leaf.shape)])
        sizes = space.nvec.reshape(-1)
        parts = [tf.one_hot(flat[:, i], int(n), dtype=tf.float32) for i, n in enumerate(sizes)]
        return tf.concat(parts, axis=-1)
    return tf.cast(batch, tf.float32)


def encode_all(space_leaves: Sequence[Leaf], batches: Sequence[tf.Tensor]) -> Any:
    """Encodes all leaves: one tensor for a space that is not nested, else a list of tensors."""
    encoded = [encode(leaf, batch) for leaf, batch in zip(space_leaves, batches, strict=True)]
    return encoded[0] if len(encoded) == 1 else encoded
