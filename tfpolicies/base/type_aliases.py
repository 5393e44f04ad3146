"""Type aliases that several subpackages share. They exist for annotations only.

Tensors are written `tf.Tensor`, Keras models `keras.Model`, spaces `gym.Space`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

import numpy as np

if TYPE_CHECKING:
    import gymnasium as gym
    import tensorflow as tf

Scalar: TypeAlias = "bool | int | float | np.generic"
"""One number or bool of Python or NumPy."""

Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", None]
"""A JSON value."""

Structure: TypeAlias = Union[
    np.ndarray, "Scalar", "str", "Sequence[Structure]", "Mapping[str, Structure]"
]
"""Arrays and numbers nested in dicts, tuples and lists, such as an observation or an action."""

ModelState: TypeAlias = "Sequence[Structure] | Mapping[str, Structure]"
"""The recurrent state of a model: arrays in a list, or in dicts."""

TensorStructure: TypeAlias = Union[
    "tf.Tensor", "Sequence[TensorStructure]", "Mapping[str, TensorStructure]"
]
"""Tensors, nested in dicts, tuples and lists."""

Setting: TypeAlias = Union[
    bool,
    int,
    float,
    str,
    "np.generic",
    np.ndarray,
    type,
    Callable[..., object],
    "gym.Space[object]",
    "gym.Env[object, object]",
    "Sequence[Setting]",
    "Mapping[str, Setting]",
    None,
]
"""The value of a setting: a plain value, a class, function or space, or these nested."""
