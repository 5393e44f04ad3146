"""Kills a remote worker every few seconds while PPO trains; the run ends with the steps asked for.

Every environment writes down each step that a batch of its worker brought home is made of: what was
counted is compared with what the learner got, batch by batch.

Run: `python -m soak.ray_chaos --seconds 180 --every 10`
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np

from helpers.scripts import parse_options
from tfpolicies import PPOConfig


class Killer(threading.Thread):
    """Kills one of the processes it knows every `every` seconds."""

    def __init__(self, every: float) -> None:
        super().__init__(daemon=True)
        self.every = every
        self.processes: list[int] = []
        self.killed = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(self.every):
            if self.processes:
                victim = self.processes.pop(random.randrange(len(self.processes)))
                os.kill(victim, signal.SIGKILL)
                self.killed += 1


def main() -> None:
    options = parse_options(__doc__, seconds=180.0, every=10.0, workers=2)
    algorithm = (
        PPOConfig()
        .environment("CartPole-v1")
        .rollouts(
            num_rollout_workers=options.workers,
            num_envs_per_worker=4,
            rollout_fragment_length=100,
            observation_filter="MeanStdFilter",
        )
        .training(train_batch_size=800, sgd_minibatch_size=200, num_sgd_iter=4)
        .fault_tolerance(recreate_failed_workers=True, delay_between_worker_restarts_s=0.0)
        .framework("tf2", inference="tf", jit_compile=False)
        .debugging(seed=0)
        .build()
    )
    seen: list[np.ndarray] = []
    steps_of = algorithm.sample_train_batch

    def noting(least: int | None = None) -> Any:
        batches = steps_of(least)
        rows = batches["default_policy"]
        seen.append(np.column_stack([rows["eps_id"], rows["t"]]))
        return batches

    algorithm.sample_train_batch = noting
    killer = Killer(options.every)
    killer.start()
    started, known = time.monotonic(), -1
    while time.monotonic() - started < options.seconds:
        restarts = algorithm.workers.num_remote_worker_restarts()
        if (restarts, algorithm.workers.num_healthy_remote_workers()) != known:
            known = restarts, algorithm.workers.num_healthy_remote_workers()
            killer.processes = algorithm.workers.foreach_worker(
                lambda worker: os.getpid(), local_worker=False
            )
        result = algorithm.train()
    killer.over.set()
    counted, rows = result["num_env_steps_sampled"], np.concatenate(seen)
    distinct = len(np.unique(rows, axis=0))
    observed = algorithm.worker.filters["default_policy"].statistics[0].count
    print(f"{killer.killed} workers killed, {result['num_remote_worker_restarts']} restarted")
    print(f"steps counted {counted}, learned from {len(rows)}, distinct {distinct}")
    print(f"observations in the filter {observed:.0f}; mean return {result['episode_reward_mean']}")
    algorithm.stop()
    if not counted == len(rows) == distinct == observed:
        raise SystemExit("steps were counted twice or lost")


if __name__ == "__main__":
    main()
