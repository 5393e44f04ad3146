"""RLlib's policy utilities: makes a single policy, and validates policy ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.policy_spec import validate_policy_id
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.tf_policy import TFPolicy


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
    """Returns a new policy that is not part of a map.

    Args:
        policy_id: its id; together with the seed it determines weights and noise.
        policy_class: its class.
        merged_config: its settings; missing ones get the class's defaults.
        observation_space: the environment's.
        action_space: the environment's.
        worker_index: enters the seed of the noise.
        session_creator: makes the session of a graph-mode policy.
        seed: used if the config has none.

    Raises:
        ConfigError: for an invalid id, or wrong settings.
    """
    validate_policy_id(policy_id, error=True)
    is_tf_policy = issubclass(policy_class, TFPolicy)
    if isinstance(merged_config, AlgorithmConfig) and is_tf_policy:
        config = merged_config.settings_for(policy_class.config_class)  # type: ignore[attr-defined]
        config.pop("framework", None)  # the class determines it
    else:
        config = dict(merged_config.items())
    if config.get("seed") is None and seed is not None:
        config["seed"] = seed
    config |= {"__policy_id": policy_id, "worker_index": worker_index}
    if is_tf_policy:
        config["__session_creator"] = session_creator
    return policy_class(observation_space, action_space, config)
