"""Environments for tests of environment processes; importing them does not import TensorFlow."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies.envs.multi_agent_env import MultiAgentEnv


class Faulty(gym.Env):
    """Episodes of 4 steps, observing (number, episode, step).

    The environment `faulty` has one fault, named by `kind`, in step 3 of `episode`; `place` is a
    folder that remembers that it has happened.
    """

    observation_space = spaces.Box(-100.0, 100.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.kind, self.number = config["kind"], config.vector_index
        self.faulty, self.place = config.get("faulty", 1), config.get("place")
        self.faulty_episode = config.get("episode", 1)
        self.is_remote = config.remote
        self.episode, self.now, self.task = -1, 0, 0
        self.lock = threading.Lock()
        self.happen("make", self.number == self.faulty)

    def happen(self, when: str, due: bool) -> None:
        kind = self.kind
        if not due or (kind == "constructor") != (when == "make") or kind == "none":
            return
        if self.place is not None:
            mark = Path(self.place) / "happened"
            if mark.exists():
                return
            mark.touch()
        if kind == "constructor":
            raise ConnectionError("no simulator at port 2000")
        if kind == "raise":
            raise ZeroDivisionError("the wheel came off")
        if kind == "own error":
            raise WheelError(3, "left")
        if kind == "exit":
            sys.exit(2)
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "hang":
            time.sleep(600)
        if kind == "native hang":
            10**10**8  # it keeps the interpreter's lock
        if kind == "slow":
            time.sleep(0.7)
        if kind == "log":
            logging.getLogger("world").warning("rain in world %d", self.number)
            warnings.warn("thunder", stacklevel=1)

    def observation(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.now], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.episode, self.now = self.episode + 1, 0
        return self.observation(), {}

    def step(self, action: int) -> Any:
        self.now += 1
        due = self.number == self.faulty and self.episode == self.faulty_episode and self.now == 3
        self.happen("step", due)
        obs, info = self.observation(), {}
        if due and self.kind == "nan":
            obs = np.array([np.nan, 0.0, 0.0], np.float32)
        if due and self.kind == "unsendable info":
            info = {"lock": self.lock}
        return obs, 1.0, self.now == 4, False, info

    def get_task(self) -> int:
        return self.task

    def set_task(self, task: int) -> None:
        self.task = task

    def has_tensorflow(self) -> bool:
        return "tensorflow" in sys.modules

    def process_id(self) -> int:
        return os.getpid()

    def start_another_process(self) -> int:
        self.other = subprocess.Popen(["sleep", "600"])
        return self.other.pid


class WheelError(Exception):
    """An error whose class takes more than a message."""

    def __init__(self, count: int, side: str) -> None:
        super().__init__(f"{count} wheels came off on the {side}")
        self.side = side


class NeedsC(gym.Env):
    """Cannot be made without an argument `c`."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, a: int, c: float) -> None:
        self.a, self.c = a, c

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        return np.full(1, self.c, np.float32), 1.0, True, False, {}


class Unlike(NeedsC):
    """Has another action space for each number."""

    def __init__(self, env_config: Any) -> None:
        super().__init__(0, 0.0)
        self.action_space = spaces.Discrete(2 + env_config.vector_index)


class NestedActions(gym.Env):
    """Draws nested observations, and earns what its nested actions say."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (4, 4, 1), np.uint8),
        pair=spaces.Tuple((spaces.Discrete(5), spaces.Box(-9.0, 9.0, (2,), np.float64))),
    )
    action_space = spaces.Dict(
        turn=spaces.MultiDiscrete([3, 2]), push=spaces.Box(-1.0, 1.0, (2,), np.float32)
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.now = 0
        return self._draw(), {"first": True}

    def _draw(self) -> Any:
        draw = self.np_random
        image = draw.integers(256, size=(4, 4, 1), dtype=np.uint8)
        return {"image": image, "pair": (int(draw.integers(5)), draw.random(2))}

    def step(self, action: Any) -> Any:
        self.now += 1
        reward = float(action["turn"].sum() + action["push"].sum())
        cut = self.np_random.random() < 0.2
        return self._draw(), reward, self.now == 6, bool(cut and self.now < 6), {"now": self.now}


class Team(MultiAgentEnv):
    """An environment of two agents, which is never played."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    _agent_ids = ("a", "b")
