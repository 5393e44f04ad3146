"""TensorFlow's functions on the `keras.Input`s of functional models, as Keras 2 allowed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_DISPATCHER: type = tf.__internal__.dispatch.GlobalOpDispatcher


class TFOperation(keras.Operation):
    """A function of TensorFlow as a part of a functional model.

    Args:
        function: what is called, with tensors in place of `KerasTensor`s.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the function gives, by form and dtype."""
        args, kwargs = keras.tree.map_structure(_dense, (args, kwargs))
        return super().compute_output_spec(*args, **kwargs)


def _dense(given: Any) -> Any:
    """Returns a `KerasTensor` as a dense one: Keras takes a product with a constant for sparse."""
    is_sparse = isinstance(given, keras.KerasTensor) and given.sparse
    return keras.KerasTensor(given.shape, given.dtype, name=given.name) if is_sparse else given


class _OnKerasTensors(_DISPATCHER):
    """Does what TensorFlow refuses: it is asked only where a function raised an error."""

    def handle(self, op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns what `op` gives, as a part of the model; only if there is a `KerasTensor`."""
        given = keras.tree.flatten([args, kwargs])
        if not any(isinstance(part, keras.KerasTensor) for part in given):
            return self.NOT_SUPPORTED
        return TFOperation(op)(*args, **kwargs)


_OnKerasTensors().register()
