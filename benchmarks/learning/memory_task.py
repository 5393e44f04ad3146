"""A recurrent policy on a task that needs memory: CartPole without velocities.

    python -m benchmarks.learning.memory_task --seeds 3

The velocities of cart and pole are hidden, so a policy must remember the last positions. PPO with
an LSTM trains until the mean return of the last 100 episodes is at least 400, with traced functions
and in graph mode; steps and wall-clock time are printed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.table import Table

from tfpolicies import PPOConfig

GOAL, LIMIT = 400.0, 400_000
MODEL = {"fcnet_hiddens": [64], "use_lstm": True, "lstm_cell_size": 64, "max_seq_len": 32}


class WithoutVelocities(gym.ObservationWrapper):
    """Shows the positions of cart and pole only, float32 `[2]`."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self.observation_space = gym.spaces.Box(space.low[::2], space.high[::2], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[::2]


class Run(NamedTuple):
    """One training run."""

    steps: int
    seconds: float
    best: float  # mean return of the last 100 episodes


def train(framework: str, seed: int) -> Run:
    """Trains until the goal or the limit of steps."""
    config = (
        PPOConfig()
        .environment(lambda context: WithoutVelocities(gym.make("CartPole-v1")))
        .framework(framework)
        .rollouts(
            num_envs_per_worker=16,
            rollout_fragment_length=64,
            observation_filter="MeanStdFilter",
        )
        .training(
            lr=2e-3,
            gamma=0.98,
            lambda_=0.8,
            train_batch_size=1024,
            sgd_minibatch_size=256,
            num_sgd_iter=10,
            clip_param=0.2,
            kl_coeff=0.0,
            vf_clip_param=float("inf"),
            vf_loss_coeff=0.01,
            grad_clip=0.5,
            model=MODEL,
        )
        .debugging(seed=seed, log_level="ERROR")
    )
    started, best, steps = time.perf_counter(), 0.0, 0
    algorithm = config.build()
    while best < GOAL and steps < LIMIT:
        result = algorithm.train()
        steps = result["timesteps_total"]
        if result["episodes_total"] >= 100:
            best = max(best, result["episode_reward_mean"])
    algorithm.stop()
    return Run(steps, time.perf_counter() - started, best)


def main() -> int:
    """Trains in both modes and prints a table; returns 1 if a run missed the goal."""
    parser = argparse.ArgumentParser(description="Recurrent PPO on CartPole without velocities.")
    parser.add_argument("--seeds", type=int, default=3, help="runs per mode")
    seeds = parser.parse_args().seeds
    table = Table("mode", "seed", "steps", "seconds", "best mean return", title=f"Goal: {GOAL:g}")
    missed = 0
    for framework, mode in (("tf2", "traced functions"), ("tf", "graph mode")):
        for seed in range(seeds):
            run = train(framework, seed)
            missed += run.best < GOAL
            cells = (f"{run.steps:,}", f"{run.seconds:.0f}", f"{run.best:.1f}")
            table.add_row(mode, str(seed), *cells)
    Console().print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
