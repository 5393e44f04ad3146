"""Models that estimate the value of one action: an encoder of observation and action together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfpolicies.models.catalog.encoders import Encoder
from tfpolicies.models.catalog.initializers import Kernels
from tfpolicies.models.spaces import Leaf, port_names

ACTIONS = "actions"
"""The input of a critic that takes the actions."""


def build_critic(
    space_leaves: Sequence[Leaf], action_leaf: Leaf, settings: Mapping[str, Any]
) -> keras.Model:
    """Builds a model from encoded observations and actions to values `[B, 1]`.

    Its inputs are a dict: the observation's by name (`obs`, or `obs_<path>` of a nested space) and
    `actions`. The action is one more part of the observation: parts are encoded as in the catalog's
    other models (convolutions for images) and joined; `fcnet_hiddens`, `post_fcnet_hiddens` and a
    linear unit follow.

    Args:
        space_leaves: the leaves of the observation space, without an action mask.
        action_leaf: the action space, one Box of floats.
        settings: a complete `model` config.
    """
    leaves = [*space_leaves, action_leaf]
    names = [*port_names(space_leaves, "obs"), ACTIONS]
    kernels = Kernels(ortho_init=settings["ortho_init"], seed=0)
    encoder = Encoder(leaves, names, settings, kernels)
    inputs = encoder.inputs()
    hidden = encoder.fully_connected(encoder.joined(inputs), encoder.hidden_layers, "fc")
    return keras.Model(inputs, encoder.dense(hidden, 1, "q_out", "value"), name="critic")
