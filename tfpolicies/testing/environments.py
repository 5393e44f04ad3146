"""Small, fast environments for tests of policies; each needs one ability.

They follow Gymnasium's API and are called with keyword settings.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies.base.type_aliases import Structure
from tfpolicies.errors import EnvError


class MemoryEnv(gym.Env):
    """Shows a cue at the first step and asks for it at the last one; needs a memory.

    An observation is `[cue one-hot (cues), asked]`; between the first step and the last one it is
    zeros. The answer has reward 1 if it is the cue, and ends the episode; other actions have none.
    Without a memory the best average return is `1 / cues`.

    Args:
        cues: number of cues.
        delay: steps between the cue and the question.

    >>> env = MemoryEnv(cues=2, delay=1)
    >>> cue = env.reset(seed=0)[0][:2].argmax()
    >>> env.step(0)[0], env.step(0)[0]
    (array([0., 0., 0.], dtype=float32), array([0., 0., 1.], dtype=float32))
    >>> env.step(cue)[1:4]
    (1.0, True, False)
    """

    def __init__(self, cues: int = 2, delay: int = 3) -> None:
        if cues < 2 or delay < 0:
            raise EnvError(f"cues must be at least 2 and delay at least 0, got {cues} and {delay}.")
        self.observation_space: spaces.Space = spaces.Box(0.0, 1.0, (cues + 1,), np.float32)
        self.action_space: spaces.Space = spaces.Discrete(cues)
        self._cues, self._delay = cues, delay

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict]:
        """Starts an episode with a cue drawn at random."""
        super().reset(seed=seed)
        self._step, self._cue = 0, int(self.np_random.integers(self._cues))
        return self._make_observation(), {}

    def _make_observation(self) -> np.ndarray:
        obs = np.zeros(self._cues + 1, np.float32)
        if self._step == 0:
            obs[self._cue] = 1.0
        obs[-1] = float(self._step == self._delay + 1)
        return obs

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        """Ignores the action, or evaluates it as the answer at the last step."""
        is_question = self._step == self._delay + 1
        reward = float(is_question and int(action) == self._cue)
        self._step += 1
        return self._make_observation(), reward, is_question, False, {}


class MaskedEnv(gym.Env):
    """Allows some actions at each step, drawn at random; any other one ends the episode.

    Observations are `{"observations": [step / length], "action_mask": [actions]}`. An allowed
    action has reward 1; a forbidden one has -1 and terminates, so `length` is the best return, and
    a policy that respects masks always gets it.

    Args:
        actions: number of actions.
        length: steps of an episode.

    >>> env = MaskedEnv(actions=3, length=2)
    >>> mask = env.reset(seed=1)[0]["action_mask"]
    >>> mask, env.step(int(mask.argmin()))[1:4]
    (array([0, 0, 1], dtype=int8), (-1.0, True, False))
    """

    def __init__(self, actions: int = 4, length: int = 10) -> None:
        if actions < 2 or length < 1:
            raise EnvError(
                f"actions must be at least 2 and length at least 1, got {actions} and {length}."
            )
        box = spaces.Box(0.0, 1.0, (1,), np.float32)
        mask = spaces.Box(0, 1, (actions,), np.int8)
        self.observation_space: spaces.Space = spaces.Dict(observations=box, action_mask=mask)
        self.action_space: spaces.Space = spaces.Discrete(actions)
        self._length = length

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._step = 0
        return self._make_observation(), {}

    def _make_observation(self) -> dict[str, np.ndarray]:
        count = int(self.action_space.n)  # type: ignore[attr-defined]
        self._mask = (self.np_random.random(count) < 0.5).astype(np.int8)
        self._mask[self.np_random.integers(count)] = 1
        progress = np.array([self._step / self._length], np.float32)
        return {"observations": progress, "action_mask": self._mask.copy()}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        """Takes an action and draws the next mask."""
        allowed = bool(self._mask[int(action)])
        self._step += 1
        over = not allowed or self._step == self._length
        return self._make_observation(), 1.0 if allowed else -1.0, over, False, {}


class RandomEnv(gym.Env):
    """Environment with any spaces: observations and rewards are random, actions are checked.

    Episodes of `length` steps end alternately by termination and by truncation.

    Args:
        observation_space: of the observations.
        action_space: of the actions.
        length: steps of an episode.

    Raises:
        EnvError: by `step`, for an action outside `action_space`.

    >>> env = RandomEnv(spaces.Dict(a=spaces.Discrete(3)), spaces.Box(0, 1, (2,)), length=1)
    >>> obs, _ = env.reset(seed=0)
    >>> env.observation_space.contains(obs), env.step(np.zeros(2, np.float32))[2:4]
    (True, (True, False))
    """

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, length: int = 10
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self._length = length
        self._episode = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
            self._episode = -1
        self._step, self._episode = 0, self._episode + 1
        return self.observation_space.sample(), {}

    def step(self, action: Structure) -> tuple[Any, float, bool, bool, dict]:
        """Checks the action and draws the next observation and reward."""
        if not self.action_space.contains(action):
            raise EnvError(f"The action {action!r} is not in {self.action_space}.")
        self._step += 1
        over = self._step >= self._length
        is_truncated = over and self._episode % 2 == 1
        reward = float(self.np_random.standard_normal())
        return self.observation_space.sample(), reward, over and not is_truncated, is_truncated, {}
