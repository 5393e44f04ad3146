"""Sources of a policy's networks: the catalog, a custom model, or a factory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import gymnasium as gym
import keras

from tfpolicies.errors import ModelError
from tfpolicies.models.architecture import Architecture, anonymous, fingerprint, require_equal
from tfpolicies.models.calling import all_layers, call_with_zeros
from tfpolicies.models.catalog.build import build_model
from tfpolicies.models.catalog.q_network import QHeads, build_q_model, q_noise_size
from tfpolicies.models.custom_model import (
    Factory,
    ModelRequirements,
    context_of,
    model_of,
    ports_of,
    require_float32,
)
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.extent import is_built_from_file, require_room
from tfpolicies.models.ports import InputPorts, model_leaves
from tfpolicies.models.preprocessing import encoded_shape
from tfpolicies.models.registry import model_given
from tfpolicies.models.settings import Settings, has_memory
from tfpolicies.models.views import declared


class ModelSource(NamedTuple):
    """The source of the networks of all policies with the same program."""

    key: tuple  # equal for equal architectures, whatever their names
    make: Callable[[], keras.Model]  # builds a new model with each call
    template: keras.Model | None = None  # an instance, with the weights of the first policy
    is_catalog: bool = False  # whether only settings determine it
    noise_size: int = 0  # number of noise values per row of noisy networks


def model_source(
    observation_space: gym.Space,
    dist_class: ActionDistribution,
    config: Settings,
    *,
    with_value: bool,
) -> ModelSource:
    """Resolves the `model` config to a source of networks.

    `custom_model` is a `keras.Model` (the template), or a factory
    `f(observation_space, num_outputs, **custom_model_config) -> keras.Model`, or the name of a
    registered one; or None for a model of the catalog. A factory with parameters `action_space` or
    `model_config` also gets these; one without any parameter is called without arguments.

    With `use_lstm`, `use_gru` or `use_attention` a custom model computes features, of any number,
    for the memory around it; `num_outputs` is then the width of the memory.

    Raises:
        ModelError: if it is something else.
    """
    custom, num_outputs = model_given(config["custom_model"]), dist_class.num_outputs
    requirements = ModelRequirements(observation_space, dist_class, config, with_value)
    if custom is None:
        how = {"with_value": with_value, "action_leaves": dist_class.leaves}
        return _catalog_source(build_model, observation_space, num_outputs, config, how)
    value_settings = [config[k] for k in ("fcnet_hiddens", "fcnet_activation", "ortho_init")]
    value_key = (with_value, fingerprint(value_settings))
    if isinstance(custom, keras.Model):
        ports = ports_of(custom, observation_space, dist_class)
        unbuilt = None if custom.built else Architecture.of(custom)
        if unbuilt is not None:
            _require_room(unbuilt, ports, custom.name)
        if unbuilt is not None or not isinstance(custom, keras.Function | keras.Sequential):
            call_with_zeros(custom, ports)  # builds it; `complete` tries each copy
        architecture = Architecture.of(custom)
        _require_kept_views(custom, architecture)
        if architecture is not None and custom not in _compared and not is_built_from_file():
            require_equal(custom, architecture.build(), ports)
            _compared.add(custom)
        return _instance_source(custom, architecture, requirements.complete, value_key)
    if isinstance(custom, keras.Layer):
        raise ModelError(
            f"model must be a keras.Model or a factory of one; got the layer {custom.name!r}. "
            "Write keras.Sequential([layer])."
        )
    if callable(custom):
        arguments = dict(config["custom_model_config"])
        context = context_of(custom, dist_class.space, config)
        width = num_outputs
        if has_memory(config):
            width = int(config["attention_dim" if config["use_attention"] else "lstm_cell_size"])

        def make_custom() -> keras.Model:
            keywords = {**arguments, **context}
            return requirements.complete(model_of(custom, observation_space, width, keywords))

        given = fingerprint([arguments, context.get("model_config")])
        factory_key = ("factory", custom, given, num_outputs, *value_key)
        return ModelSource(factory_key, make_custom)
    raise ModelError(
        "custom_model must be a keras.Model or a factory f(observation_space, num_outputs, "
        f"**custom_model_config) that returns one; got {custom!r}."
    )


def q_model_source(observation_space: gym.Space, num_actions: int, static: Settings) -> ModelSource:
    """Returns the source of the catalog's Q-networks; see `build_q_model`.

    Args:
        observation_space: the environment's observation space.
        num_actions: the number of values, or distributions, to estimate.
        settings: has the complete `model` config, and the settings of `QHeads`.

    Raises:
        ModelError: if Keras's global dtype is not float32.
    """
    heads = QHeads.of(static)
    noise_size = q_noise_size(model_leaves(observation_space), num_actions, static["model"], heads)
    source = _catalog_source(
        build_q_model, observation_space, num_actions, static["model"], {"heads": heads}
    )
    return source._replace(noise_size=noise_size)


def _catalog_source(
    build: Factory, observation_space: gym.Space, num_outputs: int, config: Settings, how: Settings
) -> ModelSource:
    require_float32()
    found = model_leaves(observation_space)
    shapes = tuple((encoded_shape(leaf), leaf.path) for leaf in found)
    settings = {k: v for k, v in config.items() if not k.startswith("custom_model")}
    key = ("catalog", build, shapes, num_outputs, fingerprint([settings, how]))
    make = functools.partial(build, found, num_outputs, config, **how)
    return ModelSource(key, make, is_catalog=True)


def _require_room(architecture: Architecture, ports: InputPorts, name: str) -> None:
    def built() -> keras.Model:
        model = architecture.build()
        call_with_zeros(model, ports)
        return model

    require_room(built, f"The model {name!r}", may_fail=True)


def _require_kept_views(instance: keras.Model, architecture: Architecture | None) -> None:
    """Checks that copies of a model instance have its view requirements.

    Raises:
        ModelError: if Keras loses them.
    """
    required = declared(instance)
    if required and architecture is not None and declared(architecture.build()) != required:
        raise ModelError(
            f"The model {instance.name!r} has view_requirements that Keras leaves out of copies. "
            "Pass a factory that sets them, or set them in the constructor of the model's class."
        )


def _instance_source(
    instance: keras.Model,
    architecture: Architecture | None,
    complete: Callable[[keras.Model], keras.Model],
    value_key: tuple,
) -> ModelSource:
    if architecture is None:
        key = ("instance", id(instance), *value_key)
        return ModelSource(key, lambda: complete(instance), instance)

    classes = tuple(
        type(layer)
        for layer in all_layers(instance)
        if not type(layer).__module__.startswith("keras.")
    )
    key = ("architecture", fingerprint(anonymous(architecture.config)), classes, *value_key)
    return ModelSource(key, lambda: complete(architecture.build()), instance)


_compared: weakref.WeakSet[keras.Model] = weakref.WeakSet()
"""Custom models whose copies were checked to compute the same."""
