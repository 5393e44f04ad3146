"""Searches that take little time: the return of an episode is a setting of the environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Env, spaces

from helpers.quick_configs import quick_config


class Paying(Env):
    """Ends after four steps and pays `reward` at the end; a negative `fails` raises at a step."""

    observation_space = spaces.Box(0.0, 10.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.reward, self.fails = config.get("reward", 1.0), config.get("fails", False)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        if self.fails:
            raise ValueError("it broke")
        is_over = self.steps == 4
        reward = self.reward if is_over else 0.0
        return np.array([self.steps], np.float32), reward, is_over, False, {}


def paying_config(**settings: Any) -> Any:
    """Returns a config of PPO in `Paying`, whose evaluations return exactly its reward."""
    return quick_config(env=Paying, **settings)
