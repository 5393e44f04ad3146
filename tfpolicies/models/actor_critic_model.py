"""A model that combines an actor and a critic, and access to the parts of a model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.models.catalog.recurrent_models import RememberingModel
from tfpolicies.models.model_calls import call_model


@keras.saving.register_keras_serializable(package="tfpolicies")
class ActorCritic(keras.Model):
    """An actor model and a separate critic model, called as one model.

    Args:
        actor: computes the inputs of the action distribution, `[B, num_outputs]`.
        critic: computes values, `[B, 1]`.
    """

    def __init__(self, actor: keras.Model, critic: keras.Model, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.actor = actor
        self.critic = critic
        self.built = actor.built and critic.built

    def call(self, inputs: TensorStructure, training: bool = False) -> tuple[Any, Any]:
        return (
            call_actor(self.actor, inputs, training=training),
            call_model(self.critic, inputs, training=training),
        )

    def get_config(self) -> dict[str, Any]:
        parts = {"actor": self.actor, "critic": self.critic}
        return {name: keras.saving.serialize_keras_object(part) for name, part in parts.items()}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, type] | None = None
    ) -> ActorCritic:
        parts = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects)
            for name in ("actor", "critic")
        }
        return cls(**parts)


def get_user_model(model: keras.Model) -> keras.Model:
    """Returns the user's model: without an added critic or an added memory."""
    if isinstance(model, RememberingModel):
        return model.features
    return model.actor if isinstance(model, ActorCritic) else model


def call_actor(model: keras.Model, inputs: TensorStructure, *, training: bool = False) -> Any:
    """Calls a model like `call_model`; returns only the inputs of the action distribution."""
    return get_dist_inputs(call_model(model, inputs, training=training))


def get_actor_variables(model: keras.Model) -> list[Any] | None:
    """Returns the variables that the inputs of the action distribution depend on.

    Returns None if they are unknown, or if the model computes nothing else.
    """
    actor = model.actor if isinstance(model, ActorCritic) else None
    outputs = getattr(model, "_outputs_struct", None)
    if outputs is not None and len(keras.tree.flatten(outputs)) > 1:
        actor = keras.Model(model.inputs, get_dist_inputs(outputs), name="actor")
    return None if actor is None else list(actor.variables)


def get_value(outputs: TensorStructure) -> Any:
    """Returns the value among a model's outputs; None if there is none."""
    if isinstance(outputs, Mapping):
        return outputs.get("vf_preds", outputs.get("value"))
    if isinstance(outputs, list | tuple) and len(outputs) == 2:
        return outputs[1]
    return None


def get_dist_inputs(outputs: TensorStructure) -> Any:
    """Returns the action-distribution inputs among a model's outputs; None if there are none."""
    if isinstance(outputs, Mapping):
        return outputs.get("action_dist_inputs", outputs.get("logits"))
    return outputs[0] if isinstance(outputs, list | tuple) and outputs else outputs
