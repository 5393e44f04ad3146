"""Attention over the last N steps: gated transformer units whose memory is a state.

The unit is GTrXL's (Parisotto et al. 2019, arXiv:1910.06764, section 3.2): layer normalisation
before each part, GRU-type gates instead of residual sums, and a memory of the unit's last inputs
through which no gradient flows. One thing is simpler: positions enter as a learned bias per
head and distance (Raffel et al. 2020, arXiv:1910.10683, section 2.1; here without buckets) instead
of Transformer-XL's sinusoids. The bias is relative as well, so a step counts the same wherever a
sequence is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfpolicies.models.catalog.initializers import KernelInitializers
from tfpolicies.models.catalog.inspection import STATE_IN
from tfpolicies.models.catalog.layers import RecurrentCore, Tensor, fold_time, unfold_time
from tfpolicies.models.model_config import Settings


def build_attention_core(
    x: Tensor, seq_lens: Tensor, settings: Settings, kernels: KernelInitializers
) -> RecurrentCore:
    """Applies `attention_num_transformer_units` gated transformer units to `x`.

    A step attends to itself and the N = `attention_memory_inference` steps before it. The states
    are the last N inputs of each unit, `[B, N, attention_dim]`, the newest last, and the number of
    remembered steps, `[B, 1]`.

    Args:
        x: sequences `[B, T, F]`.
        seq_lens: true lengths, `[B]` int32.
        settings: the complete model config.
        kernels: the kernel initializers.

    Returns:
        The outputs `[B, T, attention_dim]`, the state inputs, and the states after the sequences.
    """
    dim, steps = int(settings["attention_dim"]), int(settings["attention_memory_inference"])
    num_units = int(settings["attention_num_transformer_units"])
    shapes = [(steps, dim)] * num_units + [(1,)]
    states = [
        keras.Input(shape, name=f"{STATE_IN}{i}", dtype="float32") for i, shape in enumerate(shapes)
    ]
    x = keras.layers.Dense(dim, kernel_initializer=kernels.glorot(), name="embedding")(x)
    visible, new_num_remembered = Window(steps, name="window")([x, seq_lens, states[-1]])
    new_states = []
    for i, memory in enumerate(states[:-1], start=1):
        unit = GatedTransformerUnit(
            heads=int(settings["attention_num_heads"]),
            head_dim=int(settings["attention_head_dim"]),
            mlp_dim=int(settings["attention_position_wise_mlp_dim"]),
            gate_bias=float(settings["attention_init_gru_gate_bias"]),
            seed=kernels.next_seed(),
            name=f"transformer_{i}",
        )
        new_states.append(LastSteps(name=f"memory_{i}")([memory, x, seq_lens]))
        x = unit([memory, x, visible])
    return x, states, [*new_states, new_num_remembered]


def _compute_distances(steps: int, time: Tensor) -> Any:
    """Returns the steps from each remembered or current step to each current one: [T, N + T]."""
    now = steps + ops.arange(time, dtype="int32")
    return now[:, None] - ops.arange(steps + time, dtype="int32")[None, :]


@keras.saving.register_keras_serializable(package="tfpolicies")
class Window(keras.layers.Layer):
    """Computes the remembered and current steps that each current step attends to.

    Args:
        steps: the number N of remembered steps.
    """

    def __init__(self, steps: int, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.steps = steps

    def call(self, inputs: Sequence[Tensor]) -> Any:
        """Returns the attention mask, bool `[B, T, N + T]`, and the new number of remembered steps.

        Takes sequences `[B, T, F]`, their lengths `[B]` and the number of remembered steps
        `[B, 1]`.
        """
        x, seq_lens, num_remembered = inputs
        distances = _compute_distances(self.steps, ops.shape(x)[1])[None]
        slots = ops.arange(self.steps + ops.shape(x)[1], dtype="int32")
        empty = self.steps - ops.cast(num_remembered, "int32")[:, :, None]
        visible = (distances >= 0) & (distances <= self.steps) & (slots[None, None] >= empty)
        lengths = ops.cast(seq_lens, "float32")[:, None]
        return visible, ops.minimum(num_remembered + lengths, float(self.steps))


@keras.saving.register_keras_serializable(package="tfpolicies")
class LastSteps(keras.layers.Layer):
    """Updates a memory: returns the last N steps of memory `[B, N, F]` and sequence `[B, T, F]`.

    Padding after the end of a sequence does not count.
    """

    def call(self, inputs: Sequence[Tensor]) -> Any:
        memory, x, seq_lens = inputs
        all_steps = ops.concatenate([memory, x], axis=1)
        steps = ops.arange(memory.shape[1], dtype="int32")
        indices = ops.cast(seq_lens, "int32")[:, None] + steps[None, :]
        return tf.gather(all_steps, indices, batch_dims=1)


@keras.saving.register_keras_serializable(package="tfpolicies")
class GatedTransformerUnit(keras.layers.Layer):
    """One unit of GTrXL: attention, then two dense layers for each step, each followed by a gate.

    With E the inputs, M the memory and LN the layer normalisation (arXiv:1910.06764, section 3.2):
    Y = gate(E, relu(attention(LN([stop_gradient(M), E])))), outputs gate(Y, relu(mlp(LN(Y)))).

    Args:
        heads: number of attention heads.
        head_dim: units of each head.
        mlp_dim: hidden units of the two dense layers.
        gate_bias: the initial bias of the gates.
        seed: seeds the initial weights.
    """

    def __init__(
        self, heads: int, head_dim: int, mlp_dim: int, gate_bias: float, seed: int, **kwargs: object
    ) -> None:
        super().__init__(**kwargs)
        self.heads = heads
        self.head_dim = head_dim
        self.mlp_dim = mlp_dim
        self.gate_bias = gate_bias
        self.seed = seed
        self.distance_bias_initializer = keras.initializers.Zeros()

    def build(self, input_shape: Sequence[Sequence[int]]) -> None:
        (_, steps, _), (*_, dim), _ = input_shape
        kernels = KernelInitializers(ortho_init=False, seed=self.seed)

        def build_layer(layer: keras.layers.Layer, width: int) -> keras.layers.Layer:
            layer.build((None, None, width))
            return layer

        def dense(width: int, units: int, name: str, *, bias: bool = True) -> keras.layers.Dense:
            kernel = kernels.glorot()
            return build_layer(
                keras.layers.Dense(units, use_bias=bias, kernel_initializer=kernel, name=name),
                width,
            )

        def norm(name: str) -> keras.layers.Layer:
            return build_layer(keras.layers.LayerNormalization(epsilon=1e-5, name=name), dim)

        def gate(name: str) -> keras.layers.Layer:
            return build_layer(GruGate(self.gate_bias, kernels.next_seed(), name=name), dim)

        inner = self.heads * self.head_dim
        self.norm_1, self.norm_2 = norm("norm_1"), norm("norm_2")
        self.query = dense(dim, inner, "query", bias=False)
        self.keys = dense(dim, inner, "key", bias=False)
        self.values = dense(dim, inner, "value", bias=False)
        self.project = dense(inner, dim, "project")
        self.expand = dense(dim, self.mlp_dim, "expand")
        self.contract = dense(self.mlp_dim, dim, "contract")
        self.gate_1, self.gate_2 = gate("gate_1"), gate("gate_2")
        self.distance_bias = self.add_weight(
            name="distance_bias",
            shape=(self.heads, steps + 1),
            initializer=self.distance_bias_initializer,
        )

    def call(self, inputs: Sequence[Tensor]) -> Any:
        # Dense layers get rows: with three axes each of them would reshape twice.
        memory, x, visible = inputs
        all_steps = self.norm_1(ops.concatenate([ops.stop_gradient(memory), x], axis=1))
        rows = fold_time(x)
        attention_outputs = self._attend(all_steps, memory.shape[1], visible)
        y = self.gate_1([rows, ops.relu(self.project(fold_time(attention_outputs)))])
        hidden = ops.relu(self.expand(self.norm_2(y)))
        return unfold_time(self.gate_2([y, ops.relu(self.contract(hidden))]), x)

    def _attend(self, steps: Tensor, memory_size: int, visible: Tensor) -> Any:
        """Lets the current ones of all steps `[B, N + T, F]` attend to the visible steps."""
        query = self._project_to_heads(self.query, steps[:, memory_size:])
        keys, values = (
            self._project_to_heads(self.keys, steps),
            self._project_to_heads(self.values, steps),
        )
        scores = ops.matmul(query, ops.transpose(keys, (0, 1, 3, 2))) / math.sqrt(self.head_dim)
        distances = ops.clip(_compute_distances(memory_size, ops.shape(visible)[1]), 0, memory_size)
        scores += ops.take(self.distance_bias, distances, axis=1)  # [heads, T, N + T]
        scores = ops.where(visible[:, None], scores, tf.float32.min)
        outputs = ops.matmul(ops.softmax(scores, axis=-1), values)  # [B, heads, T, head_dim]
        return ops.concatenate(ops.unstack(outputs, self.heads, axis=1), axis=-1)

    def _project_to_heads(self, layer: keras.layers.Layer, steps: Tensor) -> Any:
        """Projects `[B, S, F]` to `[B, heads, S, head_dim]`."""
        projected = unfold_time(layer(fold_time(steps)), steps)
        return ops.stack(ops.split(projected, self.heads, axis=-1), axis=1)


@keras.saving.register_keras_serializable(package="tfpolicies")
class GruGate(keras.layers.Layer):
    """A gate of GRU type in place of the sum x + y (arXiv:1910.06764, section 3.2).

    r = sigmoid(W_r y + U_r x), z = sigmoid(W_z y + U_z x - bias), h = tanh(W_h y + U_h (r x));
    outputs (1 - z) x + z h.

    Args:
        start: the initial bias: the larger, the more of x passes.
        seed: seeds the initial weights.
    """

    def __init__(self, start: float, seed: int, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.start = start
        self.seed = seed
        kernels = KernelInitializers(ortho_init=False, seed=seed)
        self.new_kernel_initializer = kernels.glorot()
        self.gate_kernel_initializer = kernels.glorot()
        self.kernel_initializer = kernels.glorot()
        self.bias_initializer = keras.initializers.Constant(start)

    def build(self, input_shape: Sequence[int]) -> None:
        dim = input_shape[-1]
        shapes: dict[str, tuple[int, ...]] = {
            "new_kernel": (dim, 3 * dim),
            "gate_kernel": (dim, 2 * dim),
            "kernel": (dim, dim),
            "bias": (dim,),
        }
        self.new_kernel, self.gate_kernel, self.kernel, self.bias = (
            self.add_weight(
                name=name, shape=shape, initializer=getattr(self, f"{name}_initializer")
            )
            for name, shape in shapes.items()
        )

    def call(self, inputs: Sequence[Tensor]) -> Any:
        x, y = inputs
        reset_y, update_y, candidate_y = ops.split(ops.matmul(y, self.new_kernel), 3, axis=-1)
        reset_x, update_x = ops.split(ops.matmul(x, self.gate_kernel), 2, axis=-1)
        reset = ops.sigmoid(reset_y + reset_x)
        update = ops.sigmoid(update_y + update_x - self.bias)
        candidate = ops.tanh(candidate_y + ops.matmul(reset * x, self.kernel))
        return (1.0 - update) * x + update * candidate
