"""Kills Ray workers while policies come and go: `python -m soak.ray_worker_deaths`.

In each round a worker's process is killed (SIGKILL) a random moment after `add_policy`,
`remove_policy`, `sync_weights`, a checkpoint's `restore` or `train` has begun. The call must end,
by success or by an error of the package; once the dead worker has been replaced, all workers must
have the policies and the weights that the algorithm has.
"""

from __future__ import annotations

import argparse
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

from tfpolicies import PPOConfig
from tfpolicies.errors import TfPoliciesError


def process_of(worker: Any) -> int:
    """Returns the id of a worker's process."""
    del worker
    return os.getpid()


def state_of(worker: Any) -> dict[str, list[np.ndarray]]:
    """Returns the weights of each policy of a worker."""
    return {
        policy_id: list(worker.get_policy(policy_id).get_weights().values())
        for policy_id in sorted(worker.policy_map)
    }


def map_to_default(agent_id: Any, episode: Any = None, **kwargs: Any) -> str:
    """Maps all agents to one policy."""
    del agent_id, episode, kwargs
    return "default_policy"


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


def find_differences(algorithm: Any) -> list[str]:
    """Returns what remote workers have that the local one does not, or the other way round."""
    own, *others = algorithm.workers.foreach_worker(state_of)
    results = []
    if len(others) != 2:
        results.append(f"{len(others)} workers")
    for state in others:
        if state.keys() != own.keys():
            results.append(f"policies {sorted(state)}, not {sorted(own)}")
            continue
        for policy_id, arrays in own.items():
            pairs = zip(arrays, state[policy_id], strict=True)
            if not all(np.array_equal(a, b) for a, b in pairs):
                results.append(f"other weights of {policy_id}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each call")
    options = parser.parse_args()
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
            victims = algorithm.workers.foreach_worker(process_of, local_worker=False)
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
            result = find_differences(algorithm)
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
