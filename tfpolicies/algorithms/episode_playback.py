"""Plays episodes with trained policies: as videos, in a window, or without rendering."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.algorithms.config_completion import EnvSource
from tfpolicies.algorithms.evaluator import Evaluator
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.envs.env_checker import preserve_global_rngs
from tfpolicies.envs.env_factory import EnvContext, make_any_environments, takes_no_arguments
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.rendering import (
    FRAME_MODES,
    make_renderable_env,
    render_frames,
    suppress_sdl_warning,
)
from tfpolicies.errors import UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.reporting.notebook import make_media_html
from tfpolicies.reporting.video import open_video, require_video_packages
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.sampler import EvaluationDuration
from tfpolicies.rollout.video_env import PlayEpisode, VideoRecorder, open_episode_player
from tfpolicies.system.paths import resolve_path

MAX_STEPS = 10_000
"""Steps after which a rendered episode is cut."""

_LAST_PICTURE_SECONDS = 1.0  # seconds for which the last picture of an episode is shown


class Recording(NamedTuple):
    """The return value of `record_video`."""

    paths: list[Path]  # the files, absolute
    returns: list[float]  # of each episode
    lengths: list[int]  # of each episode, in steps

    def _repr_html_(self) -> str:
        """Shows the video in a notebook."""
        returns = ", ".join(f"{value:.6g}" for value in self.returns)
        return make_media_html(self.paths, f"Video of episodes with the returns {returns}")


class PlaySetup(NamedTuple):
    """A policy or algorithm and the environment in which it plays.

    Attributes:
        player: a `Policy`, or an `Algorithm`, whose policies play as in its evaluations.
        env: name, class or creator of the environment; None for that of the player.
        explore: whether actions are sampled.
        allow_other_spaces: whether dtypes and action bounds may differ from those in training.
        env_config: the settings of the environment; None for those of the player.
    """

    player: Any
    env: Any = None
    explore: bool = False
    allow_other_spaces: bool = False
    env_config: Mapping[str, Any] | None = None

    @property
    def is_single_policy(self) -> bool:
        return isinstance(self.player, Policy)


def record_video(
    player: Policy,
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    env: EnvSource = None,
    *,
    episodes: int = 1,
    seed: int = 0,
    explore: bool = False,
    fps: float | None = None,
    max_steps: int = MAX_STEPS,
) -> Recording:
    """Records episodes of a policy, or of the policies of an algorithm, as a video.

    It creates a separate environment and copies of the policies, so training is not affected. Steps
    and return so far are shown below each picture. Needs `pip install 'tfpolicies[video]'`.

    Args:
        player: a `Policy` or an `Algorithm`.
        path: the file, which ends in .mp4 or .gif; or several files for the same video.
        env: the environment: a name, a class or a function, as `config.environment` takes it, with
            the `env_config` of training unless it is a function without parameters; None for the
            environment of training. It is created with a `render_mode` that returns pictures.
        episodes: how many to play.
        seed: the first episode begins with `reset(seed=seed)`, the next one with `seed + 1`.
        explore: whether actions are sampled; else they are greedy.
        fps: steps per second; None for the environment's frame rate, or else 30.
        max_steps: steps after which an episode is cut.

    Raises:
        UsageError: if an argument is wrong.
        EnvError: if the environment cannot be created, or does not render.
        SpaceError: if it has other spaces than the policy.
        MissingPackageError: if the packages for videos are not installed.
    """
    raw_paths = [path] if isinstance(path, str | PathLike) else path
    for name, value in (("episodes", episodes), ("max_steps", max_steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a whole number, 1 or more, got {value!r}.")
    seeds, paths = range(seed, seed + episodes), [resolve_path(raw_path) for raw_path in raw_paths]
    return record_episodes(PlaySetup(player, env, explore), paths, seeds, fps, max_steps)


def record_episodes(
    setup: PlaySetup,
    paths: Sequence[Path],
    seeds: Sequence[int],
    fps: float | None = None,
    max_steps: int = MAX_STEPS,
    on_picture: Callable[[int, int], None] = lambda episode, step: None,
) -> Recording:
    """Records one episode for each seed; see `record_video`.

    Args:
        setup: player and environment.
        paths: the files.
        seeds: of the episodes.
        fps: as in `record_video`.
        max_steps: as in `record_video`.
        on_picture: called after each picture with the number of the episode, from 1, and the step.
    """
    require_renderable(setup)

    def show(picture: np.ndarray, step: int, total: float) -> None:
        episode = (
            {"episode": f"{len(played_episodes) + 1} of {len(seeds)}"} if len(seeds) > 1 else {}
        )
        video.add_picture(picture, {**episode, "step": f"{step}", "return": _format_return(total)})
        on_picture(len(played_episodes) + 1, step)

    played_episodes: list[RolloutMetrics] = []
    camera = VideoRecorder(show, max_steps)
    with (
        open_player(setup, FRAME_MODES, camera) as play,
        open_video(paths, fps or camera.fps) as video,
    ):
        for seed in seeds:
            played_episodes.append(play(seed))
            video.repeat_last(_LAST_PICTURE_SECONDS)
    returns = [episode.episode_reward for episode in played_episodes]
    return Recording(list(paths), returns, [episode.episode_length for episode in played_episodes])


def require_renderable(setup: PlaySetup) -> None:
    """Checks that a player can be recorded, by rendering its environment once.

    Raises:
        EnvError: if the environment cannot be created, or does not render.
        MissingPackageError: if the packages for videos are not installed.
    """
    require_video_packages()
    with preserve_global_rngs():
        env = make_renderable_env(*get_env_source(setup), FRAME_MODES)
        try:
            env.reset(seed=0)
            with suppress_sdl_warning():
                render_frames(env)
        finally:
            env.close()


def has_several_agents(setup: PlaySetup) -> bool:
    """Returns whether the environment has several agents, by creating it once.

    Raises:
        EnvError: if it cannot be created.
    """
    source, context = get_env_source(setup)
    with preserve_global_rngs():
        envs: Any = make_any_environments(source, 1, context, checked=False)
        envs.close()
    return isinstance(envs, MultiAgentEnvAdapter)


def play_episodes(setup: PlaySetup, episodes: int, seed: int) -> list[RolloutMetrics]:
    """Returns episodes played by the policies of an algorithm, without rendering.

    Args:
        setup: has an algorithm as player.
        episodes: how many.
        seed: of the first environment; the next one has `seed + 1`.

    Raises:
        EnvError: if the environment cannot be created.
        SpaceError: if it has other spaces than the policies.
    """
    with (
        preserve_global_rngs(),
        _open_evaluation_sampler(setup, *get_env_source(setup), episodes) as sampler,
    ):
        seeds = range(seed, seed + sampler.envs.num_envs)
        return [*sampler.play(EvaluationDuration(episodes, by_episodes=True), seeds).episodes]


@contextlib.contextmanager
def open_player(
    setup: PlaySetup, modes: Sequence[str], camera: VideoRecorder
) -> Iterator[PlayEpisode]:
    """Yields a function that plays one episode for a seed; closes its environment at the end.

    Global random generators that environments share are not changed.

    Args:
        setup: player and environment.
        modes: render modes, the preferred one first.
        camera: records the episodes.

    Raises:
        UsageError: if the player is neither a policy nor an algorithm, or no environment is given.
        EnvError: if the environment cannot be created, or does not render in one of `modes`.
        SpaceError: if it has other spaces than the policy.
    """
    source, context = get_env_source(setup)

    def make_env(env_config: EnvContext) -> Any:
        return camera.wrap(make_renderable_env(source, context, modes))

    with preserve_global_rngs():
        if not setup.is_single_policy:
            with _open_evaluation_sampler(setup, make_env, context) as sampler:
                yield lambda seed: sampler.play(
                    EvaluationDuration(1, by_episodes=True), [seed]
                ).episodes[0]
            return
        changes = {"explore": setup.explore}
        policy = setup.player.driver.copy_with_settings(
            setup.player.policy_id, changes, rebuild=False
        )
        with open_episode_player(
            policy, make_env, allow_other_spaces=setup.allow_other_spaces
        ) as play:
            yield play


def get_env_source(setup: PlaySetup) -> tuple[Any, EnvContext]:
    """Returns the source of the environment, and the context for its creator."""
    config: Any = getattr(setup.player, "config", None)
    if not (setup.is_single_policy or isinstance(config, AlgorithmConfig)):
        raise UsageError(f"The player must be a Policy or an Algorithm, got {setup.player!r:.100}.")
    training_env, env_config = (config.get(name) for name in ("env", "env_config"))
    source = training_env if setup.env is None else setup.env
    if not (isinstance(source, str) or callable(source)):
        raise UsageError(
            f"env must be a name, a class or a function, got {source!r:.100}. Give one, such as "
            "env='CartPole-v1'."
        )
    env_config = env_config if setup.env_config is None else setup.env_config
    return source, EnvContext({} if takes_no_arguments(source) else env_config or {})


@contextlib.contextmanager
def _open_evaluation_sampler(
    setup: PlaySetup, env: EnvSource, env_config: EnvContext, episodes: int = 1
) -> Iterator[Any]:
    """Yields a sampler that plays with copies of an algorithm's policies, without callbacks."""
    training_worker, config = setup.player.worker, setup.player.config
    overrides = {"env": env, "env_config": dict(env_config), "explore": setup.explore}
    overrides |= {"callbacks": DefaultCallbacks}
    config = config.copy(copy_frozen=False).evaluation(
        evaluation_config={**(config.evaluation_config or {}), **overrides},
        evaluation_duration=episodes,
        evaluation_duration_unit="episodes",
        evaluation_num_workers=0,
        custom_evaluation_function=None,
    )

    def make_workers(config: AlgorithmConfig, count: int) -> WorkerSet:
        kind = training_worker.default_policy_class
        return WorkerSet(config=config, default_policy_class=kind, num_workers=count)

    evaluator = Evaluator(config, make_workers, training_worker)
    try:
        workers = evaluator.prepare()
        workers.copy_weights_from(training_worker)
        yield workers.local_worker().sampler
    finally:
        evaluator.stop()


def _format_return(total: float) -> str:
    """Formats a return for the captions.

    >>> _format_return(-1200.0), _format_return(0.125)
    ('-1,200', '0.12')
    """
    return f"{total:,.0f}" if total == round(total) else f"{total:,.2f}"
