"""Minibatches as index arrays: padded to fixed shapes for XLA, with a mask for the valid rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf


class StepInputs(NamedTuple):
    """The inputs of each minibatch besides its rows, `[K, ...]` float32.

    An input that the policies of a Program do not use is `()`, so that compiled functions do not
    have it.
    """

    noise: Any = ()  # [K, size, ...]: standard normal, for each row of the loss
    update_noise: Any = ()  # [K, k]: standard normal, for the loss
    update_targets: Any = ()  # [K]: 1 if target networks are updated after the minibatch
    active_optimizers: Any = ()  # [K, O]: 0 for optimizers that skip the minibatch

    def map(self, function: Callable[[Any], Any]) -> StepInputs:
        return StepInputs(*[x if isinstance(x, tuple) else function(x) for x in self])

    def at(self, i: tf.Tensor | int) -> StepInputs:
        return self.map(lambda x: x[i])


def is_input(value: object) -> bool:
    """Returns whether an input of `StepInputs` is used.

    >>> is_input(StepInputs(noise=np.zeros(3)).noise), is_input(StepInputs().noise)
    (True, False)
    """
    return not isinstance(value, tuple)


class Minibatches(NamedTuple):
    """The minibatches of an update.

    XLA gives wrong numbers for slices of a dynamic size, so a shorter last minibatch is padded with
    row 0 and masked instead of being cut.
    """

    rows: np.ndarray  # int32 [K, size]: rows of the batch
    mask: np.ndarray  # float32 [K, size]: 0 for padding
    steps: int  # the number of minibatches; the rest of K is padding
    epochs: int  # 0 for one minibatch with a part of the batch
    is_full_batch: bool  # whether each epoch is one minibatch of exactly all rows
    inputs: StepInputs = StepInputs()  # the other inputs of each

    def pad_to(self, capacity: int) -> Minibatches:
        """Returns the same minibatches in arrays large enough for batches of `capacity` rows."""
        size = self.rows.shape[1]
        if self.is_full_batch:
            widths = [(0, 0), (0, capacity - size)]
        else:
            max_steps = self.epochs * -(-capacity // size)
            widths = [(0, max(0, max_steps - len(self.rows))), (0, 0)]
        if widths == [(0, 0), (0, 0)]:
            return self

        def pad(array: np.ndarray, axes: int = 2) -> np.ndarray:
            return np.pad(array, widths[:axes] + [(0, 0)] * (array.ndim - axes))

        inputs = self.inputs.map(lambda x: pad(x, 1))
        if is_input(inputs.noise):
            inputs = inputs._replace(noise=pad(self.inputs.noise))
        return self._replace(rows=pad(self.rows), mask=pad(self.mask), inputs=inputs)


def draw_minibatches(
    rows: int, epochs: int, size: int, rng: np.random.Generator | None
) -> Minibatches:
    """Splits `epochs` passes over `rows` rows into minibatches; each row comes once per epoch.

    Args:
        rows: rows of the batch, at least 1.
        epochs: passes over the batch.
        size: rows of a minibatch; the last one of an epoch may have fewer.
        rng: shuffles the rows for each epoch; None keeps their order.

    >>> draw_minibatches(5, 1, 2, None).rows.tolist()
    [[0, 1], [2, 3], [4, 0]]
    >>> draw_minibatches(5, 1, 2, None).mask.tolist()
    [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]
    """
    per_epoch = -(-rows // size)
    index = np.zeros((epochs, per_epoch * size), np.int32)
    mask = np.zeros((epochs, per_epoch * size), np.float32)
    for epoch in range(epochs):
        index[epoch, :rows] = np.arange(rows) if rng is None else rng.permutation(rows)
    mask[:, :rows] = 1.0
    steps = epochs * per_epoch
    shape = (steps, size)
    return Minibatches(index.reshape(shape), mask.reshape(shape), steps, epochs, size == rows)


def make_minibatch(items: np.ndarray, size: int) -> Minibatches:
    """Returns one minibatch of some rows, padded to `size` rows."""
    rows, mask = np.zeros((1, size), np.int32), np.zeros((1, size), np.float32)
    rows[0, : len(items)], mask[0, : len(items)] = items, 1.0
    return Minibatches(rows, mask, 1, 0, False)


def compute_capacity(rows: int, size: int, capacity: int) -> int:
    """Returns the rows to pad a batch to, given the capacity of earlier batches.

    Grows at least by doubling, so that few shapes appear however the batches vary.
    """
    if rows <= capacity:
        return capacity
    rounded = -(-rows // size) * size
    return rounded if capacity == 0 else max(rounded, 2 * capacity)
