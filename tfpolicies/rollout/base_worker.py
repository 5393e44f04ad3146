"""Base class of `RolloutWorker`: the attributes that its parts read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.vector_adapters import VectorEnvAdapter
from tfpolicies.errors import UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.episode_seeds import EpisodeSeeds
from tfpolicies.rollout.sampler import Sampler

Spaces = tuple[gym.Space[Any], gym.Space[Any]]
"""Observation space and action space."""


class BaseWorker:
    """Base class of `RolloutWorker`, which documents the attributes."""

    config: AlgorithmConfig
    worker_index: int
    num_workers: int
    spaces: Mapping[str, Spaces]
    default_policy_class: type[Policy] | None
    callbacks: DefaultCallbacks
    global_vars: dict[str, Any]
    seeds: EpisodeSeeds
    environments: VectorEnvAdapter | MultiAgentEnvAdapter | None
    sampler: Sampler | None
    seconds_to_make: float
    has_episodes: bool
    sample: Callable[[], SampleBatch | MultiAgentBatch]
    _stopped: bool = False

    @property
    def env(self) -> Any:
        """The first environment; None without environments."""
        return next(iter(self._sub_environments()), None)

    def _sub_environments(self) -> list[Any]:
        return [] if self.environments is None else self.environments.get_sub_environments()

    def _require_sampler(self) -> Sampler:
        if self._stopped:
            raise UsageError(
                "This worker was stopped, so its environments are closed; create a new one."
            )
        if self.sampler is None:
            raise UsageError(
                "This worker has no input_reader, because it has no environment; give it an "
                "env_creator or config.environment(...)."
            )
        return self.sampler
