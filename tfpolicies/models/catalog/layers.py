"""Small layers that several models use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
from keras import ops

Tensor: TypeAlias = keras.KerasTensor
"""A tensor of a functional model, or the one that a layer is called with."""
Named: TypeAlias = dict[str, Tensor]
"""Tensors by name."""
Memory: TypeAlias = tuple[Tensor, list[Tensor], list[Tensor]]
"""The outputs of a memory, its state inputs, and the states after the sequences."""


def rows_of(sequences: Tensor) -> Any:
    """Returns sequences `[B, T, ...]` as rows `[B * T, ...]`."""
    return ops.reshape(sequences, (-1, *sequences.shape[2:]))


def sequences_of(rows: Tensor, like: Tensor) -> Any:
    """Returns rows `[B * T, F]` as sequences `[B, T, F]`, given anything `[B, T, ...]`."""
    batch, time = ops.shape(like)[:2]
    return ops.reshape(rows, (batch, time, rows.shape[-1]))


@keras.saving.register_keras_serializable(package="tfpolicies")
class FreeLogStd(keras.layers.Layer):
    """Puts a trained vector, the same for every row, behind the means of a Gaussian.

    Args:
        start: what its components begin with.
    """

    def __init__(self, start: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = float(start)
        self.supports_masking = True  # the outputs of recurrent layers carry a mask along

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        start = keras.initializers.Constant(self.start)
        self.log_std = self.add_weight(name="log_std", shape=(input_shape[-1],), initializer=start)

    def call(self, means: Tensor) -> Any:
        rows = ops.zeros_like(means) + self.log_std
        return ops.concatenate([means, rows], axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "start": self.start}


@keras.saving.register_keras_serializable(package="tfpolicies")
class FoldTime(keras.layers.Layer):
    """Makes rows `[B * T, ...]` of sequences `[B, T, ...]`."""

    def call(self, sequences: Tensor) -> Any:
        return rows_of(sequences)


@keras.saving.register_keras_serializable(package="tfpolicies")
class UnfoldTime(keras.layers.Layer):
    """Makes sequences `[B, T, F]` of rows `[B * T, F]`, given anything `[B, T, ...]`."""

    def call(self, inputs: Sequence[Tensor]) -> Any:
        return sequences_of(*inputs)


@keras.saving.register_keras_serializable(package="tfpolicies")
class SequenceMask(keras.layers.Layer):
    """Says which steps of padded sequences are real: bool `[B, T]`, from `[B, T, ...]`, `[B]`."""

    def call(self, inputs: Sequence[Tensor]) -> Any:
        sequences, seq_lens = inputs
        steps = ops.arange(ops.shape(sequences)[1], dtype="int32")
        return steps[None, :] < ops.cast(seq_lens, "int32")[:, None]
