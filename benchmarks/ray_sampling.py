"""Two remote workers against one, in an environment whose steps take the time of a processor.

Run: `python -m benchmarks.ray_sampling`
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies import PPOConfig


class Simulation(gym.Env):
    """Computes for a while in each step; episodes of 100 steps."""

    observation_space = spaces.Box(-1.0, 1.0, (8,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, config: Any) -> None:
        self.rounds = config["rounds"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.now = 0
        return self.np_random.uniform(-1, 1, 8).astype(np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        x = 0.1
        for _ in range(self.rounds):
            x = 3.7 * x * (1.0 - x)
        self.now += 1
        obs = self.np_random.uniform(-1, 1, 8).astype(np.float32)
        return obs, float(x), self.now == 100, False, {}


def steps_per_second(workers: int, seconds: float, rounds: int) -> float:
    """Returns what the workers sample in a second, without learning."""
    algorithm = (
        PPOConfig()
        .environment(Simulation, env_config={"rounds": rounds})
        .rollouts(num_rollout_workers=workers, rollout_fragment_length=500)
        .framework("tf2", inference="onnx", jit_compile=False)
        .training(train_batch_size=500 * workers)
        .debugging(log_level="ERROR")
        .build()
    )
    algorithm.workers.sample()
    steps, started = 0, time.perf_counter()
    while (taken := time.perf_counter() - started) < seconds:
        steps += sum(batch.env_steps() for batch in algorithm.workers.sample())
    algorithm.stop()
    return steps / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5000, help="work of one step")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ratios = []
    for _ in range(options.repeats):
        one, two = (steps_per_second(n, options.seconds, options.rounds) for n in (1, 2))
        ratios.append(two / one)
        print(f"1 worker {one:8.0f} steps/s   2 workers {two:8.0f} steps/s   {two / one:.2f} times")
    print(f"median {np.median(ratios):.2f} times")


if __name__ == "__main__":
    main()
