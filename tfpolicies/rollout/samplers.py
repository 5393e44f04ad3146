"""The sampler that fits a worker's environments."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.rollout.multi_agent_sampler import MultiAgentSampler
from tfpolicies.rollout.sampler import Sampler
from tfpolicies.rollout.single_agent_sampler import SingleAgentSampler


def make_sampler(worker: Any, seed: Any) -> Sampler | None:
    """Returns what steps the environments of a `RolloutWorker`, None if it has none.

    Args:
        worker: has environments, policies and a config.
        seed: of episode ids.
    """
    envs, config = worker.environments, worker.config
    if envs is None:
        return None
    settings: dict[str, Any] = {
        "fragment_length": config.fragment_length(envs.num_envs, worker.worker_index),
        "complete_episodes": config.batch_mode == "complete_episodes",
        "clip_rewards": config.clip_rewards,
        "enable_connectors": config.enable_connectors,
        "rng": np.random.default_rng(seed),
        "callbacks": worker.callbacks,
        "worker": worker,
        "perf_stats_ema_coef": config.sampler_perf_stats_ema_coef,
    }
    if not isinstance(envs, MultiAgentEnvironments):
        return SingleAgentSampler(envs, worker.policy_map, **settings)
    return MultiAgentSampler(
        envs,
        worker.policy_map,
        worker.policies,
        count_agent_steps=config.count_steps_by == "agent_steps",
        observation_fn=config.observation_fn,
        **settings,
    )
