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


class Kind(NamedTuple):
    """The objects that are allowed at one kind of place in a config."""

    what: str  # for messages
    base: Any  # the base class of custom classes
    own: Mapping[tuple[str, str], type]  # Keras's classes, by module and name
    names: frozenset[str]  # strings that Keras resolves to an object


@cache
def kinds() -> dict[str, Kind]:
    """Returns the categories by the ending of their config keys; "" is for any category."""
    layers = _classes({"keras.layers": _NAMES["layers"], **_NAMES["inside"]})
    found = {
        "layer": Kind("layer", keras.Operation, layers, frozenset()),
        "activation": Kind("activation", keras.Layer, layers, frozenset(_NAMES["activations"])),
        "initializer": _kind("initializer", keras.Initializer),
        "regularizer": _kind("regularizer", keras.Regularizer),
        "constraint": _kind("constraint", keras.constraints.Constraint),
        "dtype": Kind(
            "dtype policy",
            keras.DTypePolicy,
            _classes({"keras": ("DTypePolicy",)}),
            frozenset({*DTYPES, "mixed_float16", "mixed_bfloat16"}),
        ),
    }
    every = {pair: each for kind in found.values() for pair, each in kind.own.items()}
    bases = tuple(kind.base for kind in found.values())
    return {**found, "": Kind("object", bases, every, frozenset())}


def is_optimizer(name: object) -> bool:
    """Returns whether a name is that of a Keras optimizer, or of one registered in this process."""
    if not isinstance(name, str):
        return False
    found = keras.saving.get_registered_object(name)
    if found is None:
        return name.lower() in _NAMES["optimizers"]
    return isinstance(found, type) and issubclass(found, keras.optimizers.Optimizer)


def _kind(what: str, base: type) -> Kind:
    names = _NAMES[f"{what}s"]
    texts = {text for name in names for text in (name, _snake_case(name))}
    return Kind(what, base, _classes({f"keras.{what}s": names}), frozenset(texts))


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _classes(names: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], type]:
    """Returns the classes that this version of Keras has, by module and name."""
    found = {
        (module, name): getattr(importlib.import_module(module), name, None)
        for module, listed in names.items()
        for name in listed
    }
    return {pair: each for pair, each in found.items() if isinstance(each, type)}
