"""The models a policy gets when the user brings none: multi-layer perceptrons from a config."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfpolicies.errors import ModelError
from tfpolicies.models.preprocessing import encoded_shape
from tfpolicies.models.spaces import Leaf


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

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        return keras.ops.convert_to_tensor(self.draw(shape, np.random.default_rng(self.seed)))

    def draw(self, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
        """Draws a kernel with the given generator, float32."""
        weights = rng.standard_normal(tuple(shape), np.float32)
        length = np.sqrt(np.square(weights).sum(axis=0, keepdims=True))
        return (weights * (self.norm / length)).astype(np.float32)

    def get_config(self) -> dict[str, Any]:
        return {"norm": self.norm, "seed": self.seed}


@keras.saving.register_keras_serializable(package="tfpolicies")
class FreeLogStd(keras.layers.Layer):
    """Puts a trained vector, the same for every row, behind the means of a Gaussian."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.log_std = self.add_weight(
            name="log_std", shape=(input_shape[-1],), initializer="zeros"
        )

    def call(self, means: Any) -> Any:
        rows = keras.ops.zeros_like(means) + self.log_std
        return keras.ops.concatenate([means, rows], axis=-1)

    def get_config(self) -> dict[str, Any]:
        return super().get_config()


_COLUMN_NORMS = {"hidden": 1.0, "action": 0.01, "value": 0.01}
_ORTHOGONAL_GAINS = {"hidden": math.sqrt(2.0), "action": 0.01, "value": 1.0}


def build_mlp(
    space_leaves: Sequence[Leaf],
    num_outputs: int,
    config: Mapping[str, Any],
    *,
    with_value: bool,
    seed: int = 0,
) -> keras.Model:
    """Builds a fully connected Keras model for flat or nested observations.

    Args:
        space_leaves: the leaves of the observation space; each is flattened, all are joined.
        num_outputs: inputs of the action distribution per row.
        config: the model config: `fcnet_hiddens` (units per layer), `fcnet_activation`,
            `vf_share_layers`, `free_log_std` (Gaussians only), `ortho_init`.
        with_value: whether the model also estimates values.
        seed: seeds the initial weights.

    Returns:
        A functional model from the encoded observations to `[B, num_outputs]`, or with a value to
        the pair (`[B, num_outputs]`, `[B, 1]`).
    """
    try:
        keras.activations.get(config["fcnet_activation"])
    except ValueError as error:
        raise ModelError(f"model['fcnet_activation']: {error}") from error
    rng = np.random.default_rng(seed)
    scales = _ORTHOGONAL_GAINS if config["ortho_init"] else _COLUMN_NORMS
    inputs = [
        keras.Input(encoded_shape(leaf), name=name, dtype="float32")
        for leaf, name in zip(space_leaves, _input_names(space_leaves), strict=True)
    ]
    given = inputs[0] if len(inputs) == 1 else inputs
    flat = [x if len(x.shape) == 2 else keras.layers.Flatten()(x) for x in inputs]
    joined = flat[0] if len(flat) == 1 else keras.layers.Concatenate(name="join")(flat)

    def dense(x: Any, units: int, name: str, role: str, activation: str | None = None) -> Any:
        kind = keras.initializers.Orthogonal if config["ortho_init"] else NormalizedColumns
        kernel = kind(scales[role], seed=int(rng.integers(2**31)))
        layer = keras.layers.Dense(
            units, activation=activation, kernel_initializer=kernel, name=name
        )
        return layer(x)

    def tower(x: Any, prefix: str) -> Any:
        for i, units in enumerate(config["fcnet_hiddens"], start=1):
            x = dense(x, units, f"{prefix}_{i}", "hidden", config["fcnet_activation"])
        return x

    hidden = tower(joined, "fc")
    free = config["free_log_std"]
    units = num_outputs // 2 if free else num_outputs
    outputs = dense(hidden, units, "fc_out", "action")
    if free:
        outputs = FreeLogStd(name="log_std")(outputs)
    if not with_value:
        return keras.Model(given, outputs, name="policy")
    value_hidden = hidden if config["vf_share_layers"] else tower(joined, "fc_value")
    value = dense(value_hidden, 1, "value_out", "value")
    return keras.Model(given, [outputs, value], name="policy")


def _input_names(space_leaves: Sequence[Leaf]) -> list[str]:
    """Returns names that Keras takes: each only once, and without slashes."""
    names: list[str] = []
    for i, leaf in enumerate(space_leaves):
        name = re.sub(r"\W", "_", leaf.name("obs"), flags=re.ASCII)
        names.append(f"{name}_{i}" if name in names else name)
    return names


def build_model(space_leaves, num_outputs, config, *, with_value, seed, action_leaves=()):
    return build_mlp(space_leaves, num_outputs, config, with_value=with_value, seed=seed)


def memory_of(model):
    return []


def extra_inputs(model):
    return ()
