"""Attributes of `self` in traced code of a policy class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import gymnasium as gym
import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.program.networks import NetworkHandle
from tfpolicies.program.traced_arguments import TracedConfig, TracedModel


@dataclass(kw_only=True)
class TracedContext:
    """Everything that policies with the same Program share and traced code may read.

    Reading an attribute that was not set raises the same error as an attribute of a single policy.

    Attributes:
        config: hyperparameters as tensors, static settings as values.
        observation_space: as the environment has it.
        action_space: as the environment has it.
        dist_class: the action distribution.
        recorded: the arguments of `record`, by name.
        model: in a loss, and after acting.
        target_model: the target network of the network that acts.
        networks: the other networks, by name.
        target_networks: the target networks of the other networks, by name.
        learning_noise: float32 `[B, k]`, standard normal.
        update_noise: float32 `[k]`, standard normal.
        dist_inputs: after acting: float32 `[N, n]`.
        values: after acting: float32 `[N]`, or None.
    """

    config: TracedConfig
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    dist_class: ActionDistribution
    recorded: dict[str, tf.Tensor] = field(default_factory=dict)
    model: TracedModel | CalledModel = field(init=False)
    target_model: TracedModel = field(init=False)
    networks: dict[str, NetworkHandle] = field(init=False)
    target_networks: dict[str, NetworkHandle] = field(init=False)
    learning_noise: tf.Tensor = field(init=False)
    update_noise: tf.Tensor = field(init=False)
    dist_inputs: tf.Tensor = field(init=False)
    values: tf.Tensor | None = field(init=False)


class CalledModel:
    """The `self.model` of `extra_action_out_fn`: a model that has been called."""

    def __init__(self, owner: str, dist_inputs: tf.Tensor, values: tf.Tensor | None) -> None:
        self._owner, self._dist_inputs, self._values = owner, dist_inputs, values

    def last_output(self) -> tf.Tensor:
        return self._dist_inputs

    def value_function(self) -> tf.Tensor:
        if self._values is None:
            raise ConfigError(
                f"{self._owner} estimates no values, so self.values is None in "
                "extra_action_out_fn. Override `wants_value` to return True, or leave them out."
            )
        return self._values

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self.__getattr__("__call__")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"self.model has no {name!r} in {self._owner}.extra_action_out_fn, which runs after "
            "the model. Read self.dist_inputs and self.values, which are the model's last_output() "
            "and value_function()."
        )
