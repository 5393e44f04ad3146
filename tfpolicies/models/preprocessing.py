"""Encodes observations for models: floats, one-hot rows for discrete parts, images in [0, 1]."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.models.spaces import Leaf, flat_size, is_choice


def get_encoded_shape(leaf: Leaf) -> tuple[int, ...]:
    """Returns the shape of one encoded leaf: `(n,)` for Discrete(n), a Box's own shape, ..."""
    return (flat_size(leaf),) if is_choice(leaf.space) else leaf.shape


def encode(leaf: Leaf, batch: tf.Tensor) -> tf.Tensor:
    """Encodes a batch `[B, *leaf.shape]` as float32 `[B, *get_encoded_shape(leaf)]`.

    Discrete and MultiDiscrete become one-hot rows, images (a Box of uint8 of rank 3) are divided by
    255, and every other number or bit is unchanged.
    """
    space: Any = leaf.space
    if is_choice(space):
        return _one_hot(leaf, batch - np.asarray(space.start, np.int64))
    numbers = tf.cast(batch, tf.float32)
    return numbers / 255.0 if is_image(space) else numbers


def encode_action(leaf: Leaf, batch: tf.Tensor) -> tf.Tensor:
    """Encodes a policy's actions like `encode`; discrete ones count from 0, whatever the start."""
    if is_choice(leaf.space):
        return _one_hot(leaf, batch)
    return tf.cast(batch, tf.float32)


def _one_hot(leaf: Leaf, choices: tf.Tensor) -> tf.Tensor:
    space: Any = leaf.space
    if isinstance(space, spaces.Discrete):
        return tf.one_hot(choices, int(space.n), dtype=tf.float32)
    flat = tf.reshape(choices, [-1, math.prod(leaf.shape)])
    sizes = space.nvec.reshape(-1)
    parts = [tf.one_hot(flat[:, i], int(n), dtype=tf.float32) for i, n in enumerate(sizes)]
    return tf.concat(parts, axis=-1)


def is_image(space: gym.Space) -> bool:
    """Returns whether `space` is a Box of uint8 of rank 3, whose values are divided by 255."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3
