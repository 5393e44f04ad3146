"""CartPole-v1 alone, with random actions: what sampling can cost at best.

Variant "vector" steps Gymnasium's own vector implementation, "instances" loops over plain ones.
"""

from collections.abc import Callable

import gymnasium as gym
import numpy as np

from benchmarks import probe

ACTION_ROUNDS = 1024  # action rows drawn beforehand, so that drawing costs nothing


def sampling(request: probe.Request) -> probe.Figures:
    prepare = {"vector": _vector, "instances": _instances}[request.variant]

    def figure(num_envs: int) -> float:
        return probe.rate(prepare(num_envs), request.seconds)

    return {str(num_envs): figure(num_envs) for num_envs in probe.ENV_COUNTS}


def _actions(num_envs: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2, (ACTION_ROUNDS, num_envs))


def _vector(num_envs: int) -> Callable[[], int]:
    """Returns work that steps the environments by their vector entry point."""
    envs = gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")
    envs.reset(seed=0)
    actions = _actions(num_envs)

    def work() -> int:
        for row in actions:
            envs.step(row)
        return actions.size

    return work


def _instances(num_envs: int) -> Callable[[], int]:
    """Returns work that steps instances one after the other, resetting each at its end."""
    envs = [gym.make("CartPole-v1") for _ in range(num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    actions = _actions(num_envs)

    def work() -> int:
        for row in actions:
            for env, action in zip(envs, row, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        return actions.size

    return work


if __name__ == "__main__":
    probe.serve(["gymnasium", "numpy"], {"sampling": sampling})
