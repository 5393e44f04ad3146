"""Kills Ray workers while policies come and go: `python -m soak.ray_worker_deaths`.

In each round a worker's process is killed (SIGKILL) a random moment after `add_policy`,
`remove_policy`, `sync_weights`, a checkpoint's `restore` or `train` has begun. The call must end,
by success or by an error of the package; once the dead worker has been replaced, all workers must
have the policies and the weights that the algorithm has.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import ray

from helpers.differences import find_differences
from helpers.scripts import parse_options
from tfpolicies import PPOConfig
from tfpolicies.errors import TfPoliciesError


def get_weights(worker: Any) -> dict[str, list[np.ndarray]]:
    return {pid: list(x.values()) for pid, x in sorted(worker.get_weights().items())}


def make_algorithm() -> Any:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=0, log_level="ERROR")
    config.framework("tf2", inference="tf", jit_compile=False)
    config.training(
        model={"fcnet_hiddens": [4]}, train_batch_size=40, sgd_minibatch_size=40, num_sgd_iter=1
    )
    config.rollouts(num_rollout_workers=2, rollout_fragment_length=20)
    config.fault_tolerance(recreate_failed_workers=True, delay_between_worker_restarts_s=0.0)
    return config.resources(num_cpus_per_worker=0).build()


def train_until_whole(algorithm: Any, limit: float) -> None:
    """Trains until all workers are there: those that replace dead ones start meanwhile."""
    deadline = time.monotonic() + limit
    algorithm.train()
    while algorithm.workers.num_healthy_remote_workers() < 2 and time.monotonic() < deadline:
        time.sleep(0.5)
        algorithm.train()


def find_faults(algorithm: Any) -> list[str]:
    """Returns where remote workers differ from the local one."""
    local, *others = algorithm.workers.foreach_worker(get_weights)
    faults = [] if len(others) == 2 else [f"{len(others)} workers"]
    return faults + [x for weights in others for x in find_differences(local, weights)]


def main() -> None:
    options = parse_options(__doc__, rounds=10, seed=0, limit=(120.0, "seconds for each call"))
    rng = random.Random(options.seed)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    algorithm = make_algorithm()
    algorithm.train()
    space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2)
    kind = type(algorithm.get_policy())
    ends: Counter[str] = Counter()
    wrong, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            extra = sorted(set(algorithm.workers.local_worker().policy_map) - {"default_policy"})
            calls: dict[str, Callable[[], Any]] = {
                "add_policy": lambda turn=turn: algorithm.add_policy(
                    f"p{turn}", kind, observation_space=space[0], action_space=space[1]
                ),
                "sync_weights": lambda: algorithm.workers.sync_weights(),
                "restore": lambda: algorithm.restore(folder),
                "train": algorithm.train,
            }
            if extra:
                calls["remove_policy"] = lambda name=extra[0]: algorithm.remove_policy(name)
            name = rng.choice(sorted(calls))
            algorithm.save(folder)
            if name == "sync_weights":
                policy = algorithm.get_policy()
                policy.set_weights([x + 0.01 for x in policy.get_weights().values()])
            victims = algorithm.workers.foreach_worker(
                lambda worker: os.getpid(), local_worker=False
            )
            victim, delay = rng.choice(victims), rng.choice([0.0, rng.uniform(0, 0.3)])
            killer = threading.Timer(delay, os.kill, (victim, signal.SIGKILL))
            killer.start()
            began = time.monotonic()
            try:
                calls[name]()
                end = "done"
            except TfPoliciesError as error:
                end = f"refused: {str(error)[:150]}"
            except Exception as error:
                end = f"other: {type(error).__name__}: {str(error)[:200]}"
                wrong += 1
            seconds = time.monotonic() - began
            slowest = max(slowest, seconds)
            killer.join()
            ends[f"{name} {end.partition(':')[0]}"] += 1
            train_until_whole(algorithm, options.limit)
            algorithm.workers.sync_weights()
            result = find_faults(algorithm)
            if result or seconds > options.limit or not end.startswith("done"):
                wrong += bool(result) or seconds > options.limit
                print(f"{turn} {name} after {delay:.3f} s ({seconds:.1f} s): {end}; {result}")
    print(
        f"{options.rounds} rounds: {dict(ends)}, slowest {slowest:.1f} s, {wrong} wrong", flush=True
    )
    algorithm.stop()
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
