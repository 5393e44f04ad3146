"""Policies that come and go while workers sample, train and evaluate; all workers stay alike.

Run: `python -m soak.policy_churn --times 200`
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from helpers.scripts import parse_options
from soak.memory import resident_megabytes
from tfpolicies import MultiAgentEnv, PolicySpec, PPOConfig, PPOTF2Policy

LIVING = 8  # policies at a time, beside the one that is always there


class Pair(MultiAgentEnv):
    """Two agents that see noise; episodes of 20 steps."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)
    _agent_ids = ("a", "b")

    def __init__(self, config: Any) -> None:
        self.rng = np.random.default_rng(config.worker_index)

    def _observe(self) -> dict[str, np.ndarray]:
        return {agent: self.rng.uniform(-1, 1, 4).astype(np.float32) for agent in self._agent_ids}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.now = 0
        return self._observe(), {}

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        self.now += 1
        rewards = {agent: float(x) for agent, x in action_dict.items()}
        return self._observe(), rewards, {"__all__": self.now == 20}, {"__all__": False}, {}


class Matches:
    """Agent a plays the main policy, agent b one of the others, by the episode's number."""

    def __init__(self, others: list[str]) -> None:
        self.others = others

    def __call__(self, agent_id: str, episode: Any, worker: Any, **kwargs: Any) -> str:
        if agent_id == "a" or episode is None or not self.others:
            return "main"
        return self.others[episode.episode_id % len(self.others)]


def get_contents(worker: Any) -> dict[str, list[bytes]]:
    weights = worker.get_weights()
    return {pid: [x.tobytes() for x in parts.values()] for pid, parts in weights.items()}


def get_memory(worker: Any) -> float:
    del worker
    return resident_megabytes()


def main() -> None:
    options = parse_options(__doc__, times=200)
    algorithm = (
        PPOConfig()
        .environment(Pair)
        .multi_agent(policies={"main": PolicySpec()}, policy_mapping_fn=Matches([]))
        .rollouts(num_rollout_workers=1, rollout_fragment_length=50, num_envs_per_worker=2)
        .training(train_batch_size=100, sgd_minibatch_size=50, num_sgd_iter=1)
        .evaluation(evaluation_num_workers=1, evaluation_duration=2, evaluation_interval=10)
        .framework("tf2", inference="tf", jit_compile=False)
        .resources(num_cpus_per_worker=0.5)
        .debugging(log_level="ERROR", seed=0)
        .build()
    )
    living: list[str] = []
    memory, checks, took = [], 0, []
    for i in range(options.times):
        started = time.perf_counter()
        living.append(f"p{i}")
        matches = Matches(list(living))
        algorithm.add_policy(
            f"p{i}", PPOTF2Policy, policy_mapping_fn=matches, policies_to_train=["main", *living]
        )
        if len(living) > LIVING:
            gone = living.pop(0)
            matches = Matches(list(living))
            algorithm.remove_policy(
                gone, policy_mapping_fn=matches, policies_to_train=["main", *living]
            )
        took.append(time.perf_counter() - started)
        result = algorithm.train()
        if "evaluation" in result:
            actual = algorithm.workers.foreach_worker(get_contents)
            actual += algorithm.evaluation_workers.foreach_worker(get_contents)
            if actual[0].keys() != {"main", *living} or any(x != actual[0] for x in actual[1:]):
                # Evaluation took place after the last update, so that all have its weights.
                raise SystemExit(f"workers differ after {i + 1} policies")
            checks += 1
            memory.append(
                algorithm.workers.foreach_worker(get_memory)
                + algorithm.evaluation_workers.foreach_worker(get_memory, local_worker=False)
            )
            print(f"{i + 1:4d} added, MB: {[round(x) for x in memory[-1]]}", flush=True)
    algorithm.stop()
    half = memory[len(memory) // 2]
    print(f"{options.times} policies added and removed, {1e3 * np.median(took):.0f} ms each;")
    print(f"{checks} comparisons of 4 workers, all equal")
    growth = [round(last - middle, 1) for last, middle in zip(memory[-1], half, strict=True)]
    print(f"memory in the second half (learner, sampler, evaluation): {growth} MB")


if __name__ == "__main__":
    main()
