"""Resident memory while sampling and training: `python -m soak.memory --minutes 10`.

Trains PPO on CartPole-v1 and prints the resident memory once a minute, and its growth between the
first minute and the last. It must stay below 20 MB.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from helpers.scripts import parse_options
from tfpolicies import PPOConfig


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    arguments = parse_options(__doc__, minutes=10.0)
    algorithm = (
        PPOConfig()
        .environment("CartPole-v1")
        .rollouts(num_envs_per_worker=8)
        .training(train_batch_size=2048, sgd_minibatch_size=256, num_sgd_iter=10, lr=3e-4)
        .evaluation(evaluation_interval=50, evaluation_duration=5)
        .debugging(seed=0)
        .build()
    )
    started, sizes = time.perf_counter(), []
    while not sizes or time.perf_counter() - started < 60.0 * arguments.minutes:
        result = algorithm.train()
        if time.perf_counter() - started >= 60.0 * (len(sizes) + 1):
            sizes.append(resident_megabytes())
            steps = result["timesteps_total"]
            print(f"minute {len(sizes)}: {sizes[-1]:.1f} MB, {steps} steps", flush=True)
    print(f"growth from minute 1 to minute {len(sizes)}: {sizes[-1] - sizes[0]:.1f} MB")


if __name__ == "__main__":
    main()
