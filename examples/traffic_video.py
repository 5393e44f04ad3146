"""Trains the cars and traffic lights of `traffic.py` with PPO, and makes a video of the town.

    python examples/traffic_video.py

writes `traffic.gif`: cars are blue if they move and orange if they wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traffic import MultiAgentTrafficGrid
from traffic_grid import CAR_SPACE, KEEP_OR_SWITCH, LIGHT_SPACE, STAY_OR_GO

from tfpolicies import PolicySpec, PPOConfig, record_video


def map_agents(agent_id: str, episode: Any, worker: Any, **kwargs: Any) -> str:
    """Returns the policy of an agent: one for all cars, one for all lights."""
    return agent_id.partition("_")[0]


def main(folder: str | Path = ".", steps: int = 60_000, video_steps: int = 100) -> float:
    """Trains and records; returns the mean return of the last training episodes."""
    policies = {
        "car": PolicySpec(None, CAR_SPACE, STAY_OR_GO),
        "light": PolicySpec(None, LIGHT_SPACE, KEEP_OR_SWITCH),
    }
    config = (
        PPOConfig()
        .environment(MultiAgentTrafficGrid)
        .rollouts(num_envs_per_worker=8)
        .training(lr=1e-3, train_batch_size=1600, sgd_minibatch_size=1600, num_sgd_iter=4)
        .training(gamma=0.95, entropy_coeff=0.005, model={"fcnet_hiddens": [32, 32]})
        .multi_agent(policies=policies, policy_mapping_fn=map_agents)
        .debugging(seed=0)
    )
    algorithm = config.build()
    result = algorithm.learn(steps).result
    record_video(algorithm, Path(folder) / "traffic.gif", max_steps=video_steps)
    algorithm.stop()
    return float(result["episode_reward_mean"])


if __name__ == "__main__":
    main()
