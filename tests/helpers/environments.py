"""Small real environments whose observations tell where they come from.

`CountingEnv` observes (number of the environment, episode, step), so that every row of a batch can
be checked against `CountingEnv.length`, `.reward` and `.truncates` to be a true transition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

HIGH = 10_000.0


class CountingEnv(gym.Env):
    """Counts; episode e of environment n has `lengths[(n + e) % len(lengths)]` steps.

    Every third episode is truncated, the others terminate.
    """

    observation_space = spaces.Box(0.0, HIGH, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, number: int = 0, lengths: Sequence[int] = (4, 1, 6)) -> None:
        self.number = number
        self.lengths = tuple(lengths)
        self.episode = -1
        self.now = 0
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []
        self.closed = 0

    def length(self, episode: int) -> int:
        return self.lengths[(self.number + episode) % len(self.lengths)]

    def truncates(self, episode: int) -> bool:
        return (self.number + episode) % 3 == 2

    def reward(self, episode: int, step: int, action: int) -> float:
        return 8.0 * self.number + episode % 5 - 2.0 * (step % 4) + 0.25 * action

    def observation(self) -> Any:
        return np.array([self.number, self.episode, self.now], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode += 1
        self.now = 0
        return self.observation(), {"episode": self.episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.actions.append(action)
        reward = self.reward(self.episode, self.now, int(np.sum(action)))
        self.now += 1
        ended = self.now == self.length(self.episode)
        cut = self.truncates(self.episode)
        info = {"step": self.now}
        return self.observation(), reward, ended and not cut, ended and cut, info

    def close(self) -> None:
        self.closed += 1


class SavedCountingEnv(CountingEnv):
    """A CountingEnv that can be saved and restored."""

    def get_state(self) -> dict[str, int]:
        return {"episode": self.episode, "now": self.now}

    def set_state(self, state: dict[str, int]) -> None:
        self.episode, self.now = state["episode"], state["now"]


class NestedCountingEnv(CountingEnv):
    """The same observation as a Dict with a Discrete part, and a Tuple inside."""

    observation_space = spaces.Dict(
        where=spaces.Tuple((spaces.Discrete(64), spaces.Box(0.0, HIGH, (1,), np.float64))),
        step=spaces.Box(0, 255, (1,), np.uint8),
    )

    def observation(self) -> Any:
        return {
            "where": (self.number, np.array([self.episode], np.float64)),
            "step": np.array([self.now], np.uint8),
        }


class BoxActionEnv(gym.Env):
    """Remembers the actions it got; rewards being close to 3.0; ten steps to an episode."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, dtype: Any = np.float32, low: float = 1.0, high: float = 5.0) -> None:
        self.action_space = spaces.Box(low, high, (2,), dtype)
        self.actions: list[np.ndarray] = []
        self.copies: list[np.ndarray] = []
        self.now = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.now = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        self.actions.append(action)
        self.copies.append(np.copy(action))
        self.now += 1
        obs = np.full(2, self.now / 10, np.float32)
        return obs, -float(np.abs(action - 3.0).sum()), False, self.now == 10, {}


class SeededEnv(gym.Env):
    """Observes random numbers of its own generator; five steps to an episode."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.now = 0
        return self._draw(), {}

    def _draw(self) -> np.ndarray:
        return self.np_random.random(2).astype(np.float32)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.now += 1
        return self._draw(), float(action), self.now == 5, False, {}


class TwoArmsEnv(gym.Env):
    """One step: the arm that the observation names pays 1. `config` is what the creator got."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.right = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.right], {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        reward = float(action == self.right)
        return np.zeros(2, np.float32), reward, True, False, {}


def counting_vector(
    mode: AutoresetMode,
    count: int = 3,
    lengths: Sequence[int] = (4, 1, 6),
    kind: type[CountingEnv] = CountingEnv,
    **options: Any,
) -> SyncVectorEnv:
    """Returns `count` counting environments behind Gymnasium's own vector environment."""
    makers = [lambda n=n: kind(n, lengths) for n in range(count)]
    return SyncVectorEnv(makers, autoreset_mode=mode, **options)


MODES = ("plain", "next_step", "same_step", "disabled")


def counting_creator(
    mode: str,
    count: int = 3,
    lengths: Sequence[int] = (4, 1, 6),
    kind: type[CountingEnv] = CountingEnv,
) -> Any:
    """Returns an env_creator of counting environments that reset as `mode` says."""
    if mode == "plain":
        return lambda context: kind(context.vector_index, lengths)
    return lambda context: counting_vector(AutoresetMode[mode.upper()], count, lengths, kind)
