"""Dense layers with the catalog's fresh weights, and the outputs of its models."""

from __future__ import annotations

from typing import Any

import keras

from tfpolicies.models.catalog.initializers import Kernels
from tfpolicies.models.catalog.layers import FreeLogStd, Tensor
from tfpolicies.models.settings import Settings


def dense(
    kernels: Kernels, x: Tensor, units: int, name: str, role: str, activation: str | None = None
) -> Any:
    """Puts one dense layer behind `x`; its role decides about the fresh weights."""
    kernel = kernels.dense(role)
    layer = keras.layers.Dense(units, activation=activation, kernel_initializer=kernel, name=name)
    return layer(x)


def action_outputs(
    kernels: Kernels, x: Tensor, num_outputs: int, settings: Settings, final: str | None = None
) -> Any:
    """Puts the inputs of the action distribution behind `x`: linear, or activated by `final`.

    With `free_log_std` only their first half is computed from `x`.
    """
    free = settings["free_log_std"]
    units = num_outputs // 2 if free else num_outputs
    role = "action" if not settings["no_final_linear"] else "hidden"
    outputs = dense(kernels, x, units, "fc_out", role, final)
    return FreeLogStd(settings["log_std_init"], name="log_std")(outputs) if free else outputs


def value_output(kernels: Kernels, x: Tensor) -> Any:
    """Puts the value behind `x`."""
    return dense(kernels, x, 1, "value_out", "value")
