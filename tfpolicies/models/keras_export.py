"""A policy's network as a Keras model that can be saved and loaded without this package."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from tfpolicies.models.actor_critic_model import ActorCritic, call_actor
from tfpolicies.models.catalog.initializers import NormalizedColumns
from tfpolicies.models.mean_std_filters import CLIP
from tfpolicies.models.model_calls import arrange_inputs, call_model, make_zero_inputs
from tfpolicies.models.ports import OBS, SEQ_LENS, InputPorts
from tfpolicies.models.running_filter import Scaling


def to_plain_keras_model(
    model: keras.Model, ports: InputPorts, scalings: Mapping[str, Scaling]
) -> keras.Model:
    """Returns a model that computes what `model` does, and whose file Keras can load.

    It has the inputs of `model`. Each filtered input is normalised by a layer
    `<input>_make_normalization` without weights, whose result is bitwise that of `normalize`. An
    actor and its critic become two parts of a functional model. Initializers of this package are
    replaced. So `save` and `load_model` need no classes except the user's (the file must be a
    `.keras` one).

    Args:
        model: takes encoded observations; it is modified.
        ports: the inputs of the policy.
        scalings: mean and scale by the name of an input; empty without a filter.
    """
    _replace_initializers(model)
    if not scalings and not isinstance(model, ActorCritic):
        return model
    inputs = _make_inputs(ports)
    model_inputs = dict(inputs)
    for name, source in _map_inputs_to_filters(ports).items():
        if source in scalings:
            layer = _make_normalization(name, inputs[name].shape[1:], scalings[source])
            model_inputs[name] = layer(inputs[name])
    if isinstance(model, ActorCritic):
        outputs = (call_actor(model.actor, model_inputs), call_model(model.critic, model_inputs))
    else:
        outputs = call_model(model, model_inputs)
    name = f"normalized_{model.name}" if scalings else model.name
    return keras.Model(arrange_inputs(model, inputs), outputs, name=name)


def _replace_initializers(model: keras.Model) -> None:
    for layer in model._flatten_layers():
        for name, value in list(vars(layer).items()):
            if isinstance(value, NormalizedColumns):
                setattr(layer, name, keras.initializers.GlorotUniform())


def _make_inputs(ports: InputPorts) -> dict[str, keras.KerasTensor]:
    """Returns the inputs of a model by name; sequences may have any length."""
    inputs = {}
    for name, array in make_zero_inputs(ports).items():
        shape: tuple[int | None, ...] = array.shape[1:]
        if ports.is_recurrent and name != SEQ_LENS and not name.startswith("state_in_"):
            shape = (None, *shape[1:])
        inputs[name] = keras.Input(shape, name=name, dtype=array.dtype.name)
    return inputs


def _map_inputs_to_filters(ports: InputPorts) -> dict[str, str]:
    """Returns, by input, the name of the observation part whose filter normalises it."""
    obs_names = [port.name for port, mask in zip(ports.obs, ports.is_mask, strict=True) if not mask]
    sources = {name: name for name in obs_names}
    for view in ports.views:
        if view.source == OBS:
            sources |= {
                port.name: obs_name for port, obs_name in zip(view.ports, obs_names, strict=True)
            }
    return sources


def _make_normalization(name: str, shape: tuple[int | None, ...], scaling: Scaling) -> keras.Model:
    x = keras.Input(shape, name=name)
    mean, scale = (np.asarray(numbers, np.float32) for numbers in scaling)
    scaled = keras.ops.multiply(keras.ops.subtract(x, mean), scale)
    clipped = keras.ops.clip(scaled, -CLIP, CLIP)
    layer = keras.Model(x, clipped, name=f"{name}_normalization")
    layer.trainable = False
    return layer
