"""Layers that several models use: noisy layers, reshaping around a memory, and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras import ops

from tfpolicies.models.catalog.initializers import KernelInitializers
from tfpolicies.models.model_config import Settings

Tensor: TypeAlias = keras.KerasTensor
"""A tensor of a functional model, or the argument of a layer's call."""
NamedTensors: TypeAlias = dict[str, Tensor]
"""Tensors by name."""
RecurrentCore: TypeAlias = tuple[Tensor, list[Tensor], list[Tensor]]
"""The outputs of a memory, its state inputs, and the states after the sequences."""


def fold_time(sequences: Tensor) -> Any:
    """Reshapes sequences `[B, T, ...]` to rows `[B * T, ...]`."""
    return ops.reshape(sequences, (-1, *sequences.shape[2:]))


def unfold_time(rows: Tensor, like: Tensor) -> Any:
    """Reshapes rows `[B * T, F]` to sequences `[B, T, F]`; `like` is any tensor `[B, T, ...]`."""
    batch, time = ops.shape(like)[:2]
    return ops.reshape(rows, (batch, time, rows.shape[-1]))


@keras.saving.register_keras_serializable(package="tfpolicies")
class FreeLogStd(keras.layers.Layer):
    """Appends a trained vector, the same for every row, to the means of a Gaussian.

    Args:
        start: the initial value of its components.
    """

    def __init__(self, start: float = 0.0, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.start = float(start)
        self.supports_masking = True  # the outputs of recurrent layers have a mask

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
    """Reshapes sequences `[B, T, ...]` to rows `[B * T, ...]`."""

    def call(self, sequences: Tensor) -> Any:
        return fold_time(sequences)


@keras.saving.register_keras_serializable(package="tfpolicies")
class UnfoldTime(keras.layers.Layer):
    """Reshapes rows `[B * T, F]` to sequences `[B, T, F]`; the second input is `[B, T, ...]`."""

    def call(self, inputs: Sequence[Tensor]) -> Any:
        return unfold_time(*inputs)


@keras.saving.register_keras_serializable(package="tfpolicies")
class SequenceMask(keras.layers.Layer):
    """Computes the mask of padded sequences, bool `[B, T]`, from `[B, T, ...]` and lengths."""

    def call(self, inputs: Sequence[Tensor]) -> Any:
        sequences, seq_lens = inputs
        steps = ops.arange(ops.shape(sequences)[1], dtype="int32")
        return steps[None, :] < ops.cast(seq_lens, "int32")[:, None]


@keras.saving.register_keras_serializable(package="tfpolicies")
class NoisyDense(keras.layers.Layer):
    """A dense layer with factorised Gaussian noise: Fortunato et al. 2018 (arXiv:1706.10295).

    Called with `[x, noise]` of `[B, p]` and `[B, p + q]` (or `[1, p + q]`: the same noise for all
    rows), it computes `[B, q]`:

        y = x (mu_w + sigma_w * f(e) f(d)^T) + mu_b + sigma_b * f(d)        (equations 9 to 11)

    where `noise` is e and d, and f(x) = sign(x) sqrt(|x|). So zero noise gives the mean weights.
    For one row that is x mu_w + mu_b + f(d) * ((f(e) * x) sigma_w + sigma_b), so that rows with
    different noise share one matrix product. Sigmas begin at sigma0 / sqrt(p) (section 3.2).

    Args:
        units: q.
        sigma0: scales the initial sigmas.
        activation: the activation of the outputs, by name; None for linear ones.
        kernel_initializer: the initializer of mu_w; mu_b begins at 0.
    """

    def __init__(
        self,
        units: int,
        sigma0: float,
        activation: str | Callable[[tf.Tensor], tf.Tensor] | None = None,
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.sigma0 = sigma0
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.Zeros()

    def build(self, input_shape: Sequence[Sequence[int]]) -> None:
        p, q = input_shape[0][-1], self.units
        start = keras.initializers.Constant(self.sigma0 / math.sqrt(p))
        self.kernel_sigma_initializer = self.bias_sigma_initializer = start
        self.kernel = self.add_weight((p, q), self.kernel_initializer, name="kernel")
        self.bias = self.add_weight((q,), self.bias_initializer, name="bias")
        self.kernel_sigma = self.add_weight((p, q), start, name="kernel_sigma")
        self.bias_sigma = self.add_weight((q,), start, name="bias_sigma")

    def call(self, inputs: Sequence[Tensor]) -> Any:
        x, noise = inputs
        scaled_noise = ops.sign(noise) * ops.sqrt(ops.abs(noise))
        input_noise, output_noise = scaled_noise[:, : x.shape[-1]], scaled_noise[:, x.shape[-1] :]
        noise_term = ops.matmul(input_noise * x, self.kernel_sigma) + self.bias_sigma
        mean = ops.matmul(x, self.kernel) + self.bias
        return self.activation(mean + output_noise * noise_term)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "units": self.units,
            "sigma0": self.sigma0,
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }


def apply_dense(
    kernels: KernelInitializers,
    x: Tensor,
    units: int,
    name: str,
    role: str,
    activation: str | None = None,
) -> Any:
    """Applies one dense layer to `x`; its role determines the kernel initializer."""
    kernel = kernels.dense(role)
    layer = keras.layers.Dense(units, activation=activation, kernel_initializer=kernel, name=name)
    return layer(x)


def apply_action_outputs(
    kernels: KernelInitializers,
    x: Tensor,
    num_outputs: int,
    settings: Settings,
    final_activation: str | None = None,
) -> Any:
    """Computes the inputs of the action distribution from `x`, ending in `final_activation`.

    With `free_log_std` only their first half is computed from `x`.
    """
    has_free_log_std = settings["free_log_std"]
    units = num_outputs // 2 if has_free_log_std else num_outputs
    role = "action" if not settings["no_final_linear"] else "hidden"
    outputs = apply_dense(kernels, x, units, "fc_out", role, final_activation)
    return (
        FreeLogStd(settings["log_std_init"], name="log_std")(outputs)
        if has_free_log_std
        else outputs
    )


def apply_value_output(kernels: KernelInitializers, x: Tensor) -> Any:
    return apply_dense(kernels, x, 1, "value_out", "value")
