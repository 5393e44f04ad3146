"""Keras models without weights: keys of equal architectures, and checks of rebuilt copies."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from tfpolicies.base.type_aliases import Setting, TensorStructure
from tfpolicies.errors import ModelError
from tfpolicies.models.model_calls import (
    call_model,
    call_with_zeros,
    get_all_layers,
    make_zero_inputs,
)
from tfpolicies.models.ports import InputPorts


class Architecture(NamedTuple):
    """A Keras model without its weights; pickling needs classes that can be imported by name."""

    config: dict[str, Any]
    classes: dict[str, type]  # of the model and its layers, by their names in the config

    @classmethod
    def from_model(cls, model: keras.Model) -> Architecture | None:
        """Returns the architecture of a model; None if Keras cannot rebuild it."""
        classes = {type(layer).__name__: type(layer) for layer in get_all_layers(model)}
        try:
            architecture = cls(keras.saving.serialize_keras_object(model), classes)
            architecture.build()
        except (NotImplementedError, TypeError, ValueError, AttributeError):
            return None
        return architecture

    def build(self) -> keras.Model:
        with keras.saving.custom_object_scope(self.classes):
            # Keras empties a functional model's config while reading it.
            config = copy.deepcopy(self.config)
            return keras.saving.deserialize_keras_object(config, custom_objects=self.classes)


_NAMES = ("name", "keras_history", "input_layers", "output_layers")
_NOT_ARCHITECTURE = ("registered_name", "build_config", "compile_config")


def strip_names(config: Setting) -> Any:
    """Returns a Keras config without names, which differ between equal architectures.

    A layer's name and the references to it become a number; an equal string elsewhere, such as an
    activation, stays.
    """
    names: dict[str, str] = {}

    def walk(value: Setting, *, is_name: bool) -> Any:
        if isinstance(value, Mapping):
            if "DTypePolicy" in str(value.get("class_name")):
                return value["config"]
            kept = {str(k): v for k, v in value.items() if k not in _NOT_ARCHITECTURE}
            return {k: walk(v, is_name=k in _NAMES) for k, v in kept.items()}
        if isinstance(value, list | tuple):
            return [walk(v, is_name=is_name) for v in value]
        if is_name and isinstance(value, str):
            return names.setdefault(value, f"#{len(names)}")
        return value

    return walk(config, is_name=False)


def compute_fingerprint(value: Setting) -> str:
    """Returns a short stable hash of a JSON-like value."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_TOLERANCE = 1e-4  # of the largest number of an output


def check_copy_is_equal(model: keras.Model, copy: keras.Model, ports: InputPorts) -> None:
    """Checks that a copy computes what its original does, for random observations.

    Models whose outputs differ between two calls cannot be compared and pass.

    Args:
        model: the original; it is not changed.
        copy: the model as Keras rebuilt it; it gets the original's weights.
        ports: the inputs of the policy.
    """
    call_with_zeros(model, ports)
    call_with_zeros(copy, ports)
    for variable, original in zip(copy.variables, model.variables, strict=True):
        variable.assign(original)
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.normal(size=x.shape).astype(np.float32) if x.dtype == np.float32 else x
        for name, x in make_zero_inputs(ports).items()
    }
    expected, repeated = call_model(model, inputs), call_model(model, inputs)
    if not _are_equal(expected, repeated) or _are_equal(call_model(copy, inputs), expected):
        return
    name = _find_differing_layer(model, copy, inputs)
    location = "" if name is None else f", first in its layer {name!r}"
    raise ModelError(
        f"A policy learns with a copy of the model {model.name!r}, which Keras rebuilds from its "
        f"config, but the outputs of the copy differ{location}. An attribute that was set after a "
        "layer was built is not part of a config: make it an argument of `__init__` and return "
        "it in `get_config`, or pass a factory, model=lambda observation_space, num_outputs: ..., "
        "that builds the whole model."
    )


def _find_differing_layer(
    model: keras.Model, copy: keras.Model, inputs: Mapping[str, np.ndarray]
) -> str | None:
    if not isinstance(model, keras.Function | keras.Sequential):
        return None
    for original_layer, copied_layer in zip(model.layers, copy.layers, strict=True):
        try:
            parts = [
                keras.Model(x.inputs, y.output)
                for x, y in ((model, original_layer), (copy, copied_layer))
            ]
            outputs = [call_model(part, inputs) for part in parts]
        except (AttributeError, ValueError, ModelError):  # for example called several times
            continue
        if not _are_equal(*outputs):
            return str(original_layer.name)
    return None


def _are_equal(first: TensorStructure, second: TensorStructure) -> bool:
    pairs = zip(keras.tree.flatten(first), keras.tree.flatten(second), strict=True)
    return all(_is_close(np.asarray(x), np.asarray(y)) for x, y in pairs)


def _is_close(x: np.ndarray, y: np.ndarray) -> bool:
    largest = float(np.abs(y).max(initial=0.0)) if y.dtype.kind == "f" else 0.0
    if not np.isfinite(largest):
        return bool(np.array_equal(x, y, equal_nan=y.dtype.kind == "f"))
    return x.shape == y.shape and bool(np.allclose(x, y, 0.0, _TOLERANCE * max(largest, 1e-6)))
