"""Configs of runs that take little time, and environments for them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from helpers.environments import CountingEnv
from tfpolicies import AlgorithmConfig, PPOConfig


def quick_config(config_class: Any = PPOConfig, env: Any = None, **settings: Any) -> Any:
    """Returns a config with one hidden layer and 16 rows per iteration, without XLA.

    Args:
        config_class: the class of the config.
        env: the environment.
        settings: settings that are not the usual ones, under their names in dicts.
    """
    config: AlgorithmConfig = config_class().environment(env)
    config.framework(inference="tf", jit_compile=False).debugging(seed=0, log_level="ERROR")
    config.training(model={"fcnet_hiddens": [4]}, train_batch_size=16)
    if isinstance(config, PPOConfig):
        config.training(sgd_minibatch_size=16, num_sgd_iter=1)
    return config.update_from_dict(settings)


def counting(context: Any) -> CountingEnv:
    """Creates a `CountingEnv` with the index that it has in its worker."""
    return CountingEnv(context.vector_index)


class Corridor(gym.Env):
    """Ends after `length` steps, each of which pays 1; the length comes from the settings."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.length, self.worker_index = config["length"], config.worker_index

    def set_length(self, length: int) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        return np.array([self.steps], np.float32), 1.0, self.steps >= self.length, False, {}
