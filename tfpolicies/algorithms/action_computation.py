"""Actions of a policy for single observations, ready for the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.errors import UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.types import Structure


def compute_env_action(
    policy: Policy,
    observation: Structure | None,
    state: Sequence[np.ndarray] | None,
    *,
    input_dict: Mapping[str, Any] | None,
    full_fetch: bool,
    unsquash: bool | None,
    clip: bool | None,
    **inputs: Any,
) -> Any:
    """Returns the action for one observation; see `Algorithm.compute_single_action`.

    Args:
        policy: acts.
        observation: as the environment gives it; or
        input_dict: a dict with it as `obs`.
        state: the memory of a recurrent policy.
        full_fetch: whether to return `(action, state, extras)`.
        unsquash: map from [-1, 1] to the Box's bounds; None for the policy's setting.
        clip: clip to the Box's bounds; None for the policy's setting.
        inputs: further arguments of `Policy.compute_single_action`.

    Raises:
        UsageError: if both or neither of `observation` and `input_dict` are given.
    """
    if (observation is None) == (input_dict is None):
        raise UsageError("Give either observation or input_dict to compute_single_action.")
    if policy.agent_connectors:
        if input_dict is None:
            observation = policy.agent_connectors.seen(observation)
        else:
            input_dict = {**input_dict, "obs": policy.agent_connectors.seen(input_dict["obs"])}
    action, states, extras = policy.driver.acting.act_single(
        observation, state, unsquash=unsquash, clip=clip, input_dict=input_dict, **inputs
    )
    if policy.action_connectors:
        action = policy.action_connectors.done(action)
    return (action, states, extras) if full_fetch or states else action
