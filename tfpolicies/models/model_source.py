"""Sources of a policy's networks: the catalog, a custom model, or a factory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import gymnasium as gym
import keras

from tfpolicies.errors import ModelError
from tfpolicies.models.architecture import (
    Architecture,
    check_copy_is_equal,
    compute_fingerprint,
    strip_names,
)
from tfpolicies.models.catalog.build import build_model
from tfpolicies.models.catalog.q_network import QHeads, build_q_model, get_q_noise_size
from tfpolicies.models.custom_model import (
    Factory,
    ModelRequirements,
    call_factory,
    get_factory_context,
    get_input_ports,
    require_float32,
)
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.model_calls import call_with_zeros, get_all_layers
from tfpolicies.models.model_config import Settings, has_memory
from tfpolicies.models.ports import InputPorts, get_model_leaves
from tfpolicies.models.preprocessing import get_encoded_shape
from tfpolicies.models.registry import resolve_custom_model
from tfpolicies.models.size_check import check_memory, is_built_from_file
from tfpolicies.models.view_requirements import get_view_requirements


class ModelSource(NamedTuple):
    """The source of the networks of all policies with the same program."""

    key: tuple  # equal for equal architectures, whatever their names
    make: Callable[[], keras.Model]  # builds a new model with each call
    template: keras.Model | None = None  # an instance, whose weights policies start with
    is_catalog: bool = False  # whether only settings determine it
    noise_size: int = 0  # number of noise values per row of noisy networks


def make_model_source(
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
    """
    custom, num_outputs = resolve_custom_model(config["custom_model"]), dist_class.num_outputs
    requirements = ModelRequirements(observation_space, dist_class, config, with_value)
    if custom is None:
        options = {"with_value": with_value, "action_leaves": dist_class.leaves}
        return _make_catalog_source(build_model, observation_space, num_outputs, config, options)
    value_settings = [config[k] for k in ("fcnet_hiddens", "fcnet_activation", "ortho_init")]
    value_key = (with_value, compute_fingerprint(value_settings))
    if isinstance(custom, keras.Model):
        ports = get_input_ports(custom, observation_space, dist_class)
        unbuilt = None if custom.built else Architecture.from_model(custom)
        if unbuilt is not None:
            _check_model_memory(unbuilt, ports, custom.name)
        if unbuilt is not None or not isinstance(custom, keras.Function | keras.Sequential):
            call_with_zeros(custom, ports)  # builds it; `complete` tries each copy
        architecture = Architecture.from_model(custom)
        _check_copied_views(custom, architecture)
        if architecture is not None and custom not in _verified_models and not is_built_from_file():
            check_copy_is_equal(custom, architecture.build(), ports)
            _verified_models.add(custom)
        return _make_instance_source(custom, architecture, requirements.complete, value_key)
    if isinstance(custom, keras.Layer):
        raise ModelError(
            f"model must be a keras.Model or a factory of one; got the layer {custom.name!r}. "
            "Write keras.Sequential([layer])."
        )
    if callable(custom):
        arguments = dict(config["custom_model_config"])
        context = get_factory_context(custom, dist_class.space, config)
        num_features = num_outputs
        if has_memory(config):
            num_features = int(
                config["attention_dim" if config["use_attention"] else "lstm_cell_size"]
            )

        def make_custom() -> keras.Model:
            kwargs = {**arguments, **context}
            return requirements.complete(
                call_factory(custom, observation_space, num_features, kwargs)
            )

        arguments_key = compute_fingerprint([arguments, context.get("model_config")])
        factory_key = ("factory", custom, arguments_key, num_outputs, *value_key)
        return ModelSource(factory_key, make_custom)
    raise ModelError(
        "custom_model must be a keras.Model or a factory f(observation_space, num_outputs, "
        f"**custom_model_config) that returns one; got {custom!r}."
    )


def make_q_model_source(
    observation_space: gym.Space, num_actions: int, settings: Settings
) -> ModelSource:
    """Returns the source of the catalog's Q-networks; see `build_q_model`.

    Args:
        observation_space: the environment's observation space.
        num_actions: the number of values, or distributions, to estimate.
        settings: has the complete `model` config, and the settings of `QHeads`.

    Raises:
        ModelError: if Keras's global dtype is not float32.
    """
    heads = QHeads.from_settings(settings)
    noise_size = get_q_noise_size(
        get_model_leaves(observation_space), num_actions, settings["model"], heads
    )
    source = _make_catalog_source(
        build_q_model, observation_space, num_actions, settings["model"], {"heads": heads}
    )
    return source._replace(noise_size=noise_size)


def _make_catalog_source(
    build: Factory,
    observation_space: gym.Space,
    num_outputs: int,
    config: Settings,
    options: Settings,
) -> ModelSource:
    require_float32()
    leaves = get_model_leaves(observation_space)
    shapes = tuple((get_encoded_shape(leaf), leaf.path) for leaf in leaves)
    settings = {k: v for k, v in config.items() if not k.startswith("custom_model")}
    key = ("catalog", build, shapes, num_outputs, compute_fingerprint([settings, options]))
    make = functools.partial(build, leaves, num_outputs, config, **options)
    return ModelSource(key, make, is_catalog=True)


def _check_model_memory(architecture: Architecture, ports: InputPorts, name: str) -> None:
    def build() -> keras.Model:
        model = architecture.build()
        call_with_zeros(model, ports)
        return model

    check_memory(build, f"The model {name!r}", allow_failure=True)


def _check_copied_views(instance: keras.Model, architecture: Architecture | None) -> None:
    requirements = get_view_requirements(instance)
    if (
        requirements
        and architecture is not None
        and get_view_requirements(architecture.build()) != requirements
    ):
        raise ModelError(
            f"The model {instance.name!r} has view_requirements that Keras leaves out of copies. "
            "Pass a factory that sets them, or set them in the constructor of the model's class."
        )


def _make_instance_source(
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
        for layer in get_all_layers(instance)
        if not type(layer).__module__.startswith("keras.")
    )
    key = (
        "architecture",
        compute_fingerprint(strip_names(architecture.config)),
        classes,
        *value_key,
    )
    return ModelSource(key, lambda: complete(architecture.build()), instance)


_verified_models: weakref.WeakSet[keras.Model] = weakref.WeakSet()
"""Custom models whose copies were checked to compute the same."""
