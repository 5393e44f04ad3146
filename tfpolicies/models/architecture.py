"""Keras models without their weights, and keys that are equal for equal architectures."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras

from tfpolicies.models.calling import all_layers
from tfpolicies.types import Setting


class Architecture(NamedTuple):
    """A Keras model without its weights; pickle takes it where it finds the classes by name."""

    config: dict[str, Any]
    classes: dict[str, type]  # of the model and its layers, as the config names them

    @classmethod
    def of(cls, model: keras.Model) -> Architecture | None:
        """Returns the architecture of a model; None if Keras cannot rebuild it."""
        classes = {type(layer).__name__: type(layer) for layer in all_layers(model)}
        try:
            found = cls(keras.saving.serialize_keras_object(model), classes)
            found.build()
        except (NotImplementedError, TypeError, ValueError, AttributeError):
            return None
        return found

    def build(self) -> keras.Model:
        """Returns a new model of the architecture."""
        with keras.saving.custom_object_scope(self.classes):
            # Keras empties a functional model's config while it reads it, so it gets a copy.
            config = copy.deepcopy(self.config)
            return keras.saving.deserialize_keras_object(config, custom_objects=self.classes)


_NAMES = ("name", "keras_history", "input_layers", "output_layers")
_NOT_ARCHITECTURE = ("registered_name", "build_config", "compile_config")


def anonymous(config: Setting) -> Any:
    """Returns a Keras config without names, which differ between equal architectures.

    Names become numbers, where a layer has its name and where others refer to it; the same word
    elsewhere (an activation) stays.
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


def fingerprint(value: Setting) -> str:
    """Returns a short stable hash of a JSON-like value."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
