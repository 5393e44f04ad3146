"""Initializers of the catalog's models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np


@keras.saving.register_keras_serializable(package="tfpolicies")
class NormalizedColumns(keras.initializers.Initializer):
    """Normal weights whose columns are scaled to the L2 norm `norm`.

    Args:
        norm: the Euclidean norm of each column of a kernel `[in, out]`.
        seed: an integer; the same seed gives the same weights.
    """

    def __init__(self, norm: float = 1.0, seed: int | None = None) -> None:
        self.norm = norm
        self.seed = seed

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> Any:
        return keras.ops.convert_to_tensor(self.draw(shape, np.random.default_rng(self.seed)))

    def draw(self, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
        weights = rng.standard_normal(tuple(shape), np.float32)
        column_norms = np.sqrt(np.square(weights).sum(axis=0, keepdims=True))
        column_norms[column_norms == 0.0] = (
            1.0  # a draw may be 0, and columns of one row are one draw
        )
        return (weights * (self.norm / column_norms)).astype(np.float32)

    def get_config(self) -> dict[str, Any]:
        return {"norm": self.norm, "seed": self.seed}


class UnitForgetBias(keras.initializers.Initializer):
    """The bias of an LSTM cell whose forget gate starts open (Jozefowicz et al. 2015, section 4).

    Keras builds such a bias inside the cell, where it cannot be drawn a second time.

    Args:
        other_gates: the initializer of the three other gates.
    """

    def __init__(self, other_gates: keras.initializers.Initializer) -> None:
        self.other_gates = other_gates

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> Any:
        units = shape[0] // 4
        parts = [
            self.other_gates((units,), dtype=dtype),
            keras.ops.ones((units,), dtype=dtype),
            self.other_gates((2 * units,), dtype=dtype),
        ]
        return keras.ops.concatenate(parts)


_COLUMN_NORMS = {"hidden": 1.0, "action": 0.01, "value": 0.01}
_ORTHOGONAL_GAINS = {"hidden": math.sqrt(2.0), "action": 0.01, "value": 1.0}


class KernelInitializers:
    """Returns the initializers of a model's kernels, each with a different seed.

    Args:
        ortho_init: whether dense layers and convolutions are orthogonal (Saxe et al. 2014,
            arXiv:1312.6120), with the gains sqrt(2) for hidden layers, 0.01 for the actor's
            outputs and 1 for the value. Otherwise the columns of dense layers have the norm 1, or
            0.01 for outputs and values, and convolutions are Glorot-uniform.
        seed: determines all seeds.
    """

    def __init__(self, *, ortho_init: bool, seed: int) -> None:
        self._ortho_init = ortho_init
        self._rng = np.random.default_rng(seed)

    def dense(self, role: str) -> keras.initializers.Initializer:
        """Returns the next initializer for a dense layer: "hidden", "action" or "value"."""
        if self._ortho_init:
            return keras.initializers.Orthogonal(_ORTHOGONAL_GAINS[role], seed=self.next_seed())
        return NormalizedColumns(_COLUMN_NORMS[role], seed=self.next_seed())

    def conv(self) -> keras.initializers.Initializer:
        if self._ortho_init:
            return keras.initializers.Orthogonal(_ORTHOGONAL_GAINS["hidden"], seed=self.next_seed())
        return self.glorot()

    def glorot(self) -> keras.initializers.Initializer:
        return keras.initializers.GlorotUniform(seed=self.next_seed())

    def orthogonal(self) -> keras.initializers.Initializer:
        """Returns the next orthogonal initializer, for a recurrent kernel."""
        return keras.initializers.Orthogonal(seed=self.next_seed())

    def next_seed(self) -> int:
        return int(self._rng.integers(2**31))


def get_initializer(layer: keras.layers.Layer, variable: keras.Variable) -> Any:
    """Returns the initializer of one of a layer's variables, or None if the layer has none for it.

    The layer's attribute or config entry `<name>_initializer` is looked up, also under the names
    that Keras shortens (`recurrent_kernel`: `recurrent_initializer`). For the bias of an LSTM cell
    with `unit_forget_bias` the initializer draws ones for the forget gate.

    Args:
        layer: the layer that directly owns the variable (for an LSTM that is its cell).
        variable: a variable of the layer.

    Returns:
        A Keras initializer, or the name or config of one; None for counters and other variables
        that were added without an initializer that the layer stores.
    """
    try:
        config = layer.get_config()
    except NotImplementedError:  # a user's class
        config = {}
    initializer = None
    # The attributes of `recurrent_kernel`, `depthwise_kernel` and the like have shorter names.
    for name in (variable.name, variable.name.removesuffix("_kernel")):
        name = f"{name}_initializer"
        initializer = initializer or getattr(layer, name, None) or config.get(name)
    if variable.name == "bias" and getattr(layer, "unit_forget_bias", False):
        return UnitForgetBias(keras.initializers.get(initializer))
    return initializer
