"""Models that estimate the value of one action, beside the observation, or of every action."""

from __future__ import annotations

import keras

from tfpolicies.models.catalog.encoders import Encoder
from tfpolicies.models.catalog.heads import dense
from tfpolicies.models.catalog.initializers import Kernels
from tfpolicies.models.settings import Settings
from tfpolicies.models.spaces import Leaves, port_names

ACTIONS = "actions"
"""The input of a critic that takes the actions."""


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
    it values all actions, `actions`. That is one more part of the observation: parts are encoded
    as in the catalog's other models (convolutions for images) and joined; `fcnet_hiddens`,
    `post_fcnet_hiddens` and linear units follow.

    Args:
        space_leaves: the leaves of the observation space, without an action mask.
        action_leaves: the action space, one Box of floats; none if all actions are valued.
        settings: a complete `model` config.
        num_values: how many actions are valued.
        setting: what holds `settings`, for errors to name.
    """
    leaves = [*space_leaves, *action_leaves]
    names = [*port_names(space_leaves, "obs"), *(ACTIONS for _ in action_leaves)]
    kernels = Kernels(ortho_init=settings["ortho_init"], seed=0)
    encoder = Encoder(leaves, names, settings, kernels, setting)
    inputs = encoder.inputs()
    hidden = encoder.fully_connected(encoder.joined(inputs), encoder.hidden_layers, "fc")
    return encoder.model(inputs, dense(kernels, hidden, num_values, "q_out", "value"), "critic")
