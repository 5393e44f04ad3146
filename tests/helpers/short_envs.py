"""Environments of short episodes: a subclass says only what they show and pay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from helpers.factories import OBS, TWO
from tfpolicies import MultiAgentEnv


class ShortEnv(gym.Env):
    """Episodes of `length` steps, which show the time `t` and pay 1 for each step.

    Args:
        config: settings, which change nothing.
    """

    observation_space = spaces.Box(-9.0, 9.0, (1,), np.float32)
    action_space: spaces.Space = TWO
    length, terminates = 4, False

    def __init__(self, config: Any = None) -> None:
        self.t = 0

    def observe(self) -> Any:
        return np.full(self.observation_space.shape, self.t, np.float32)

    def pay(self, action: Any) -> float:
        return 1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.t += 1
        over, reward = self.t == self.length, self.pay(action)
        ends = (over, False) if self.terminates else (False, over)
        return self.observe(), reward, *ends, {"now": self.t}


class PairEnv(MultiAgentEnv):
    """Two agents, which observe the time; episodes of three steps.

    Args:
        config: settings, which change nothing.
        flags: terminated flags of all steps, instead of those of the time.
    """

    observation_space = spaces.Dict(a=OBS, b=OBS)
    action_space = spaces.Dict(a=TWO, b=TWO)

    def __init__(self, config: Any = None, **flags: Any) -> None:
        super().__init__()
        self.flags, self.now = flags, 0

    def observe(self) -> dict[str, np.ndarray]:
        return {agent: np.full(3, self.now, np.float32) for agent in "ab"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.now = 0
        return self.observe(), {}

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        self.now += 1
        flags = {**dict.fromkeys(("a", "b", "__all__"), self.now == 3), **self.flags}
        infos = {agent: {"now": self.now, "of": agent} for agent in "ab"}
        return self.observe(), {"a": 1.0, "b": 2.0}, flags, dict.fromkeys(flags, False), infos
