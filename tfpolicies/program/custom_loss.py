"""Losses and metrics that a model adds.

A Keras model may have a method `custom_loss(policy_loss, loss_inputs)`, called after the loss of
the policy class in the same traced function, and a method `custom_metrics()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.actor_critic_model import get_user_model
from tfpolicies.models.network import Network
from tfpolicies.program.traced_arguments import LOSS_MASK, TrainBatch

METRIC_PREFIX = "model/"
"""The prefix of a model's metrics, whose names may be those of the policy class's statistics."""

_OBSERVATIONS = ("obs", "new_obs")


class LossInputs(TrainBatch):
    """A train batch for a model: observations are encoded and normalised, as the model gets them.

    They are one tensor of rows `[N, ...]`, or a dict by input name for a model with several inputs.
    """

    def __init__(self, columns: Mapping[str, Any], network: Network) -> None:
        super().__init__(columns)
        self._network = network

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key not in _OBSERVATIONS:
            return value
        encoded = self._network.encode_obs(value)
        return encoded if len(encoded) > 1 else next(iter(encoded.values()))


def add_custom_loss(
    network: Network, loss: tf.Tensor | Sequence[tf.Tensor], batch: TrainBatch
) -> Any:
    """Returns a loss, or a list of them, changed by `custom_loss` of the network's model.

    Columns that the model reads count as read by the loss, except for the mask: if the model does
    not weigh rows by it, `batch.ignores_mask` is set.

    Raises:
        ConfigError: if a loss is a function, so that its value is not known yet.
        ModelError: if the model returns anything but losses, or creates variables.
    """
    model = get_user_model(network.model)
    custom_loss = getattr(model, "custom_loss", None)
    if custom_loss is None:
        return loss
    losses = list(loss) if isinstance(loss, list | tuple) else [loss]
    if any(map(callable, losses)):
        raise ConfigError(
            f"custom_loss of {model.name} needs all losses of its policy, but some of them are "
            "functions, which are called after the optimizers of the others. Return tensors from "
            "`loss` (SAC, TD3 and DDPG do with update_order='together'), or add the loss of the "
            "model by `add_loss` in one of its layers."
        )
    inputs = LossInputs(batch, network)
    with tf.variable_creator_scope(_refuse_variables):
        result = custom_loss(losses, inputs)
    if result is losses:
        return loss
    batch.accessed_keys |= inputs.accessed_keys - {LOSS_MASK}
    batch.ignores_mask = LOSS_MASK not in inputs.accessed_keys
    scalars = _to_scalars(result, len(losses), model)
    return scalars if isinstance(loss, list | tuple) else scalars[0]


def compute_custom_metrics(network: Network) -> dict[str, tf.Tensor]:
    """Returns the metrics of the network's model, float32 scalars, under prefixed names."""
    model = get_user_model(network.model)
    custom_metrics = getattr(model, "custom_metrics", None)
    if custom_metrics is None:
        return {}
    metrics = {}
    for name, value in custom_metrics().items():
        tensor = tf.cast(tf.convert_to_tensor(value), tf.float32)
        if tensor.shape.num_elements() not in (1, None):
            raise ModelError(
                f"The metric {name!r} of {model.name} must be one number, got the shape "
                f"{tensor.shape}. Return its mean, `tf.reduce_mean(...)`."
            )
        metrics[METRIC_PREFIX + name] = tf.reshape(tensor, [])
    return metrics


def _to_scalars(
    result: tf.Tensor | Sequence[tf.Tensor], count: int, model: keras.Model
) -> list[tf.Tensor]:
    values: Sequence[Any] = result if isinstance(result, list | tuple) else [result]
    tensors = [tf.convert_to_tensor(x) for x in values]
    if len(tensors) != count or any(x.shape.num_elements() not in (1, None) for x in tensors):
        raise ModelError(
            f"custom_loss of {model.name} must return as many scalars as policy_loss has: "
            f"{count}. It returned the shapes {[str(x.shape) for x in tensors]}. "
            "Return `[loss + extra for loss in policy_loss]`, where extra is a mean over rows."
        )
    return [tf.reshape(x, []) for x in tensors]


def _refuse_variables(next_creator: Callable[..., tf.Variable], **kwargs: object) -> Any:
    raise ModelError(
        f"custom_loss of the model creates a variable ({kwargs.get('name')!r}), which would not "
        "belong to any policy. Create its layers in the model's constructor, as functional models "
        "or with `layer.build(shape)`."
    )
