"""Policies of one layer with known actions."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.factories import make
from tfpolicies import PPOTF2Policy


def make_linear(gain: float, policy_class: Any = PPOTF2Policy, **arguments: Any) -> Any:
    """Makes a policy whose normalised mean action is the first observed number, times a gain."""
    model = {"fcnet_hiddens": [], "free_log_std": True}
    policy = make(policy_class, model=model, **arguments)
    weights = {key: np.zeros_like(x) for key, x in policy.get_weights().items()}
    weights["layer_0/kernel"][0, 0] = gain
    policy.set_weights(weights)
    return policy
