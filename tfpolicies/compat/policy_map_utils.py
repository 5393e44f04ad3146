"""What stood in `policy_map`'s and `policy`'s utilities: policies made one by one, ids checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.policy_spec import validate_policy_id
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.policy_map import PolicyMap

__all__ = ["create_policy_for_framework", "validate_policy_id"]


def create_policy_for_framework(
    policy_id: str,
    policy_class: type[Policy],
    merged_config: AlgorithmConfig | Mapping[str, Any],
    observation_space: gym.Space,
    action_space: gym.Space,
    worker_index: int = 0,
    session_creator: Callable[[], Any] | None = None,
    seed: int | None = None,
) -> Policy:
    """Returns a new policy; a `PolicyMap` makes it, and does not keep it.

    Args:
        policy_id: its id, from which, with the seed, its weights and noise derive.
        policy_class: its class.
        merged_config: its settings; missing ones get the class's defaults.
        observation_space: as the environment has it.
        action_space: likewise.
        worker_index: enters the seed of the noise.
        session_creator: makes the session of a graph-mode policy.
        seed: used where the config has none.

    Raises:
        ConfigError: for an invalid id, a class that is no `Policy`, or wrong settings.
    """
    config = merged_config
    if isinstance(config, AlgorithmConfig) and hasattr(policy_class, "config_class"):
        config = config.settings_for(policy_class.config_class)
        config.pop("framework", None)
    made = PolicyMap(worker_index, 0, session_creator=session_creator, seed=seed)
    made.create_policy(policy_id, policy_class, observation_space, action_space, None, config)
    return made.pop(policy_id)
