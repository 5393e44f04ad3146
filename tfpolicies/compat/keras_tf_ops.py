"""Makes TensorFlow functions work on the `keras.Input`s of functional models, as in Keras 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_TF_DISPATCHER: type = tf.__internal__.dispatch.GlobalOpDispatcher


class TFOperation(keras.Operation):
    """A TensorFlow function as a part of a functional model.

    Args:
        function: the function, called with tensors in place of `KerasTensor`s.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the shape and dtype of the function's result."""
        dense = keras.tree.map_structure(_make_dense, (args, kwargs))
        spec = super().compute_output_spec(*dense[0], **dense[1])
        if isinstance(spec, keras.KerasTensor) and None in spec.shape[1:]:
            shape_for_2, shape_for_3 = (self._infer_shape(args, kwargs, size) for size in (2, 3))
            if None not in (shape_for_2, shape_for_3):
                shape = [
                    n if n == m else None for n, m in zip(shape_for_2, shape_for_3, strict=True)
                ]
                spec = keras.KerasTensor(shape, spec.dtype)
        return spec

    def _infer_shape(self, args: Any, kwargs: Any, size: int) -> Any:
        """Returns the shape of the result if axes of unknown length have length `size`.

        Thereby the function can use shapes such as `tf.shape(x)[0]`, which are computed by the
        model itself.
        """
        parts = [x for x in keras.tree.flatten((args, kwargs)) if isinstance(x, keras.KerasTensor)]
        inputs = {id(x): x for part in parts for x in keras.utils.get_source_inputs(part)}
        compute_parts = keras.Function([*inputs.values()], parts)

        def call(*arrays: Any) -> Any:
            values = iter(compute_parts([*arrays]))
            arguments = keras.tree.map_structure(
                lambda x: next(values) if isinstance(x, keras.KerasTensor) else x, (args, kwargs)
            )
            return self.function(*arguments[0], **arguments[1])

        specs = [
            tf.TensorSpec([size if n is None else n for n in x.shape], x.dtype)
            for x in inputs.values()
        ]
        result = tf.function(call).get_concrete_function(*specs)
        return result.output_shapes.as_list() if result.output_shapes.rank is not None else None


def _make_dense(value: Any) -> Any:
    """Returns a sparse `KerasTensor` as a dense one: Keras infers sparse for `x * constant`."""
    is_sparse = isinstance(value, keras.KerasTensor) and value.sparse
    return keras.KerasTensor(value.shape, value.dtype, name=value.name) if is_sparse else value


class _KerasTensorDispatcher(_TF_DISPATCHER):
    """Handles calls with `KerasTensor`s; TensorFlow calls it only if a function raised an error."""

    def handle(self, op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the result of `op` as a part of the model, if there is a `KerasTensor`."""
        arguments = keras.tree.flatten([args, kwargs])
        if not any(isinstance(part, keras.KerasTensor) for part in arguments):
            return self.NOT_SUPPORTED
        return TFOperation(op)(*args, **kwargs)


_KerasTensorDispatcher().register()
