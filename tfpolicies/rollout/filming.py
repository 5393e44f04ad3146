"""Records episodes: wraps an environment so that its frames are rendered while a policy plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.envs.making import EnvContext, make_environments
from tfpolicies.envs.multi_agent_env import ALL, MultiAgentEnv, MultiAgentStep
from tfpolicies.envs.rendering import pictures_of, quiet_drawing, render_fps
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.connected import connected
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.evaluation import play_episodes
from tfpolicies.rollout.fitting_spaces import require_trained_spaces
from tfpolicies.rollout.sampler import Goal
from tfpolicies.type_aliases import Structure

AnyEnv = gym.Env[Any, Any] | MultiAgentEnv

Show = Callable[[np.ndarray, int, float], None]
"""Called with a frame, the steps of the episode so far, and its return so far."""

Play = Callable[[int], RolloutMetrics]
"""Plays the episode of a seed."""


class Camera:
    """Renders an environment from a reset with a seed to the end of that episode.

    Steps after that, until the next seeded reset, are not recorded.

    Args:
        show_frame: receives the frames; None to render nothing.
        max_steps: episodes are truncated after this many steps.

    Attributes:
        fps: frames per second, as the environment declares them.
    """

    def __init__(self, show: Show | None, max_steps: int) -> None:
        self.fps = 0.0
        self._show = show
        self._max_steps = max_steps
        self._runs = False
        self._steps, self._return = 0, 0.0

    def in_front_of(self, env: AnyEnv) -> Any:
        """Wraps an environment so that its episodes are recorded."""
        self.fps = render_fps(env)
        return _FilmedAgents(env, self) if isinstance(env, MultiAgentEnv) else _Filmed(env, self)

    def started(self, env: AnyEnv, seed: int | None) -> None:
        """Records the start of an episode."""
        self._runs = seed is not None
        self._steps, self._return = 0, 0.0
        self._look(env)

    def stepped(self, env: AnyEnv, reward: float, *, ended: bool) -> bool:
        """Records a step; returns whether the episode must be truncated."""
        self._steps += 1
        self._return += reward
        self._look(env)
        cut = self._runs and self._steps >= self._max_steps
        self._runs = self._runs and not (ended or cut)
        return cut and not ended

    def _look(self, env: AnyEnv) -> None:
        if self._runs and self._show is not None:
            # The first frame of an episode opens SDL, as pygame does for each environment.
            quiet = quiet_drawing() if self._steps == 0 else contextlib.nullcontext()
            with quiet:
                pictures = pictures_of(env)
            for picture in pictures:
                self._show(picture, self._steps, self._return)


class _Filmed(gym.Wrapper):
    """A recorded environment with one agent."""

    def __init__(self, env: gym.Env, camera: Camera) -> None:
        super().__init__(env)
        self._camera = camera

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        del options  # never passed
        found = self.env.reset(seed=seed)
        self._camera.started(self.env, seed)
        return found

    def step(self, action: Structure) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        ended = bool(terminated or truncated)
        cut = self._camera.stepped(self.env, float(reward), ended=ended)
        return obs, reward, terminated, truncated or cut, info


class _FilmedAgents(MultiAgentEnv):
    """A recorded environment with several agents."""

    def __init__(self, env: MultiAgentEnv, camera: Camera) -> None:
        self.env = env
        self._camera = camera
        for name in ("observation_space", "action_space"):
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))
        self.get_agent_ids = env.get_agent_ids  # type: ignore[method-assign]

    def observation_space_of(self, agent_id: Hashable) -> gym.Space[Any]:
        return self.env.observation_space_of(agent_id)

    def action_space_of(self, agent_id: Hashable) -> gym.Space[Any]:
        return self.env.action_space_of(agent_id)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        del options
        found = self.env.reset(seed=seed)
        self._camera.started(self.env, seed)
        return found

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        obs, rewards, terminateds, truncateds, infos = self.env.step(action_dict)
        ended = bool(terminateds[ALL] or truncateds[ALL])
        cut = self._camera.stepped(self.env, float(sum(rewards.values())), ended=ended)
        truncateds = {**truncateds, ALL: True} if cut else truncateds
        return MultiAgentStep(obs, rewards, terminateds, truncateds, infos)

    def close(self) -> None:
        self.env.close()


@contextlib.contextmanager
def on_stage(
    policy: Policy, make: Callable[[EnvContext], Any], *, allow_other_spaces: bool
) -> Iterator[Play]:
    """Yields a function that plays episodes with one policy, as evaluations do.

    Args:
        policy: acts; its own config says whether it explores.
        make_env: creates the environment.
        allow_other_spaces: see `require_trained_spaces`.

    Raises:
        EnvError: if the environment has several agents.
        SpaceError: if its spaces differ from those in training.
    """
    envs = make_environments(make, 1, EnvContext({}))
    try:
        envs = connected(envs, policy)
        require_trained_spaces(
            policy.policy_id,
            (policy.observation_space, policy.action_space),
            (envs.observation_space, envs.action_space),
            allow_other=allow_other_spaces,
        )
        yield lambda seed: play_episodes(policy, envs, Goal(1, by_episodes=True), seeds=[seed])[0]
    finally:
        envs.close()
