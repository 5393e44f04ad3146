"""The weights of a Keras model as arrays by layer, from any file format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class NamedArray(NamedTuple):
    """One weight: its name in the file (`kernel`, or its number if it has none) and value."""

    name: str
    array: np.ndarray


@dataclass(frozen=True)
class LayerWeights:
    """The weights that one layer directly owns; a sub-layer (the cell of an LSTM) is separate.

    Attributes:
        name: the layer's name below its model, such as `dense_3` or `lstm/lstm_cell`; if the
            file has none, its `path`.
        class_name: its class in snake case (`dense`), or None if the file does not store it.
        weights: its arrays, in the layer's order.
        path: its path in a Keras 3 file, such as `layers/dense_1`; empty for Keras 2.
        is_named: whether `name` is the layer's name.
        sequence: layers of one sequence are in the model's order; the order of layers of different
            sequences is unknown.
    """

    name: str
    class_name: str | None
    weights: list[NamedArray]
    path: str = ""
    is_named: bool = True
    sequence: str = ""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [weight.array.shape for weight in self.weights]


@dataclass(frozen=True)
class KerasWeights:
    """The contents of a file of Keras weights.

    Attributes:
        kind: "keras3 weights", "keras3 archive", "keras2 weights" or "keras2 model".
        layers: the layers that own weights, without random seeds and optimizer slots.
    """

    kind: str
    layers: list[LayerWeights]


class LayerLocation(NamedTuple):
    """The parsed path of a layer in a Keras 3 file.

    Attributes:
        sequence: the path without the numbers that count layers of one class; layers that share
            it are numbered in the model's order.
        role: the part of it that does not depend on where the model itself is.
        class_name: the class in snake case, or None if the path has only names of attributes.
    """

    sequence: str
    role: str
    class_name: str | None


def parse_layer_path(path: str) -> LayerLocation:
    """Parses the path of a layer.

    >>> parse_layer_path("layers/dense_12")
    LayerLocation(sequence='layers/dense', role='dense', class_name='dense')
    >>> parse_layer_path("actor/layers/lstm_1/cell")
    LayerLocation(sequence='actor/layers/lstm/cell', role='lstm/cell', class_name='lstm')
    >>> parse_layer_path("first_1")
    LayerLocation(sequence='first_1', role='first_1', class_name=None)
    """
    parts = path.split("/")
    for i in range(1, len(parts)):
        if parts[i - 1] == "layers":
            parts[i] = split_number(parts[i])[0]
    inner = len(parts) - parts[::-1].index("layers") if "layers" in parts else 0
    class_name = parts[inner] if 0 < inner < len(parts) else None
    role = strip_underscores("/".join(parts[inner:]))
    return LayerLocation("/".join(parts), role, class_name)


def strip_underscores(path: str) -> str:
    """Returns a path without the leading underscores of its parts.

    For an attribute that is also a property, Keras 3 saves the property's name, Keras 2 the
    attribute's.

    >>> strip_underscores("layers/multi_head_attention/_query_dense")
    'layers/multi_head_attention/query_dense'
    """
    return "/".join(part.lstrip("_") for part in path.split("/"))


def split_number(name: str) -> tuple[str, int]:
    """Splits off the number of a name; sorted by it, `dense_2` comes before `dense_10`.

    >>> split_number("dense_12"), split_number("dense")
    (('dense', 12), ('dense', 0))
    """
    stem, _, digits = name.rpartition("_")
    if stem and len(digits) < 10 and digits.isascii() and digits.isdigit():
        return stem, int(digits)
    return name, 0


def natural_sort_key(path: str) -> list[tuple[str, int]]:
    """Returns a key that sorts paths part by part and numbers by value."""
    return [split_number(part) for part in path.split("/")]


def snake_case(class_name: str) -> str:
    """Returns the name of a class in Keras's files.

    >>> snake_case("Conv2D"), snake_case("LSTM"), snake_case("BatchNormalization")
    ('conv2d', 'lstm', 'batch_normalization')
    """
    words = re.sub(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", re.sub(r"\W", "", class_name))
    return words.lower()
