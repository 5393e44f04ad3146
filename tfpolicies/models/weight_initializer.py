"""Keys of a model's variables, and initial values for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfpolicies.models.catalog.initializers import get_initializer


def make_variable_keys(variables: Sequence[Any]) -> list[str]:
    """Returns canonical keys: the position of a variable's layer and the variable's role.

    Names such as `dense_4/kernel` depend on the layers that a process built before; keys do not.
    """
    layers: dict[str, int] = {}
    keys: list[str] = []
    for variable in variables:
        layer, _, role = variable.path.rpartition("/")
        key = f"layer_{layers.setdefault(layer, len(layers))}/{role}"
        copies = sum(k == key or k.startswith(f"{key}#") for k in keys)
        keys.append(f"{key}#{copies}" if copies else key)
    return keys


class WeightInitializer:
    """Draws initial values for all variables of a model from its layers' initializers.

    The same seed and architecture give the same values. Variables whose layer has no initializer
    for them (counters, a bare `add_weight`) get their value in `initial_values`.

    Args:
        model: the model.
        initial_values: the values of its variables after it was built.
    """

    def __init__(self, model: keras.Model, initial_values: Sequence[np.ndarray]) -> None:
        initializers = _get_initializers(model)
        self._variables = [
            (tuple(v.shape), np.dtype(v.dtype), v.name, initializers.get(id(v)), initial_value)
            for v, initial_value in zip(model.variables, initial_values, strict=True)
        ]

    def draw(self, seed: int | Sequence[int]) -> list[np.ndarray]:
        """Returns an array per variable, in order."""
        seeds = np.random.SeedSequence(seed).generate_state(len(self._variables)).tolist()
        values = []
        for (shape, dtype, role, initializer, initial_value), variable_seed in zip(
            self._variables, seeds, strict=True
        ):
            if role == "seed_generator_state":
                values.append(np.array([variable_seed, 0], "uint32").astype(dtype))
            elif initializer is None:
                values.append(initial_value)
            else:
                values.append(_draw(initializer, shape, dtype, variable_seed))
        return values


def _get_initializers(model: keras.Model) -> dict[int, Any]:
    initializers: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for variable in layer._trainable_variables + layer._non_trainable_variables:
            spec = get_initializer(layer, variable)
            if spec is not None:
                initializers[id(variable)] = keras.initializers.get(spec)
    return initializers


def _draw(
    initializer: keras.initializers.Initializer, shape: tuple[int, ...], dtype: np.dtype, seed: int
) -> np.ndarray:
    if isinstance(initializer, keras.initializers.Zeros):
        return np.zeros(shape, dtype)
    if isinstance(initializer, keras.initializers.Initializer):
        config = initializer.get_config()
        if "seed" in config:
            initializer = type(initializer).from_config({**config, "seed": seed})
    if hasattr(initializer, "draw"):
        return initializer.draw(shape, np.random.default_rng(seed))
    return np.asarray(initializer(shape, dtype=dtype.name))
