"""Small configs and environments for tests in a Ray cluster."""

from typing import Any

import numpy as np
from gymnasium import spaces

from helpers.environments import CountingEnv, SeededEnv
from tfpolicies import MultiAgentEnv, PPOConfig
from tfpolicies.compat import VectorEnv


def make_config(env: Any = SeededEnv, config_class: Any = PPOConfig, *, workers=2, **rollouts: Any):
    """Returns a config of a small policy whose remote workers need no CPU of the cluster."""
    return (
        config_class()
        .environment(env)
        .framework("tf2", inference="tf", jit_compile=False)
        .training(model={"fcnet_hiddens": [4]})
        .rollouts(num_rollout_workers=workers, **rollouts)
        .resources(num_cpus_per_worker=0)
        .debugging(seed=1)
    )


def make_ppo(env: Any = SeededEnv, workers: int = 2, rows: int = 40, **rollouts: Any) -> PPOConfig:
    """Returns a config of a PPO that learns once from each batch of `rows` rows."""
    fragment = rows // max(workers, 1)
    config = make_config(env, workers=workers, rollout_fragment_length=fragment, **rollouts)
    return config.training(train_batch_size=rows, sgd_minibatch_size=rows, num_sgd_iter=1)


def get_policy_weights(worker: Any) -> dict[str, np.ndarray]:
    return worker.get_weights()["default_policy"]


def get_filter_state(worker: Any) -> dict[str, Any]:
    return worker.filters["default_policy"].get_state()


class PairEnv(MultiAgentEnv):
    """Two agents that earn their actions; episodes of five steps."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    _agent_ids = ("a", "b")

    def __init__(self, config: Any = None) -> None:
        self.now = 0

    def observe(self) -> dict[str, np.ndarray]:
        return {agent: np.full(2, self.now / 10, np.float32) for agent in self._agent_ids}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.now = 0
        return self.observe(), {}

    def step(self, action_dict: Any) -> Any:
        self.now += 1
        rewards = {agent: float(action) for agent, action in action_dict.items()}
        return self.observe(), rewards, {"__all__": self.now == 5}, {"__all__": False}, {}


class CountingVectorEnv(VectorEnv):
    """Three counting environments as one of RLlib's vector environments."""

    def __init__(self, context: Any = None) -> None:
        self.envs = [CountingEnv(number) for number in range(3)]
        super().__init__(CountingEnv.observation_space, CountingEnv.action_space, 3)

    def vector_reset(self, *, seeds: Any = None, options: Any = None) -> Any:
        return tuple(map(list, zip(*(env.reset() for env in self.envs), strict=True)))

    def reset_at(self, index: int, *, seed: Any = None, options: Any = None) -> Any:
        return self.envs[index].reset()

    def vector_step(self, actions: Any) -> Any:
        steps = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        return tuple(map(list, zip(*steps, strict=True)))

    def get_sub_environments(self) -> list[CountingEnv]:
        return self.envs
