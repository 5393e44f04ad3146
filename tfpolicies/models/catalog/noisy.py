"""Dense layers with noise on their weights, which is an input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfpolicies.models.catalog.layers import Tensor


@keras.saving.register_keras_serializable(package="tfpolicies")
class NoisyDense(keras.layers.Layer):
    """A dense layer with factorised Gaussian noise: Fortunato et al. 2018 (arXiv:1706.10295).

    Called with `[x, noise]` of `[B, p]` and `[B, p + q]` (or `[1, p + q]`: the same noise for all
    rows), it gives `[B, q]`:

        y = x (mu_w + sigma_w * f(e) f(d)^T) + mu_b + sigma_b * f(d)        (equations 9 to 11)

    where `noise` is e and d, and f(x) = sign(x) sqrt(|x|). So zero noise gives the mean weights.
    Row by row that is x mu_w + mu_b + f(d) * ((f(e) * x) sigma_w + sigma_b), so that rows with
    noise of their own need no weights of their own. Sigmas begin at sigma0 / sqrt(p) (section 3.2).

    Args:
        units: q.
        sigma0: scales the first sigmas.
        activation: of the outputs, by name; None for linear ones.
        kernel_initializer: of mu_w; mu_b begins at 0.
    """

    def __init__(
        self,
        units: int,
        sigma0: float,
        activation: str | Callable[[tf.Tensor], tf.Tensor] | None = None,
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        **kwargs: Any,
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
        shaped = ops.sign(noise) * ops.sqrt(ops.abs(noise))
        of_inputs, of_outputs = shaped[:, : x.shape[-1]], shaped[:, x.shape[-1] :]
        disturbed = ops.matmul(of_inputs * x, self.kernel_sigma) + self.bias_sigma
        mean = ops.matmul(x, self.kernel) + self.bias
        return self.activation(mean + of_outputs * disturbed)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "units": self.units,
            "sigma0": self.sigma0,
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
