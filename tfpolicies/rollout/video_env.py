"""Records episodes: wraps an environment so that its frames are rendered while a policy plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.envs.env_factory import EnvContext, make_environments
from tfpolicies.envs.multi_agent_env import ALL, MultiAgentEnv, MultiAgentStepResult
from tfpolicies.envs.rendering import get_render_fps, render_frames, suppress_sdl_warning
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.connector_env import connect_environments
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.evaluation import play_episodes
from tfpolicies.rollout.sampler import EvaluationDuration

AnyEnv = gym.Env[Any, Any] | MultiAgentEnv

ShowFrame = Callable[[np.ndarray, int, float], None]
"""Called with a frame, the steps of the episode so far, and its return so far."""

PlayEpisode = Callable[[int], RolloutMetrics]
"""Plays the episode of a seed."""


class VideoRecorder:
    """Renders an environment from a reset with a seed to the end of that episode.

    Steps after that, until the next seeded reset, are not recorded.

    Args:
        show_frame: receives the frames; None to render nothing.
        max_steps: episodes are truncated after this many steps.

    Attributes:
        fps: frames per second, as the environment declares them.
    """

    def __init__(self, show_frame: ShowFrame | None, max_steps: int) -> None:
        self.fps = 0.0
        self._show_frame = show_frame
        self._max_steps = max_steps
        self._is_recording = False
        self._steps, self._return = 0, 0.0

    def wrap(self, env: AnyEnv) -> Any:
        self.fps = get_render_fps(env)
        return (
            _RecordedMultiAgentEnv(env, self)
            if isinstance(env, MultiAgentEnv)
            else _RecordedEnv(env, self)
        )

    def on_reset(self, env: AnyEnv, seed: int | None) -> None:
        self._is_recording = seed is not None
        self._steps, self._return = 0, 0.0
        self._render(env)

    def on_step(self, env: AnyEnv, reward: float, *, ended: bool) -> bool:
        """Records a step; returns whether the episode must be truncated."""
        self._steps += 1
        self._return += reward
        self._render(env)
        is_cut = self._is_recording and self._steps >= self._max_steps
        self._is_recording = self._is_recording and not (ended or is_cut)
        return is_cut and not ended

    def _render(self, env: AnyEnv) -> None:
        if self._is_recording and self._show_frame is not None:
            # The first frame of an episode opens SDL, as pygame does for each environment.
            drawing_context = (
                suppress_sdl_warning() if self._steps == 0 else contextlib.nullcontext()
            )
            with drawing_context:
                frames = render_frames(env)
            for frame in frames:
                self._show_frame(frame, self._steps, self._return)


class _RecordedEnv(gym.Wrapper):
    """A recorded environment with one agent."""

    def __init__(self, env: gym.Env, recorder: VideoRecorder) -> None:
        super().__init__(env)
        self._recorder = recorder

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        del options  # never passed
        result = self.env.reset(seed=seed)
        self._recorder.on_reset(self.env, seed)
        return result

    def step(self, action: Structure) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        ended = bool(terminated or truncated)
        is_cut = self._recorder.on_step(self.env, float(reward), ended=ended)
        return obs, reward, terminated, truncated or is_cut, info


class _RecordedMultiAgentEnv(MultiAgentEnv):
    """A recorded environment with several agents."""

    def __init__(self, env: MultiAgentEnv, recorder: VideoRecorder) -> None:
        self.env = env
        self._recorder = recorder
        for name in ("observation_space", "action_space"):
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))
        self.get_agent_ids = env.get_agent_ids  # type: ignore[method-assign]

    def get_observation_space(self, agent_id: Hashable) -> gym.Space[Any]:
        return self.env.get_observation_space(agent_id)

    def get_action_space(self, agent_id: Hashable) -> gym.Space[Any]:
        return self.env.get_action_space(agent_id)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        del options
        result = self.env.reset(seed=seed)
        self._recorder.on_reset(self.env, seed)
        return result

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        obs, rewards, terminateds, truncateds, infos = self.env.step(action_dict)
        ended = bool(terminateds[ALL] or truncateds[ALL])
        is_cut = self._recorder.on_step(self.env, float(sum(rewards.values())), ended=ended)
        truncateds = {**truncateds, ALL: True} if is_cut else truncateds
        return MultiAgentStepResult(obs, rewards, terminateds, truncateds, infos)

    def close(self) -> None:
        self.env.close()


@contextlib.contextmanager
def open_episode_player(
    policy: Policy, make_env: Callable[[EnvContext], Any], *, allow_other_spaces: bool
) -> Iterator[PlayEpisode]:
    """Yields a function that plays episodes with one policy, as evaluations do.

    Args:
        policy: acts; its own config says whether it explores.
        make_env: creates the environment.
        allow_other_spaces: see `require_trained_spaces`.

    Raises:
        EnvError: if the environment has several agents.
        SpaceError: if its spaces differ from those in training.
    """
    envs = make_environments(make_env, 1, EnvContext({}))
    try:
        envs = connect_environments(envs, policy, allow_other_spaces=allow_other_spaces)
        yield lambda seed: play_episodes(
            policy, envs, EvaluationDuration(1, by_episodes=True), seeds=[seed]
        )[0]
    finally:
        envs.close()
