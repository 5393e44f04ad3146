"""Environments that render: the left column of a picture tells the step, its colour the place."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies import MultiAgentEnv, Policy
from tfpolicies.policy.policy import ActionBatch

SPACE = gym.spaces.Box(-10.0, 10.0, (2,), np.float32)
TWO = gym.spaces.Discrete(2)


class Painted(gym.Env):
    """Walks by a coin of its own, and by the action; pictures are bright by steps."""

    metadata = {"render_modes": ["human", "rgb_array", "rgb_array_list"], "render_fps": 10}
    observation_space, action_space = SPACE, TWO

    def __init__(self, render_mode: str | None = None, length: int = 6) -> None:
        self.render_mode = render_mode
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps, self.place = 0, float(self.np_random.normal())
        return self.seen(), {}

    def seen(self) -> np.ndarray:
        return np.array([self.place, self.steps], np.float32)

    def step(self, action: int) -> Any:
        self.steps += 1
        self.place += 0.25 * (2 * action - 1) + 0.1 * float(self.np_random.normal())
        return self.seen(), self.place, False, self.steps == self.length, {}

    def render(self) -> Any:
        picture = np.full((64, 320, 3), 20 * self.steps, np.uint8)
        if self.render_mode == "rgb_array":
            return picture
        return [picture, picture] if self.render_mode == "rgb_array_list" else None


class TwoPictures(Painted):
    metadata = {"render_modes": ["rgb_array_list"]}


class Blind(Painted):
    metadata = {"render_modes": ["ansi"]}


class Broken(Painted):
    def render(self) -> Any:
        return "a picture"


class Failing(Painted):
    def step(self, action: int) -> Any:
        if self.steps == 3 and self.render_mode is not None:
            raise RuntimeError("it fell")
        return super().step(action)


class Deaf(Painted):
    """Takes settings, and does not heed `render_mode`."""

    def __init__(self, env_config: Any) -> None:
        super().__init__(length=env_config.get("length", 6))


class Pair(MultiAgentEnv):
    """Two agents in one `Painted` each."""

    metadata = Painted.metadata
    observation_space, action_space = SPACE, TWO
    _agent_ids = ("left", "right")

    def __init__(self, env_config: Any) -> None:
        self.render_mode = env_config.get("render_mode")
        self.parts = {agent: Painted(self.render_mode) for agent in self._agent_ids}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        seeds = {"left": seed, "right": None if seed is None else seed + 100}
        return {agent: env.reset(seed=seeds[agent])[0] for agent, env in self.parts.items()}, {}

    def step(self, action_dict: Any) -> Any:
        results = {agent: self.parts[agent].step(action) for agent, action in action_dict.items()}
        obs, rewards, _, cuts, _ = ({a: x[k] for a, x in results.items()} for k in range(5))
        return obs, rewards, {"__all__": False}, {**cuts, "__all__": all(cuts.values())}, {}

    def render(self) -> Any:
        return self.parts["left"].render()


class Rising(Policy):
    """Acts 1 where it is."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **kwargs: Any) -> Any:
        return ActionBatch(np.ones(len(obs_batch), np.int64), [], {})


def rising(**config: Any) -> Policy:
    return Rising(SPACE, TWO, config)


def mapped(agent_id: str, episode: Any, **kwargs: Any) -> str:
    return agent_id
