"""What a sampler's step costs beside the environments and acting; prints one table.

For each number of environments it measures, in turns and in one process, the µs of CPU of

* `bare`: one step of CartPole by Gymnasium alone,
* `acting`: one answer of the policy to the same number of observations,
* `step`: one step of a rollout worker, its part of a fragment's postprocessing included,
* `back`: that part of it which is done once per fragment, behind the loop,

and `between`, what is left of `step` without the other three. By hand:
`PYTHONPATH=. taskset -c 1 python benchmarks/sampling_loop.py`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import ours
import probe

from tfpolicies import PPOTF2Policy, RolloutWorker

CALLS = 200  # of a bare step and of acting in one stretch
NAMES = ("bare", "acting", "back", "step")


def bare_step(num_envs: int) -> Callable[[], int]:
    """Returns what steps CartPole by itself: as one vector environment, or as a single one."""
    rng = np.random.default_rng(0)
    actions = rng.integers(2, size=(CALLS, num_envs))
    env: Any
    if num_envs > 1:
        env = gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")
        env.reset(seed=0)

        def vector() -> int:
            step = env.step
            for row in actions:
                step(row)
            return CALLS

        return vector
    env = gym.make("CartPole-v1")
    env.reset(seed=0)

    def single() -> int:
        step = env.step
        for action in actions[:, 0].tolist():
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                env.reset()
        return CALLS

    return single


def figures(num_envs: int, seconds: float) -> dict[str, float]:
    """Returns the median µs of CPU of each part, measured in turns."""
    worker = RolloutWorker(config=ours.config_of(num_envs), default_policy_class=PPOTF2Policy)
    policy, sampler = worker.get_policy(), worker.sampler
    obs = [probe.observations(num_envs)]
    in_loop = 0.0
    collect = sampler._collect

    def timed(*args: Any) -> Any:
        nonlocal in_loop
        started = time.process_time()
        buffer = collect(*args)
        in_loop += time.process_time() - started
        return buffer

    sampler._collect = timed

    def act() -> int:
        for _ in range(CALLS):
            policy.act_columns(obs)
        return CALLS

    def sample() -> int:
        return len(worker.sample()) // num_envs

    works = {"bare": bare_step(num_envs), "acting": act, "step": sample}
    for work in works.values():
        work(), work()
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, work in works.items():
            in_loop, started = 0.0, time.process_time()
            units = work()
            spent = time.process_time() - started
            found[name].append(spent / units)
            if name == "step":
                found["back"].append((spent - in_loop) / units)
    return {name: statistics.median(values) * 1e6 for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    print(f"{'environments':>12}" + "".join(f"{name:>9}" for name in (*NAMES, "between")))
    for num_envs in probe.ENV_COUNTS:
        found = figures(num_envs, options.seconds)
        between = found["step"] - found["bare"] - found["acting"] - found["back"]
        row = "".join(f"{found[name]:9.1f}" for name in NAMES)
        print(f"{num_envs:>12}{row}{between:9.1f}")


if __name__ == "__main__":
    main()
