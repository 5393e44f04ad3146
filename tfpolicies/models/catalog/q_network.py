"""Models that estimate action values: Q-networks for all actions, and critics for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import keras

from tfpolicies.models.catalog.encoders import Encoder
from tfpolicies.models.catalog.initializers import KernelInitializers
from tfpolicies.models.catalog.layers import NoisyDense, Tensor, apply_dense
from tfpolicies.models.model_config import Settings
from tfpolicies.models.ports import NOISE
from tfpolicies.models.spaces import Leaves, port_names

ACTIONS = "actions"
"""The name of a critic's input for actions."""

_ACTIVATION = "relu"  # of the heads' hidden layers


class QHeads(NamedTuple):
    """The layers after the encoder of a Q-network; the settings of DQN have the same names."""

    hiddens: tuple[int, ...]  # units of the hidden layers of each head, which are ReLU layers
    dueling: bool  # whether there are two heads
    num_atoms: int  # of the distribution of each action's return; 1 for only the value
    noisy: bool  # whether the layers of the heads are noisy
    sigma0: float  # scales the initial noise

    @classmethod
    def from_settings(cls, settings: Settings) -> QHeads:
        return cls(**{name: settings[name] for name in cls._fields})

    def get_layer_sizes(self, num_actions: int) -> list[list[int]]:
        """Returns the units of all layers of each head: the values or advantages, then V."""
        outputs = [num_actions * self.num_atoms, self.num_atoms]
        return [[*self.hiddens, units] for units in outputs[: 1 + self.dueling]]


def get_q_noise_size(
    space_leaves: Leaves, num_actions: int, settings: Settings, heads: QHeads
) -> int:
    """Returns the number of noise values per row that the model of `build_q_model` takes.

    These are, for each noisy layer, one per input and one per output.
    """
    if not heads.noisy:
        return 0
    width = _make_encoder(space_leaves, settings)[0].num_features
    return sum(
        a + b for units in heads.get_layer_sizes(num_actions) for a, b in pairwise([width, *units])
    )


def build_q_model(
    space_leaves: Leaves, num_actions: int, settings: Settings, *, heads: QHeads
) -> keras.Model:
    """Builds a model from encoded observations to action values `[B, num_actions]`.

    The encoder is the catalog's (convolutions for images, `fcnet_hiddens`). After it come the dense
    layers `q_1`, ... and `q_out`; or, if duelling, `advantage_1`, ... `advantage_out` (A) and
    `value_1`, ... `value_out` (V), combined to Q = V + A - mean(A): Wang et al. 2016
    (arXiv:1511.06581), equation 9. With m atoms the outputs are their logits `[B, num_actions *
    m]`, those of one action next to each other, combined atom by atom. A noisy network also takes
    `noise` `[B, get_q_noise_size]`, whose columns go to the layers of the heads in the order of
    their names here.

    Args:
        space_leaves: the leaves of the observation space, without an action mask.
        num_actions: the number of actions.
        settings: the complete `model` config.
        heads: the layers after the encoder.
    """
    encoder, kernels = _make_encoder(space_leaves, settings)
    inputs = encoder.make_inputs()
    features = encoder.add_hidden_layers(encoder.encode(inputs), encoder.dense_layers, "fc")
    size = get_q_noise_size(space_leaves, num_actions, settings, heads)
    layer: Callable[..., Tensor] = functools.partial(apply_dense, kernels)
    if size:
        inputs[NOISE] = keras.Input((size,), name=NOISE, dtype="float32")
        layer = _NoisyLayerFactory(kernels, heads.sigma0, inputs[NOISE])
    names = [("advantage", "action"), ("value", "value")] if heads.dueling else [("q", "action")]
    outputs = [
        _add_head(layer, features, *prefix_and_role, units)
        for prefix_and_role, units in zip(names, heads.get_layer_sizes(num_actions), strict=True)
    ]
    values = (
        outputs[0] if len(outputs) == 1 else _combine_dueling(outputs[0], outputs[1], num_actions)
    )
    return encoder.make_model(inputs, values, "q_network")


def _make_encoder(space_leaves: Leaves, settings: Settings) -> tuple[Encoder, KernelInitializers]:
    kernels = KernelInitializers(ortho_init=settings["ortho_init"], seed=0)
    return Encoder(space_leaves, port_names(space_leaves, "obs"), settings, kernels), kernels


def _combine_dueling(advantage: Tensor, value: Tensor, num_actions: int) -> Any:
    """Returns V + A - mean(A), atom by atom."""
    width, atoms = advantage.shape[-1], value.shape[-1]
    if atoms > 1:
        advantage = keras.ops.reshape(advantage, (-1, num_actions, atoms))
        value = keras.ops.reshape(value, (-1, 1, atoms))
    q_values = value + (advantage - keras.ops.mean(advantage, axis=1, keepdims=True))
    return keras.ops.reshape(q_values, (-1, width)) if atoms > 1 else q_values


def _add_head(
    layer: Callable[..., Tensor], x: Tensor, prefix: str, role: str, widths: Sequence[int]
) -> Tensor:
    """Applies `<prefix>_1`, ... and the linear `<prefix>_out` to `x`."""
    for i, units in enumerate(widths[:-1], start=1):
        x = layer(x, units, f"{prefix}_{i}", "hidden", _ACTIVATION)
    return layer(x, widths[-1], f"{prefix}_out", role)


class _NoisyLayerFactory:
    """Applies noisy layers; each uses the next columns of the noise."""

    def __init__(self, kernels: KernelInitializers, sigma0: float, noise: Tensor) -> None:
        self._kernels, self._sigma0, self._noise = kernels, sigma0, noise
        self._num_used_columns = 0

    def __call__(
        self, x: Tensor, units: int, name: str, role: str, activation: str | None = None
    ) -> Tensor:
        start, self._num_used_columns = (
            self._num_used_columns,
            self._num_used_columns + x.shape[-1] + units,
        )
        kernel = self._kernels.dense(role)
        layer = NoisyDense(units, self._sigma0, activation, kernel, name=name)
        return layer([x, self._noise[:, start : self._num_used_columns]])


def build_critic(
    space_leaves: Leaves,
    action_leaves: Leaves,
    settings: Settings,
    *,
    num_values: int = 1,
    setting: str = "model",
) -> keras.Model:
    """Builds a model from encoded observations and actions to values `[B, num_values]`.

    Its inputs are the observation's by name (`obs`, or `obs_<path>` of a nested space) and, unless
    it computes the values of all actions, `actions`, which is handled as one more leaf of the
    observation. Leaves are encoded as in the catalog's other models (convolutions for images) and
    concatenated; `fcnet_hiddens`, `post_fcnet_hiddens` and linear units follow.

    Args:
        space_leaves: the leaves of the observation space, without an action mask.
        action_leaves: the action space, one Box of floats; empty for values of all actions.
        settings: a complete `model` config.
        num_values: the number of values per row.
        setting: the name of `settings` in errors.
    """
    leaves = [*space_leaves, *action_leaves]
    names = [*port_names(space_leaves, "obs"), *(ACTIONS for _ in action_leaves)]
    kernels = KernelInitializers(ortho_init=settings["ortho_init"], seed=0)
    encoder = Encoder(leaves, names, settings, kernels, setting)
    inputs = encoder.make_inputs()
    hidden = encoder.add_hidden_layers(encoder.encode(inputs), encoder.dense_layers, "fc")
    return encoder.make_model(
        inputs, apply_dense(kernels, hidden, num_values, "q_out", "value"), "critic"
    )
