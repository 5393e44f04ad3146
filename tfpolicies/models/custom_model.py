"""Custom models: calls of their factories, and checks of the models that act for a policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.base.warn_once import warn_once
from tfpolicies.errors import ModelError
from tfpolicies.models.actor_critic_model import (
    ActorCritic,
    call_actor,
    get_dist_inputs,
    get_user_model,
    get_value,
)
from tfpolicies.models.catalog.build import build_model
from tfpolicies.models.catalog.inspection import get_state_shapes
from tfpolicies.models.catalog.recurrent_models import build_with_memory
from tfpolicies.models.distributions import (
    ActionDistribution,
    Categorical,
    SquashedDeterministic,
    SquashedGaussian,
)
from tfpolicies.models.model_calls import (
    ZERO_ROWS,
    call_with_zeros,
    get_all_layers,
    make_zero_inputs,
)
from tfpolicies.models.model_config import Settings, has_memory
from tfpolicies.models.ports import InputPorts, get_model_leaves
from tfpolicies.models.preprocessing import is_image
from tfpolicies.models.tanh_detection import ends_in_tanh, warn_about_tanh
from tfpolicies.models.view_requirements import get_view_inputs

Factory: TypeAlias = Callable[..., keras.Model]


def require_float32() -> None:
    """Checks that layers without an explicit dtype, such as the catalog's, compute in float32."""
    dtype_policy = keras.config.dtype_policy()
    if dtype_policy.compute_dtype != "float32":
        raise ModelError(
            f"Policies are float32 only, but Keras's global dtype policy is {dtype_policy.name!r}. "
            "Call keras.config.set_dtype_policy('float32')."
        )


def get_factory_context(
    factory: Factory, action_space: gym.Space, config: Settings
) -> dict[str, Any]:
    """Returns the optional keyword arguments that a factory's signature names."""
    available = {"action_space": action_space, "model_config": {**config, "custom_model": None}}
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable without an introspectable signature
        return {}
    return {name: value for name, value in available.items() if name in parameters}


def call_factory(
    factory: Factory, space: gym.Space, num_outputs: int, arguments: Settings
) -> keras.Model:
    """Calls a factory of models with a space, the number of outputs and its arguments."""
    signature = _get_signature(factory)
    if signature is not None and not arguments and not signature.parameters:
        model = factory()
    else:
        if signature is not None:
            _require_call(factory, signature, space, num_outputs, arguments)
        model = factory(space, num_outputs, **arguments)
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"The factory custom_model={factory!r} must return a keras.Model, but returned "
            f"{type(model).__name__}."
        )
    return model


def _get_signature(factory: Factory) -> inspect.Signature | None:
    """Returns a factory's signature, without `self`; None if Python has none."""
    is_model_class = isinstance(factory, type) and issubclass(factory, keras.Model)
    try:
        signature = inspect.signature(factory.__init__ if is_model_class else factory)
    except (TypeError, ValueError):
        return None
    return signature.replace(parameters=list(signature.parameters.values())[is_model_class:])


def _require_call(
    factory: Factory,
    signature: inspect.Signature,
    space: gym.Space,
    num_outputs: int,
    arguments: Settings,
) -> None:
    try:
        signature.bind(space, num_outputs, **arguments)
    except TypeError as error:
        name = getattr(factory, "__name__", repr(factory))
        subject = "The model class" if isinstance(factory, type) else "The factory of models"
        raise ModelError(
            f"{subject} {name}{signature} is called with (observation_space, num_outputs, "
            f"**custom_model_config), but {error}. Pass a model instance, or a function that "
            f"builds the model: lambda observation_space, num_outputs: {name}(...)."
        ) from error


def get_input_ports(
    model: keras.Model, observation_space: gym.Space, dist_class: ActionDistribution
) -> InputPorts:
    """Returns the inputs of a policy with this model, which determines memory and views."""
    ports = InputPorts(
        observation_space,
        get_view_inputs(model, observation_space, dist_class.space),
        tuple(tuple(shape) for shape in get_state_shapes(model)),
    )
    names = [port.name for port in ports.all]
    duplicates = [port.name for port in ports.view_ports if names.count(port.name) > 1]
    if duplicates:
        raise ModelError(
            f"The model {model.name!r} has a view {duplicates[0]!r}, but a part of the observation "
            "has that name. Give the view another name."
        )
    return ports


_SQUASHED_DISTRIBUTIONS = (SquashedGaussian, SquashedDeterministic)


