"""What a sampler's step costs beside the environments and acting; prints one table.

For each number of environments it measures, in one process by turns, the µs of CPU of

* `bare`: one step of CartPole by Gymnasium alone,
* `acting`: one answer of the policy to the same number of observations,
* `both`: an answer and a step that takes it, one after the other, with nothing between them: more
  than their sum, since each finds the caches as the other left them,
* `step`: one step of a rollout worker, with its part of what is done once per fragment,
* `back`: that part,

and what is `between`: `step - back - both`. By hand:
`PYTHONPATH=. taskset -c 1 python benchmarks/sampling/sampling_loop.py`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks import probe
from benchmarks.overview import ours
from tfpolicies import PPOTF2Policy, RolloutWorker

CALLS = 200  # of a bare step and of acting in one stretch
NAMES = ("bare", "acting", "both", "back", "step")


def cartpole(num_envs: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what steps CartPole by itself, and gives the observations `[N, 4]`."""
    env: Any
    if num_envs > 1:
        env = gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")
        env.reset(seed=0)
        return lambda actions: env.step(actions)[0]
    env = gym.make("CartPole-v1")
    env.reset(seed=0)

    def step(actions: np.ndarray) -> np.ndarray:
        obs, _, terminated, truncated, _ = env.step(int(actions[0]))
        return (env.reset()[0] if terminated or truncated else obs)[None]

    return step


def figures(num_envs: int, seconds: float) -> dict[str, float]:
    """Returns the median µs of CPU of each part, measured in turns."""
    worker = RolloutWorker(config=ours.config_of(num_envs), default_policy_class=PPOTF2Policy)
    policy, sampler = worker.get_policy(), worker.sampler
    step, obs = cartpole(num_envs), probe.observations(num_envs)
    actions = np.random.default_rng(0).integers(2, size=(CALLS, num_envs))
    in_loop = 0.0
    collect = sampler._collect

    def timed(*args: Any) -> Any:
        nonlocal in_loop
        started = time.process_time()
        buffer = collect(*args)
        in_loop += time.process_time() - started
        return buffer

    sampler._collect = timed

    def bare() -> int:
        for row in actions:
            step(row)
        return CALLS

    def acting() -> int:
        for _ in range(CALLS):
            policy.driver.acting.act([obs])
        return CALLS

    def both() -> int:
        seen = obs
        for _ in range(CALLS):
            seen = step(policy.driver.acting.act([seen])[0])
        return CALLS

    def sample() -> int:
        return len(worker.sample()) // num_envs

    works = {"bare": bare, "acting": acting, "both": both, "step": sample}
    for work in works.values():
        work(), work()
    results: dict[str, list[float]] = {name: [] for name in NAMES}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, work in works.items():
            in_loop, started = 0.0, time.process_time()
            units = work()
            spent = time.process_time() - started
            results[name].append(spent / units)
            if name == "step":
                results["back"].append((spent - in_loop) / units)
    return {name: statistics.median(values) * 1e6 for name, values in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    print(f"{'environments':>12}" + "".join(f"{name:>9}" for name in (*NAMES, "between")))
    for num_envs in probe.ENV_COUNTS:
        result = figures(num_envs, options.seconds)
        between = result["step"] - result["back"] - result["both"]
        row = "".join(f"{result[name]:9.1f}" for name in NAMES)
        print(f"{num_envs:>12}{row}{between:9.1f}")


if __name__ == "__main__":
    main()
