"""A Keras model behind the observation filter: layers of Keras alone, with the policy's numbers."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from tfpolicies.models.filters import CLIP
from tfpolicies.models.network import call_model, structured, zeros
from tfpolicies.models.ports import SEQ_LENS, InputPorts
from tfpolicies.models.running_filter import Scaling


def with_normalization(
    model: keras.Model, ports: InputPorts, scalings: Mapping[str, Scaling]
) -> keras.Model:
    """Returns a model that normalises what is filtered before `model` sees it.

    It takes what `model` takes. Each filtered input goes through a layer `<input>_normalization`
    without weights, which computes what `normalize` does to the bit. All of it is Keras's own, so
    that `save` and `load_model` need nothing else (the file must be a `.keras` one).

    Args:
        model: takes encoded observations.
        ports: the inputs of the policy.
        scalings: mean and scale by the name of an input.
    """
    inputs = _inputs(ports)
    seen = dict(inputs)
    for name, scaling in scalings.items():
        seen[name] = _normalization(name, inputs[name].shape[1:], scaling)(inputs[name])
    outputs = call_model(model, seen)
    return keras.Model(structured(model, inputs), outputs, name=f"normalized_{model.name}")


def _inputs(ports: InputPorts) -> dict[str, keras.KerasTensor]:
    """Returns the inputs of a model by name; sequences may have any length."""
    found = {}
    for name, array in zeros(ports).items():
        shape: tuple[int | None, ...] = array.shape[1:]
        if ports.is_recurrent and name != SEQ_LENS and not name.startswith("state_in_"):
            shape = (None, *shape[1:])
        found[name] = keras.Input(shape, name=name, dtype=array.dtype.name)
    return found


def _normalization(name: str, shape: tuple[int | None, ...], scaling: Scaling) -> keras.Model:
    x = keras.Input(shape, name=name)
    mean, scale = (np.asarray(numbers, np.float32) for numbers in scaling)
    scaled = keras.ops.multiply(keras.ops.subtract(x, mean), scale)
    clipped = keras.ops.clip(scaled, -CLIP, CLIP)
    layer = keras.Model(x, clipped, name=f"{name}_normalization")
    layer.trainable = False
    return layer
