"""Random numbers for RLlib distributions.

Inside a policy they are the policy's noise (`docs/decisions/004`); otherwise a
distribution draws from TensorFlow's global generator, as in RLlib.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.models.distributions.noise import NoiseBlocks

_TINY = np.finfo(np.float32).tiny
_CANDIDATES = 8  # each is accepted with a probability of at least 0.95


class _NoiseColumns:
    """The noise of one call: unused columns, and seeds for further random numbers.

    Args:
        noise: float32 `[B, k]`, at least one row.
        blocks: the kinds of its columns from left to right; further columns only seed.
    """

    def __init__(self, noise: tf.Tensor, blocks: NoiseBlocks) -> None:
        self._noise = noise
        self._seed_counter = itertools.count()
        self._unused: dict[str, tf.Tensor] = {}
        start = 0
        for kind, size in blocks:
            part, start = noise[:, start : start + size], start + size
            earlier = self._unused.get(kind)
            self._unused[kind] = part if earlier is None else tf.concat([earlier, part], axis=-1)

    def take(self, kind: str, size: int) -> tf.Tensor | None:
        """Returns the next columns of a kind, `[B, size]`; None if fewer are left."""
        unused = self._unused.get(kind)
        if unused is None or unused.shape[-1] < size:
            return None
        self._unused[kind] = unused[:, size:]
        return unused[:, :size]

    def make_seed(self) -> tf.Tensor:
        """Returns a new seed, int32 `[2]`; equal noise gives equal seeds."""
        ends = tf.stack([self._noise[0, 0], self._noise[0, -1]])
        return tf.bitcast(ends, tf.int32) + tf.constant([next(self._seed_counter), 0])


_CURRENT_NOISE: ContextVar[_NoiseColumns | None] = ContextVar("noise", default=None)


@contextmanager
def use_noise(noise: tf.Tensor | None, blocks: NoiseBlocks = ()) -> Iterator[None]:
    """Makes distributions of this thread use `noise` as their random numbers; None changes nothing.

    Args:
        noise: float32 `[B, k]`.
        blocks: the kinds of its columns from left to right; further columns only seed.
    """
    if noise is None:
        yield
        return
    token = _CURRENT_NOISE.set(_NoiseColumns(noise, blocks))
    try:
        yield
    finally:
        _CURRENT_NOISE.reset(token)


def _make_seed() -> tf.Tensor:
    noise_columns = _CURRENT_NOISE.get()
    if noise_columns is not None:
        return noise_columns.make_seed()
    return tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int32)


def _draw_uniform(shape: Any) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, _make_seed(), minval=_TINY)


_SAMPLERS: dict[str, Callable[[Any], tf.Tensor]] = {
    "gumbel": lambda shape: -tf.math.log(-tf.math.log(_draw_uniform(shape))),
    "normal": lambda shape: tf.random.stateless_normal(shape, _make_seed()),
    "logistic": lambda shape: -tf.math.log(1.0 / _draw_uniform(shape) - 1.0),
}
"""Functions that draw a tensor of a shape, by the kinds of `NOISE_KINDS`."""


def sample_noise(inputs: tf.Tensor, kind: str, size: int) -> tf.Tensor:
    """Returns noise of a kind for the rows of `inputs`, float32 `[B, size]`."""
    noise_columns = _CURRENT_NOISE.get()
    columns = None if noise_columns is None else noise_columns.take(kind, size)
    return _SAMPLERS[kind]([tf.shape(inputs)[0], size]) if columns is None else columns


def sample_gamma(alpha: tf.Tensor) -> tf.Tensor:
    """Samples gamma distributions of rate 1; differentiable in `alpha`.

    Marsaglia and Tsang 2000 (doi:10.1145/358407.358414): takes the first accepted of eight
    candidates. The sample for `alpha` is that for `alpha + 1` times `U ** (1 / alpha)`.

    Args:
        alpha: float32 of any shape, positive.
    """
    d = alpha[..., None] + 2.0 / 3.0
    shape = tf.concat([tf.shape(alpha), [_CANDIDATES]], 0)
    x = _SAMPLERS["normal"](shape)
    v = tf.maximum(1.0 + x / tf.sqrt(9.0 * d), 1e-6) ** 3
    is_accepted = tf.math.log(_draw_uniform(shape)) < 0.5 * x * x + d * (1.0 - v + tf.math.log(v))
    first_accepted = tf.one_hot(tf.argmax(tf.cast(is_accepted, tf.int32), axis=-1), _CANDIDATES)
    boost = tf.exp(tf.math.log(_draw_uniform(tf.shape(alpha))) / alpha)
    return tf.reduce_sum(d * v * first_accepted, axis=-1) * boost
