"""Attention for ported code: `GTrXLNet`, and states that consist only of the last outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.compat.preprocessors import make_flat_space
from tfpolicies.compat.tf_model import ForwardOutputs, RecurrentNetwork, StateTensors
from tfpolicies.models.catalog.gated_transformer import build_attention_core
from tfpolicies.models.catalog.initializers import KernelInitializers
from tfpolicies.models.catalog.inspection import get_state_shapes
from tfpolicies.models.catalog.layers import apply_action_outputs, apply_value_output
from tfpolicies.models.model_config import complete_model_config


class GTrXLNet(RecurrentNetwork):
    """The attention of `use_attention` applied to the observation, as a model or a part of one.

    `docs/howto/models.md` describes the computation. The state has one tensor per unit,
    `[S, memory_inference, attention_dim]`, and then the number of steps in it, `[S, 1]`.

    Args:
        observation_space: the space; it is flattened.
        action_space: stored.
        num_outputs: units of the output; None: the output is the last unit's, and there is no
            value.
        model_config: stored.
        name: a name.
        num_transformer_units: the setting `attention_num_transformer_units`; the other settings
            correspond in the same way.
        attention_dim: units of the residual stream.
        num_heads: heads of each attention.
        memory_inference: earlier steps that can be attended to.
        memory_training: must be the same, or omitted.
        head_dim: units of each head.
        position_wise_mlp_dim: hidden units after each attention.
        init_gru_gate_bias: initial value of the gates' biases.

    Raises:
        ModelSettingError: if a value is out of its range.
    """

    def __init__(
        self,
        observation_space: gym.Space,
        action_space: gym.Space,
        num_outputs: int | None,
        model_config: Mapping[str, Any],
        name: str,
        *,
        num_transformer_units: int = 1,
        attention_dim: int = 64,
        num_heads: int = 2,
        memory_inference: int = 50,
        memory_training: int = 50,
        head_dim: int = 32,
        position_wise_mlp_dim: int = 32,
        init_gru_gate_bias: float = 2.0,
    ) -> None:
        super().__init__(observation_space, action_space, num_outputs, model_config, name)
        units = {
            "num_transformer_units": num_transformer_units,
            "dim": attention_dim,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "memory_inference": memory_inference,
            "memory_training": memory_training,
            "position_wise_mlp_dim": position_wise_mlp_dim,
            "init_gru_gate_bias": init_gru_gate_bias,
        }
        settings = complete_model_config(
            {f"attention_{key}": value for key, value in units.items()}
        )
        self.trxl_model = _make_attention_model(
            make_flat_space(observation_space), num_outputs, settings
        )
        self.num_outputs = attention_dim if num_outputs is None else num_outputs
        self._values: Any = None

    def forward_rnn(
        self, inputs: tf.Tensor, state: StateTensors, seq_lens: tf.Tensor
    ) -> ForwardOutputs:
        states = {f"state_in_{i}": part for i, part in enumerate(state)}
        outputs = self.trxl_model({"obs": inputs, "seq_lens": seq_lens, **states})
        self._values = outputs.get("values")
        return outputs["outputs"], [outputs[f"state_out_{i}"] for i in range(len(state))]

    def get_initial_state(self) -> list[np.ndarray]:
        return [np.zeros(shape, np.float32) for shape in get_state_shapes(self.trxl_model)]

    def value_function(self) -> tf.Tensor:
        return tf.reshape(self._values, [-1])


def _make_attention_model(
    space: gym.spaces.Box, num_outputs: int | None, settings: Mapping[str, Any]
) -> keras.Model:
    """Returns a model of sequences; without `num_outputs` it returns features and no values."""
    kernels = KernelInitializers(ortho_init=False, seed=0)
    inputs = {
        "obs": keras.Input((None, *space.shape), name="obs"),
        "seq_lens": keras.Input((), name="seq_lens", dtype="int32"),
    }
    x, states_in, states_out = build_attention_core(
        inputs["obs"], inputs["seq_lens"], settings, kernels
    )
    outputs = {"outputs": x}
    if num_outputs is not None:
        outputs["outputs"] = apply_action_outputs(kernels, x, num_outputs, settings)
        outputs["values"] = apply_value_output(kernels, x)
    outputs |= {f"state_out_{i}": part for i, part in enumerate(states_out)}
    inputs |= {f"state_in_{i}": part for i, part in enumerate(states_in)}
    return keras.Model(inputs, outputs, name="trxl")


def add_step_count(
    policy: Any, states: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], Callable[..., Any]]:
    """Adds the missing step count to an attention state.

    Ported code keeps the last outputs of each unit, `[B, steps, dim]`, zeros before an episode, and
    expects the newest one, `[B, dim]`. Steps count from the first one that is not all zeros.

    Args:
        policy: the policy with the attention model.
        states: one array per unit.

    Returns:
        The complete state, and a function that converts the next state to the newest outputs.
    """
    *units, count = (port.shape for port in policy.program.ports.states)
    is_windows = count == (1,) and all(len(shape) == 2 for shape in units)
    windows = [np.asarray(part, np.float32) for part in states]
    if not (units and is_windows and [part.shape[1:] for part in windows] == units):
        raise LookupError("attention")
    is_filled = np.any([(part != 0).any(axis=2) for part in windows], axis=0)  # [B, steps]
    first_step = np.where(is_filled.any(axis=1), is_filled.argmax(axis=1), is_filled.shape[1])
    counts = (is_filled.shape[1] - first_step).astype(np.float32)[:, None]
    return [*windows, counts], lambda after: [part[:, -1] for part in after[:-1]]
