"""A policy's network as a Keras model that can be saved and loaded without this package."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from tfpolicies.models.actor_critic_model import ActorCritic, call_actor, get_user_model
from tfpolicies.models.catalog.initializers import NormalizedColumns
from tfpolicies.models.mean_std_filters import CLIP
from tfpolicies.models.model_calls import (
    arrange_inputs,
    call_model,
    get_own_input_names,
    make_zero_inputs,
)
from tfpolicies.models.ports import OBS, SEQ_LENS, InputPorts
from tfpolicies.models.running_filter import Scaling


def to_plain_keras_model(
    model: keras.Model,
    ports: InputPorts,
    scalings: Mapping[str, Scaling],
    *,
    template: keras.Model | None = None,
) -> keras.Model:
    """Returns a model that computes what `model` does, and whose file Keras can load.

    It has the inputs of `model`, under the names that the user's model gives them. Each filtered
    input is normalised by a layer `<input>_normalization` without weights, whose result is bitwise
    that of `normalize`. An actor and its critic become two parts of a functional model.
    Initializers of this package are replaced. So `save` and `load_model` need no classes except
    the user's (the file must be a `.keras` one).

    Args:
        model: takes encoded observations; it is modified.
        ports: the inputs of the policy.
        scalings: mean and scale by the name of an input; empty without a filter.
        template: the user's model; by default the one in `model`.
    """
    _replace_initializers(model)
    template = get_user_model(model) if template is None else template
    arrays = make_zero_inputs(ports)
    own_names = get_own_input_names(template, arrays)
    names = get_own_input_names(model, arrays)
    has_own_names = all(names.get(name, x) == x for name, x in own_names.items())
    if not (scalings or isinstance(model, ActorCritic)) and has_own_names:
        return model
    inputs = _make_inputs(ports, arrays, own_names)
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
    arranged = arrange_inputs(model, inputs)
    if isinstance(arranged, dict):
        arranged = {tensor.name: tensor for tensor in arranged.values()}
    return keras.Model(arranged, outputs, name=name)


def _replace_initializers(model: keras.Model) -> None:
    for layer in model._flatten_layers():
        for name, value in list(vars(layer).items()):
            if isinstance(value, NormalizedColumns):
                setattr(layer, name, keras.initializers.GlorotUniform())


def _make_inputs(
    ports: InputPorts, arrays: Mapping[str, np.ndarray], own_names: Mapping[str, str]
) -> dict[str, keras.KerasTensor]:
    """Returns inputs like some arrays; sequences may have any length."""
    inputs = {}
    for name, array in arrays.items():
        shape: tuple[int | None, ...] = array.shape[1:]
        if ports.is_recurrent and name != SEQ_LENS and not name.startswith("state_in_"):
            shape = (None, *shape[1:])
        inputs[name] = keras.Input(shape, name=own_names.get(name, name), dtype=array.dtype.name)
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
