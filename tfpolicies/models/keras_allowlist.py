"""Allow-list of the Keras objects that a file may name, for `keras_json`.

The lists of `keras_names.json` contain objects that hold no code, open no file and keep no
vocabulary, and whose work follows from shapes and settings, as measured by `work.py`. So there is
no Lambda, no layer that wraps another framework, none with a state from `adapt`, and none that
repeats its work a given number of times.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import keras

_NAMES = json.loads(resources.files(__package__).joinpath("keras_names.json").read_text("utf-8"))
"""Names by category. "inside" has objects without a public name, by module: models, and nodes
written as `x + y` or with `keras.ops`."""

DTYPES = tuple(_NAMES["dtypes"])


class KerasCategory(NamedTuple):
    """The objects that are allowed at one kind of place in a config."""

    description: str  # for messages
    base_class: Any  # the base class of custom classes
    keras_classes: Mapping[tuple[str, str], type]  # Keras's classes, by module and name
    allowed_names: frozenset[str]  # strings that Keras resolves to an object


@cache
def get_categories() -> dict[str, KerasCategory]:
    """Returns the categories by the ending of their config keys; "" is for any category."""
    layers = _load_classes({"keras.layers": _NAMES["layers"], **_NAMES["inside"]})
    categories = {
        "layer": KerasCategory("layer", keras.Operation, layers, frozenset()),
        "activation": KerasCategory(
            "activation", keras.Layer, layers, frozenset(_NAMES["activations"])
        ),
        "initializer": _make_category("initializer", keras.Initializer),
        "regularizer": _make_category("regularizer", keras.Regularizer),
        "constraint": _make_category("constraint", keras.constraints.Constraint),
        "dtype": KerasCategory(
            "dtype policy",
            keras.DTypePolicy,
            _load_classes({"keras": ("DTypePolicy",)}),
            frozenset({*DTYPES, "mixed_float16", "mixed_bfloat16"}),
        ),
    }
    all_classes = {
        pair: keras_class
        for category in categories.values()
        for pair, keras_class in category.keras_classes.items()
    }
    bases = tuple(category.base_class for category in categories.values())
    return {**categories, "": KerasCategory("object", bases, all_classes, frozenset())}


def is_optimizer(name: object) -> bool:
    """Returns whether a name is that of a Keras optimizer, or of one registered in this process."""
    if not isinstance(name, str):
        return False
    registered = keras.saving.get_registered_object(name)
    if registered is None:
        return name.lower() in _NAMES["optimizers"]
    return isinstance(registered, type) and issubclass(registered, keras.optimizers.Optimizer)


def _make_category(description: str, base_class: type) -> KerasCategory:
    names = _NAMES[f"{description}s"]
    spellings = {text for name in names for text in (name, _snake_case(name))}
    return KerasCategory(
        description,
        base_class,
        _load_classes({f"keras.{description}s": names}),
        frozenset(spellings),
    )


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _load_classes(names: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], type]:
    objects = {
        (module, name): getattr(importlib.import_module(module), name, None)
        for module, class_names in names.items()
        for name in class_names
    }
    return {pair: value for pair, value in objects.items() if isinstance(value, type)}
