"""Detects models that end in tanh, whose outputs a policy would squash by tanh once more."""

from __future__ import annotations

import keras

from tfpolicies.base.warn_once import warn_once

_PASS_THROUGH_OPERATIONS = (
    "Rescaling",
    "Multiply",
    "Reshape",
    "Identity",
    "Flatten",
    "Lambda",
    "Concatenate",
)
"""Keras operations that may follow an activation, traced back through their first input."""


def ends_in_tanh(model: keras.Model) -> bool:
    """Returns whether the first output of a functional or sequential model is that of a tanh.

    >>> import keras
    >>> units = keras.layers.Dense(2, "tanh"), keras.layers.Dense(2)
    >>> inputs = keras.Input((3,))
    >>> [ends_in_tanh(keras.Model(inputs, 2.0 * unit(inputs))) for unit in units]
    [True, False]
    """
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    tensor = outputs[0] if outputs else None
    while (history := getattr(tensor, "_keras_history", None)) is not None:
        operation = history.operation
        class_name = type(operation).__name__
        activation = getattr(operation, "activation", None)
        if class_name == "Tanh" or getattr(activation, "__name__", "") == "tanh":
            return True
        if class_name not in _PASS_THROUGH_OPERATIONS:
            break
        inputs = operation._inbound_nodes[history.node_index].input_tensors
        tensor = inputs[0] if inputs else None
    return False


def warn_about_tanh(name: str) -> None:
    """Warns once per name of a model that its actions cannot reach the bounds."""
    warn_once(
        "The model %r ends in tanh, but the policy squashes its outputs to the bounds of the "
        "actions by tanh as well, so actions reach 76 %% of the bounds at most. Remove that "
        "activation and the scaling after it: Dense(n).",
        name,
    )
