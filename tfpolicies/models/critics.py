"""Critics: one or more models of the same observation and action, as one network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import keras
import numpy as np

from tfpolicies.errors import ModelError
from tfpolicies.models.calling import ZERO_ROWS, all_layers, call_model, zeros
from tfpolicies.models.catalog import ACTIONS, build_critic
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.network import ModelSource, context_of, model_of, require_float32
from tfpolicies.models.ports import InputPorts, model_leaves
from tfpolicies.models.registry import model_given


class Critics(keras.Model):
    """Critics side by side: a dict of encoded observations and `actions` to values `[B, n]`.

    Args:
        critics: n models, each of which gives `[B, 1]` or `[B]`.
    """

    def __init__(self, critics: Sequence[keras.Model]) -> None:
        super().__init__(name="critics")
        self.critics = list(critics)

    def call(self, inputs: Any, training: bool = False) -> Any:
        values = [call_model(each, inputs, training=training) for each in self.critics]
        return keras.ops.concatenate([keras.ops.reshape(x, (-1, 1)) for x in values], axis=-1)


def critic_source(
    observation_space: gym.Space,
    dist_class: ActionDistribution,
    config: Mapping[str, Any],
    count: int,
) -> ModelSource:
    """Returns the source of `count` critics of a Box of floats; its key is what settings lack.

    `custom_model` is a factory `f(observation_space, 1, **custom_model_config)`, or the name of a
    registered one, which is called for each critic and for each of their targets; what it returns
    takes a dict of the encoded observation by name and `actions`. Without it critics are built by
    the catalog.

    Args:
        observation_space: as the environment has it.
        dist_class: of one Box of floats.
        config: a complete `model` config.
        count: n.

    Raises:
        ModelError: for a model instance; and when one is made, if it is not as said.
    """
    custom = model_given(config["custom_model"])
    if isinstance(custom, keras.Layer):
        raise ModelError(
            f"The custom_model of critics must be a factory, or a registered name: there are "
            f"several, with weights of their own; got the model {custom.name!r}. Write a function "
            "f(observation_space, num_outputs) that returns a new one."
        )
    (action,) = dist_class.leaves

    def one() -> keras.Model:
        if custom is None:
            require_float32()
            return build_critic(model_leaves(observation_space), action, config)
        told = {**config["custom_model_config"], **context_of(custom, dist_class.space, config)}
        return model_of(custom, observation_space, 1, told)

    def make() -> Critics:
        critics = Critics([one() for _ in range(count)])
        _build(critics, InputPorts(observation_space), action.shape)
        return critics

    return ModelSource((custom,), make)


def _build(critics: Critics, ports: InputPorts, action_shape: Sequence[int]) -> None:
    inputs = {**zeros(ports), ACTIONS: np.zeros((ZERO_ROWS, *action_shape), np.float32)}
    for each in critics.critics:
        try:
            shape = tuple(call_model(each, inputs).shape)
        except Exception as error:
            shapes = ", ".join(f"{name} {list(x.shape[1:])}" for name, x in inputs.items())
            raise ModelError(
                f"The critic {each.name!r} could not be called with a dict of rows of {shapes}, "
                f"float32: {error}"
            ) from error
        if shape not in ((ZERO_ROWS, 1), (ZERO_ROWS,)):
            raise ModelError(
                f"The critic {each.name!r} must give one value per row, [B, 1] or [B]; got the "
                f"shape [B, {', '.join(map(str, shape[1:]))}]."
            )
        if {str(layer.compute_dtype) for layer in all_layers(each)} - {"float32"}:
            raise ModelError(
                f"The critic {each.name!r} must compute in float32: build it under the dtype "
                "policy 'float32'."
            )
    critics(inputs)
