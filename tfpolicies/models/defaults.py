"""The keys of the `model` config and their defaults."""

from __future__ import annotations

from typing import Any

MODEL_DEFAULTS: dict[str, Any] = {
    "fcnet_hiddens": [256, 256],  # units of each hidden layer
    "fcnet_activation": "tanh",  # any Keras activation name
    "vf_share_layers": True,  # whether the value reads the actor's last hidden layer
    "free_log_std": False,  # Gaussians: one trained log standard deviation for all rows
    "ortho_init": False,  # orthogonal kernels, gains sqrt(2), 0.01 and 1; else normalised columns
    "custom_model": None,  # a keras.Model, or a factory f(observation_space, num_outputs, **config)
    "custom_model_config": {},  # keyword arguments of the factory
    # what a Box of floats in the action space gets: None for "diag_gaussian", or
    # "squashed_gaussian", "deterministic", or a subclass of models.distributions.Distribution
    "custom_action_dist": None,
}
