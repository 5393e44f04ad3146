"""Resident memory while sampling and training: `python -m soak.memory --minutes 10`.

Trains PPO on CartPole-v1 and prints the resident memory once a minute, and its growth between the
first minute and the last. It must stay below 20 MB.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from tfpolicies import PPOConfig


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    algorithm = (
        PPOConfig()
        .environment("CartPole-v1")
        .rollouts(num_envs_per_worker=8)
        .training(train_batch_size=2048, sgd_minibatch_size=256, num_sgd_iter=10, lr=3e-4)
        .evaluation(evaluation_interval=50, evaluation_duration=5)
        .debugging(seed=0)
        .build()
    )
    started, first, minute = time.perf_counter(), None, 0
    while True:
        result = algorithm.train()
        seconds = time.perf_counter() - started
        if seconds < 60.0 * (minute + 1) and seconds < 60.0 * arguments.minutes:
            continue
        minute += 1
        now = resident_megabytes()
        first = now if first is None else first
        steps = result["timesteps_total"]
        print(f"minute {minute}: {now:.1f} MB, {steps} steps", flush=True)
        if seconds >= 60.0 * arguments.minutes:
            break
    print(f"growth from minute 1 to minute {minute}: {now - first:.1f} MB")


if __name__ == "__main__":
    main()
