"""Two remote workers against one, in an environment whose steps take the time of a processor.

Both are measured by turns. The environments alone in the same processes tell what the computer has
to give: with other work on its processors, two processes are not twice one.

Run: `python -m benchmarks.sampling.ray_sampling`
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


def algorithm_of(workers: int, rounds: int) -> Any:
    """Returns an algorithm with that many workers, which have sampled once."""
    algorithm = (
        PPOConfig()
        .environment(Simulation, env_config={"rounds": rounds})
        .rollouts(num_rollout_workers=workers, rollout_fragment_length=200)
        .framework("tf2", inference="onnx", jit_compile=False)
        .training(train_batch_size=200 * workers)
        .debugging(log_level="ERROR")
        .build()
    )
    algorithm.workers.sample()
    return algorithm


def steps_per_second(algorithm: Any, seconds: float) -> float:
    """Returns what the workers sample in a second, without learning."""
    steps, started = 0, time.perf_counter()
    while (taken := time.perf_counter() - started) < seconds:
        steps += sum(batch.env_steps() for batch in algorithm.workers.sample())
    return steps / taken


def loops_per_second(algorithm: Any, seconds: float) -> float:
    """Returns what the workers' processes compute in a second, when they do nothing else."""
    return float(sum(algorithm.workers.foreach_worker(Loop(seconds), local_worker=False)))


class Loop:
    """Counts what a process computes in a second."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, worker: Any) -> float:
        env, done, started = worker.env, 0, time.perf_counter()
        env.reset()
        while (taken := time.perf_counter() - started) < self.seconds:
            env.step(0)
            done += 1
        return done / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=20_000, help="work of one step")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    algorithms = [algorithm_of(workers, options.rounds) for workers in (1, 2)]
    for name, measure in (("sampling", steps_per_second), ("the environments", loops_per_second)):
        results = [
            [measure(algorithm, options.seconds) for algorithm in algorithms]
            for _ in range(options.repeats)
        ]
        one, two = np.median(results, axis=0)
        ratios = sorted(b / a for a, b in results)
        print(
            f"{name:17s} 1 worker {one:7.0f} steps/s   2 workers {two:7.0f} steps/s   "
            f"times: median {np.median(ratios):.2f}, best {ratios[-1]:.2f}"
        )
    for algorithm in algorithms:
        algorithm.stop()


if __name__ == "__main__":
    main()
