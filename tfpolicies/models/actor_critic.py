"""An actor and a critic as one model, and what a model of a policy gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfpolicies.models.calling import call_model
from tfpolicies.models.catalog.memory import RememberingModel
from tfpolicies.type_aliases import TensorStructure


@keras.saving.register_keras_serializable(package="tfpolicies")
class ActorCritic(keras.Model):
    """An actor model and a separate critic model, behind one call.

    Args:
        actor: gives the inputs of the action distribution, `[B, num_outputs]`.
        critic: gives values, `[B, 1]`.
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


def users_model(model: keras.Model) -> keras.Model:
    """Returns a user's own model: without the critic beside it, or the memory around it.

    It is the model itself where there is neither.
    """
    if isinstance(model, RememberingModel):
        return model.features
    return model.actor if isinstance(model, ActorCritic) else model


def call_actor(model: keras.Model, inputs: TensorStructure, *, training: bool = False) -> Any:
    """Calls a model like `call_model`; returns the inputs of the action distribution alone."""
    return get_dist_inputs(call_model(model, inputs, training=training))


def variables_of_actor(model: keras.Model) -> list[Any] | None:
    """Returns the variables that the inputs of the action distribution depend on.

    None where that is not known, or where there is nothing else.
    """
    actor = model.actor if isinstance(model, ActorCritic) else None
    outputs = getattr(model, "_outputs_struct", None)
    if outputs is not None and len(keras.tree.flatten(outputs)) > 1:
        actor = keras.Model(model.inputs, get_dist_inputs(outputs), name="actor")
    return None if actor is None else list(actor.variables)


def value_of(outputs: TensorStructure) -> Any:
    """Returns the value of what a model gave; None if it gives none."""
    if isinstance(outputs, Mapping):
        return outputs.get("vf_preds", outputs.get("value"))
    if isinstance(outputs, list | tuple) and len(outputs) == 2:
        return outputs[1]
    return None


def get_dist_inputs(outputs: TensorStructure) -> Any:
    """Returns the inputs of the action distribution of what a model gave; None if it gives none."""
    if isinstance(outputs, Mapping):
        return outputs.get("action_dist_inputs", outputs.get("logits"))
    return outputs[0] if isinstance(outputs, list | tuple) and outputs else outputs
