"""Makes environments that render, and returns their frames."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.envs.env_factory import EnvContext, make_any_environments
from tfpolicies.envs.env_registry import EnvSource
from tfpolicies.envs.envpool import is_envpool_name
from tfpolicies.envs.mujoco_render_process import render_in_subprocess
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.vector_adapters import SyncEnvAdapter
from tfpolicies.errors import EnvError
from tfpolicies.system.log_suppression import suppress_native_stderr

FRAME_MODES = ("rgb_array", "rgb_array_list")
"""Render modes that return frames, the preferred one first."""

WINDOW_MODE = "human"
"""Render mode that shows a window."""

_DEFAULT_FPS = 30.0  # for environments whose metadata has no render_fps


def make_renderable_env(source: EnvSource, context: EnvContext, modes: Sequence[str]) -> Any:
    """Makes one environment that renders in one of some modes.

    Its creator is called with `render_mode` among the settings. If the creator rejects or ignores
    that setting, the environment is made without it and its attribute `render_mode` is set.

    Args:
        source: as `make_any_environments` takes it, but not an instance.
        context: for the creators.
        modes: render modes, the preferred one first.

    Returns:
        A `gymnasium.Env` or a `MultiAgentEnv`.
    """
    plain_env = _make_single_env(source, context)
    mode = next((mode for mode in modes if mode in get_render_modes(plain_env)), None)
    if mode is None:
        plain_env.close()
        raise EnvError(
            f"{describe_env_source(source)} has no render_mode {' or '.join(map(repr, modes))}: "
            f"its metadata['render_modes'] is {get_render_modes(plain_env)}. "
            f"{_suggest_fix(plain_env, modes)}"
        )
    if getattr(plain_env, "render_mode", None) == mode:
        return plain_env
    env = plain_env
    with contextlib.suppress(Exception):  # a creator may raise anything about a setting
        env = _make_single_env(
            source, context.copy_with_overrides({**context, "render_mode": mode})
        )
    if env is not plain_env:
        plain_env.close()
    if getattr(env, "render_mode", None) != mode:
        with contextlib.suppress(AttributeError):  # a property
            env.unwrapped.render_mode = mode
    return env


def _suggest_fix(env: gym.Env, modes: Sequence[str]) -> str:
    if WINDOW_MODE in modes and set(FRAME_MODES) & set(get_render_modes(env)):
        return "Make a video: tfpolicies record."
    return (
        "Write a `render` that returns a picture, uint8 [height, width, 3], and set "
        "metadata = {'render_modes': ['rgb_array'], 'render_fps': 30}; or name another environment "
        "with the same spaces."
    )


def _make_single_env(source: EnvSource, context: EnvContext) -> Any:
    """Makes one environment; refuses vector environments, which cannot render a single one."""
    if isinstance(source, str) and is_envpool_name(source):
        raise EnvError(
            f"{source!r} cannot be rendered: EnvPool returns only observations. Name the same task "
            "of Gymnasium, such as ALE/Pong-v5 for envpool:Pong-v5."
        )
    envs = make_any_environments(source, 1, context, checked=False)
    if isinstance(envs, SyncEnvAdapter | MultiAgentEnvAdapter):
        return render_in_subprocess(envs.envs[0])
    envs.close()  # type: ignore[union-attr]
    raise EnvError(
        f"{describe_env_source(source)} is a vector environment, which cannot render a single one. "
        "Name an environment with the same spaces that is a gymnasium.Env."
    )


def get_render_modes(env: gym.Env) -> list[str]:
    return list((getattr(env, "metadata", None) or {}).get("render_modes") or ())


def get_render_fps(env: gym.Env) -> float:
    """Returns the frames per second of an environment's metadata, or a default."""
    fps = (getattr(env, "metadata", None) or {}).get("render_fps")
    return float(fps) if fps else _DEFAULT_FPS


def suppress_sdl_warning() -> contextlib.AbstractContextManager[None]:
    """Returns a context that hides SDL's message about a missing XDG_RUNTIME_DIR.

    Frames need no such folder; pygame opens SDL with the first frame of each environment.
    """
    return suppress_native_stderr(rb"XDG_RUNTIME_DIR")


def render_frames(env: gym.Env) -> list[np.ndarray]:
    """Renders an environment: one frame, or those since the last call.

    Returns:
        uint8 `[height, width, 3]` each.
    """
    try:
        frames = env.render()
    except Exception as error:
        why = str(error).removesuffix(".")
        raise EnvError(f"{describe_env_source(env)} could not be rendered: {why}.") from error
    return [_to_frame(env, frame) for frame in (frames if isinstance(frames, list) else [frames])]


def _to_frame(env: gym.Env, frame: Any) -> np.ndarray:
    array = np.asarray(frame)
    if array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() <= 1:
        array = np.round(array * 255).astype(np.uint8)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
        is_array = isinstance(frame, np.ndarray)
        description = f"{array.dtype} {array.shape}" if is_array else type(frame).__name__
        raise EnvError(
            f"{describe_env_source(env)} must render pictures, uint8 [height, width, 3], but "
            f"`render` gave {description}. Return one where render_mode is 'rgb_array', which is "
            "among the settings that the environment is made with (env_config['render_mode'])."
        )
    return array


def describe_env_source(env: EnvSource) -> str:
    """Returns how messages call an environment or an environment source."""
    if isinstance(env, str):
        return f"The environment {env!r}"
    spec = getattr(env, "spec", None)
    if isinstance(spec, gym.envs.registration.EnvSpec):
        return f"The environment {spec.id!r}"
    named = env if isinstance(env, type) or not isinstance(env, gym.Env) else type(env.unwrapped)
    return f"The environment {getattr(named, '__name__', type(named).__name__)}"
