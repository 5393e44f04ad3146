"""Parts of losses and updates that algorithms share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from tfpolicies.errors import UsageError

Gradients: TypeAlias = list[tuple[Any, Any]]
"""Each gradient with its variable."""


def masked_mean(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns the mean of `values` `[B]` over the rows of weight 1 in `mask` `[B]`.

    Values and gradients of rows of weight 0 do not count, whether they are finite or not.

    Raises:
        UsageError: if `values` has further axes, which would be broadcast against the rows.
    """
    shape = tf.convert_to_tensor(values).shape
    if shape.rank is not None and shape.rank > 1:
        raise UsageError(
            f"masked_mean needs one number for each row, [B], got values of shape {shape}. "
            "Reduce or squeeze the other axes first."
        )
    total = tf.reduce_sum(tf.math.multiply_no_nan(values, mask))  # 0 * inf is 0 here
    return total / tf.maximum(tf.reduce_sum(mask), 1.0)


def half_square(errors: tf.Tensor) -> tf.Tensor:
    """Returns x^2 / 2."""
    return 0.5 * tf.square(errors)


def huber(errors: tf.Tensor) -> tf.Tensor:
    """Returns x^2 / 2 where |x| <= 1, and |x| - 1/2 elsewhere (Huber 1964)."""
    size = tf.abs(errors)
    clipped = tf.minimum(size, 1.0)
    return clipped * (size - 0.5 * clipped)  # its float32 gradient is also exact for small errors


def explained_variance(targets: tf.Tensor, values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns 1 - Var[targets - values] / Var[targets] over the rows in `mask`, at least -1."""

    def variance(x: tf.Tensor) -> tf.Tensor:
        return masked_mean(tf.square(x - masked_mean(x, mask)), mask)

    return tf.maximum(-1.0, 1.0 - variance(targets - values) / (variance(targets) + 1e-6))


def clip_gradients(pairs: Gradients, limit: tf.Tensor, mode: str) -> Gradients:
    """Clips gradients by their global norm, each gradient's norm, or each entry.

    An infinite limit changes nothing; a constant infinite limit adds no operations.
    """
    if tf.get_static_value(limit) == math.inf:
        return pairs

    def map_gradients(clip: Callable[[Any], Any]) -> Gradients:
        return [(None if g is None else clip(g), variable) for g, variable in pairs]

    if mode == "value":
        return map_gradients(lambda g: tf.clip_by_value(g, -limit, limit))
    if mode == "norm":
        return map_gradients(lambda g: g * _compute_shrink_factor(tf.norm(g), limit))
    squares = [tf.reduce_sum(tf.square(g)) for g, _ in pairs if g is not None]
    scale = _compute_shrink_factor(tf.sqrt(tf.add_n(squares)), limit)
    return map_gradients(lambda g: g * scale)


def _compute_shrink_factor(norm: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    """Returns the factor that reduces a norm, which may have overflowed, to a limit."""
    return tf.minimum(1.0, limit / tf.clip_by_value(norm, 1e-12, tf.float32.max))
