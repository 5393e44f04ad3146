"""Models that estimate the value of every action: an encoder, then one head or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfpolicies.models.catalog.encoders import Encoder
from tfpolicies.models.catalog.initializers import Kernels
from tfpolicies.models.spaces import Leaf, port_names

_ACTIVATION = "relu"  # of the heads' hidden layers


def build_q_model(
    space_leaves: Sequence[Leaf],
    num_actions: int,
    settings: Mapping[str, Any],
    *,
    hiddens: Sequence[int],
    dueling: bool,
) -> keras.Model:
    """Builds a model from encoded observations to action values `[B, num_actions]`.

    The encoder is the catalog's (convolutions for images, `fcnet_hiddens`). Behind it come the
    dense layers `q_1`, ... and `q_out`; or, if duelling, `advantage_1`, ... `advantage_out` (A) and
    `value_1`, ... `value_out` (V), joined to Q = V + A - mean(A): Wang et al. 2016
    (arXiv:1511.06581), equation 9.

    Args:
        space_leaves: the leaves of the observation space, without an action mask.
        num_actions: how many there are.
        settings: the complete `model` config.
        hiddens: units of the hidden layers of each head; they are rectified.
        dueling: whether there are two heads.
    """
    kernels = Kernels(ortho_init=settings["ortho_init"], seed=0)
    encoder = Encoder(space_leaves, port_names(space_leaves, "obs"), settings, kernels)
    inputs = encoder.inputs()
    features = encoder.fully_connected(encoder.joined(inputs), encoder.hidden_layers, "fc")
    layers = [(units, _ACTIVATION) for units in hiddens]

    def head(name: str, units: int, role: str) -> Any:
        hidden = encoder.fully_connected(features, layers, name)
        return encoder.dense(hidden, units, f"{name}_out", role)

    if dueling:
        advantage, value = head("advantage", num_actions, "action"), head("value", 1, "value")
        outputs = value + (advantage - keras.ops.mean(advantage, axis=-1, keepdims=True))
    else:
        outputs = head("q", num_actions, "action")
    return encoder.model(inputs, outputs, "q_network")