class ModelRequirements(NamedTuple):
    """The policy that a custom model must act for."""

    observation_space: gym.Space
    dist_class: ActionDistribution
    config: Settings
    with_value: bool  # whether values are also needed

    def complete(self, model: keras.Model) -> keras.Model:
        """Builds and checks a custom model, and adds a critic if values are needed and missing."""
        if has_memory(self.config):
            model = self._wrap_with_memory(model)
        ports = get_input_ports(model, self.observation_space, self.dist_class)
        outputs = call_with_zeros(model, ports)
        check_outputs(model, outputs, self.dist_class.num_outputs, ports)
        if self.with_value and get_value(outputs) is None:
            if ports.memory or ports.views:
                raise ModelError(
                    f"The model {model.name!r} has a memory or reads previous steps, so it must "
                    "also estimate the values: let it return them as 'vf_preds', of shape "
                    f"{'[B, T, 1]' if ports.memory else '[B, 1]'}."
                )
            require_float32()
            model = ActorCritic(
                model, _build_critic(model.name, self.observation_space, self.config)
            )
        if any(is_image(leaf.space) for leaf in ports.obs_leaves):
            _warn_about_rescaling(model)
        if Categorical in self.dist_class.leaf_classes and _are_probabilities(
            get_dist_inputs(outputs)
        ):
            _warn_about_probabilities(model)
        squashes = any(
            issubclass(leaf_class, _SQUASHED_DISTRIBUTIONS)
            for leaf_class in self.dist_class.leaf_classes
        )
        if squashes and ends_in_tanh(get_user_model(model)):
            warn_about_tanh(model.name.rstrip("0123456789_"))
        return model

    def _wrap_with_memory(self, model: keras.Model) -> keras.Model:
        """Builds a custom model and the memory that the settings ask for around it."""
        require_float32()
        ports = get_input_ports(model, self.observation_space, self.dist_class)
        if ports.memory:
            raise ModelError(
                f"The model {model.name!r} already has a memory. Leave use_lstm, use_gru and "
                "use_attention False; or pass a model without inputs state_in_0, ..."
            )
        zero_inputs = make_zero_inputs(ports)
        features = get_dist_inputs(call_with_zeros(model, ports))
        shape: tuple[int, ...] = tuple(getattr(features, "shape", ()))
        if len(shape) != 2 or shape[0] != ZERO_ROWS:
            raise ModelError(
                f"The model {model.name!r} must return features of shape [B, n] for the memory "
                "around it, as its only output, the first of a pair, or 'action_dist_inputs' of a "
                f"dict; got {shape} for {ZERO_ROWS} rows. Flatten them."
            )
        return build_with_memory(
            model,
            functools.partial(call_actor, model),
            {name: array.shape[1:] for name, array in zero_inputs.items()},
            self.dist_class.num_outputs,
            self.config,
            with_value=self.with_value,
            action_leaves=self.dist_class.leaves,
        )


def _are_probabilities(dist_inputs: tf.Tensor) -> bool:
    """Returns whether rows sum to 1, as after a softmax; False in graph mode."""
    if not tf.executing_eagerly() or dist_inputs.shape[-1] < 2:
        return False
    rows = np.asarray(dist_inputs)
    return bool((rows >= 0).all() and np.allclose(rows.sum(axis=-1), 1.0, atol=1e-5))


def _build_critic(name: str, observation_space: gym.Space, config: Settings) -> keras.Model:
    settings = {**config, "free_log_std": False, "custom_model": None}
    try:
        critic = build_model(
            get_model_leaves(observation_space), 1, settings, with_value=False, seed=0
        )
    except ModelError as error:
        raise ModelError(
            f"The model {name!r} returns no value, so a separate critic is built, but {error} Or "
            "let the model return the value as a second output of shape [B, 1]."
        ) from error
    critic.name = "critic"
    return critic


def _warn_about_rescaling(model: keras.Model) -> None:
    for layer in get_all_layers(model):
        if isinstance(layer, keras.layers.Rescaling) and np.max(layer.scale) < 0.1:
            warn_once(
                "The layer %r multiplies by %.2g, but images of uint8 are already divided by 255 "
                "before they reach the model, so its inputs would be nearly 0. Remove the layer.",
                layer.name.rstrip("0123456789_"),
                np.max(layer.scale),
            )


def _warn_about_probabilities(model: keras.Model) -> None:
    warn_once(
        "The model %r returns probabilities, as if its last layer were a softmax. Its outputs are "
        "used as logits, so the policy can hardly prefer an action. Remove the softmax: "
        "Dense(n) without an activation.",
        model.name.rstrip("0123456789_"),
    )


def check_outputs(
    model: keras.Model, outputs: TensorStructure, num_outputs: int, ports: InputPorts
) -> None:
    rows = (ZERO_ROWS, ZERO_ROWS) if ports.is_recurrent else (ZERO_ROWS,)
    axes = "B, T" if ports.is_recurrent else "B"
    dist_inputs, values = get_dist_inputs(outputs), get_value(outputs)

    def format_shape(x: tf.Tensor | None) -> str:
        shape = getattr(x, "shape", None)
        if shape is None:
            return "no such output"
        return f"[{', '.join([axes, *map(str, tuple(shape)[len(rows) :])])}]"

    if tuple(getattr(dist_inputs, "shape", ())) != (*rows, num_outputs):
        remedy = f"Give its last layer {num_outputs} units."
        if dist_inputs is None:
            remedy = f"Rename a key: it returns {sorted(outputs)}."
        raise ModelError(
            f"The model {model.name!r} must return action-distribution inputs of shape "
            f"[{axes}, {num_outputs}] (its only output, the first of a pair, or the key "
            f"'action_dist_inputs' or 'logits' of a dict); got {format_shape(dist_inputs)}. "
            f"{remedy}"
        )
    if values is not None and tuple(values.shape) not in ((*rows, 1), rows):
        raise ModelError(
            f"The second output of the model {model.name!r} is the value and must have the shape "
            f"[{axes}, 1] or [{axes}]; got {format_shape(values)}."
        )
    for i, port in enumerate(ports.states):
        new_state = outputs.get(f"state_out_{i}") if isinstance(outputs, Mapping) else None
        if tuple(getattr(new_state, "shape", ())) != (ZERO_ROWS, *port.shape):
            shape = "no such output" if new_state is None else f"{tuple(new_state.shape[1:])}"
            raise ModelError(
                f"The model {model.name!r} takes {port.name!r} of shape {port.shape} per sequence, "
                f"so it must return a dict with 'state_out_{i}' of the same shape; got {shape}."
            )
    policies = {str(layer.compute_dtype) for layer in get_all_layers(model)}
    if policies - {"float32"}:
        raise ModelError(
            f"The model {model.name!r} computes in {sorted(policies)}; policies are float32 only. "
            "Build it under the dtype policy 'float32'."
        )
