"""Critics: one or more models of the same observation and action, as one network.

They compute the value of one action, a vector of floats, or of all actions of a Discrete space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.q_network import ACTIONS, build_critic
from tfpolicies.models.custom_model import call_factory, get_factory_context, require_float32
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.model_calls import ZERO_ROWS, call_model, get_all_layers, make_zero_inputs
from tfpolicies.models.model_config import Settings
from tfpolicies.models.model_source import ModelSource
from tfpolicies.models.ports import InputPorts, get_model_leaves
from tfpolicies.models.registry import resolve_custom_model


class Critics(keras.Model):
    """Parallel critics: encoded observations by name, and `actions`, to values `[B, c]`.

    Args:
        critics: c models, each of which computes `[B, 1]` or `[B]`.
        shape: the shape of the values of one row; `(n,)` for critics of all n actions, each of
            which computes `[B, n]`, together `[B, n, c]`.
    """

    def __init__(self, critics: Sequence[keras.Model], shape: tuple[int, ...] = ()) -> None:
        super().__init__(name="critics")
        self.critics = list(critics)
        self._shape = shape

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False) -> Any:
        values = [call_model(critic, inputs, training=training) for critic in self.critics]
        rows = (-1, *self._shape)
        return keras.ops.stack([keras.ops.reshape(x, rows) for x in values], axis=-1)


def make_critic_source(
    observation_space: gym.Space,
    dist_class: ActionDistribution,
    config: Settings,
    count: int,
    *,
    setting: str = "model",
) -> ModelSource:
    """Returns the source of `count` critics; callers add the missing settings to its key.

    `custom_model` is a factory `f(observation_space, num_outputs, **custom_model_config)`, or the
    name of a registered one, which is called for each critic and for each target critic. For a Box
    of floats its model takes a dict of the encoded observation by name and `actions`, and computes
    one value; for n Discrete actions it takes the observation, and computes n values. Without a
    `custom_model`, critics are built by the catalog.

    Args:
        observation_space: the environment's observation space.
        dist_class: the distribution over one Box of floats, or over a Discrete space.
        config: a complete `model` config.
        count: the number of critics.
        setting: the name of `config` in errors.
    """
    custom = resolve_custom_model(config["custom_model"])
    if isinstance(custom, keras.Layer):
        raise ModelError(
            f"The custom_model of critics must be a factory, or a registered name: there are "
            f"several critics, each with its weights; got the model {custom.name!r}. Write a "
            "function f(observation_space, num_outputs) that returns a new model."
        )
    num_values, actions = 1, dist_class.leaves
    if isinstance(dist_class.space, gym.spaces.Discrete):
        num_values, actions = int(dist_class.space.n), ()

    def make_critic() -> keras.Model:
        if custom is None:
            require_float32()
            obs_leaves = get_model_leaves(observation_space)
            return build_critic(obs_leaves, actions, config, num_values=num_values, setting=setting)
        kwargs = {
            **config["custom_model_config"],
            **get_factory_context(custom, dist_class.space, config),
        }
        return call_factory(custom, observation_space, num_values, kwargs)

    def make() -> Critics:
        critics = Critics([make_critic() for _ in range(count)], () if actions else (num_values,))
        inputs = make_zero_inputs(InputPorts(observation_space))
        for action in actions:
            inputs[ACTIONS] = np.zeros((ZERO_ROWS, *action.shape), np.float32)
        _build_critics(critics, inputs, num_values)
        return critics

    return ModelSource((custom,), make)


def _build_critics(critics: Critics, inputs: Mapping[str, np.ndarray], num_values: int) -> None:
    """Builds critics by calling them with inputs of zeros."""
    allowed = [(ZERO_ROWS, num_values), *([(ZERO_ROWS,)] if num_values == 1 else [])]
    for critic in critics.critics:
        try:
            shape = tuple(call_model(critic, inputs).shape)
        except Exception as error:
            shapes = ", ".join(f"{name} {list(x.shape[1:])}" for name, x in inputs.items())
            raise ModelError(
                f"The critic {critic.name!r} could not be called with a dict of rows of {shapes}, "
                f"float32: {error}"
            ) from error
        if shape not in allowed:
            expected = "one value per row, [B, 1] or [B]"
            if num_values > 1:
                expected = f"one value per action, [B, {num_values}]"
            raise ModelError(
                f"The critic {critic.name!r} must give {expected}; got the shape "
                f"[B, {', '.join(map(str, shape[1:]))}]."
            )
        if {str(layer.compute_dtype) for layer in get_all_layers(critic)} - {"float32"}:
            raise ModelError(
                f"The critic {critic.name!r} must compute in float32: build it under the dtype "
                "policy 'float32'."
            )
    call_model(critics, inputs)
