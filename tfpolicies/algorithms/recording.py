"""Plays episodes with trained policies: as videos, in a window, or without rendering."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.algorithms.config_completion import EnvSource
from tfpolicies.algorithms.evaluator import Evaluator
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.envs.checking import same_randomness
from tfpolicies.envs.making import EnvContext, make_any_environments
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.rendering import PICTURES, make_rendering, pictures_of, quiet_drawing
from tfpolicies.errors import UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.reporting.video import new_video, require_video_packages
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.filming import Camera, Play, on_stage
from tfpolicies.rollout.sampler import Goal
from tfpolicies.system.paths import resolve_path

MAX_STEPS = 10_000
"""Steps after which a rendered episode is cut."""

_HELD = 1.0  # seconds for which the last picture of an episode is shown


class Recorded(NamedTuple):
    """The return value of `record_video`."""

    paths: list[Path]  # the files, absolute
    returns: list[float]  # of each episode
    lengths: list[int]  # of each episode, in steps


class Scene(NamedTuple):
    """A policy or algorithm and the environment in which it plays.

    Attributes:
        player: a `Policy`, or an `Algorithm`, whose policies play as in its evaluations.
        env: name, class or creator of the environment; None for that of the player.
        explore: whether actions are sampled.
        allow_other_spaces: whether dtypes and action bounds may differ from those in training.
    """

    player: Any
    env: Any = None
    explore: bool = False
    allow_other_spaces: bool = False

    @property
    def is_of_policy(self) -> bool:
        """Whether the player is a single policy, not an algorithm."""
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
) -> Recorded:
    """Records episodes of a policy, or of the policies of an algorithm, as a video.

    It creates a separate environment and copies of the policies, so training is not affected. Steps
    and return so far are shown below each picture. Needs `pip install 'tfpolicies[video]'`.

    Args:
        player: a `Policy` or an `Algorithm`.
        path: the file, which ends in .mp4 or .gif; or several files for the same video.
        env: the environment: a name, a class or a function, as `config.environment` takes it; None
            for that of training. It is created with a `render_mode` that returns pictures.
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
    given = [path] if isinstance(path, str | PathLike) else path
    for name, value in (("episodes", episodes), ("max_steps", max_steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a whole number, 1 or more, got {value!r}.")
    seeds, paths = range(seed, seed + episodes), [resolve_path(each) for each in given]
    return record(Scene(player, env, explore), paths, seeds, fps, max_steps)


def record(
    scene: Scene,
    paths: Sequence[Path],
    seeds: Sequence[int],
    fps: float | None = None,
    max_steps: int = MAX_STEPS,
) -> Recorded:
    """Records one episode for each seed; see `record_video`."""
    require_pictures(scene)

    def show(picture: np.ndarray, step: int, total: float) -> None:
        episode = {"episode": f"{len(played) + 1} of {len(seeds)}"} if len(seeds) > 1 else {}
        video.show(picture, {**episode, "step": f"{step}", "return": _told(total)})

    played: list[RolloutMetrics] = []
    camera = Camera(show, max_steps)
    with playing(scene, PICTURES, camera) as play, new_video(paths, fps or camera.fps) as video:
        for seed in seeds:
            played.append(play(seed))
            video.hold(_HELD)
    returns = [episode.episode_reward for episode in played]
    return Recorded(list(paths), returns, [episode.episode_length for episode in played])


def require_pictures(scene: Scene) -> None:
    """Checks that a player can be recorded, by rendering its environment once.

    Raises:
        EnvError: if the environment cannot be created, or does not render.
        MissingPackageError: if the packages for videos are not installed.
    """
    require_video_packages()
    with same_randomness():
        env = make_rendering(*_place(scene), PICTURES)
        try:
            env.reset(seed=0)
            with quiet_drawing():
                pictures_of(env)
        finally:
            env.close()


def has_several_agents(scene: Scene) -> bool:
    """Returns whether the environment has several agents, by creating it once.

    Raises:
        EnvError: if it cannot be created.
    """
    source, context = _place(scene)
    with same_randomness():
        made: Any = make_any_environments(source, 1, context, checked=False)
        made.close()
    return isinstance(made, MultiAgentEnvironments)


def play(scene: Scene, episodes: int, seed: int) -> list[RolloutMetrics]:
    """Returns episodes played by the policies of an algorithm, without rendering.

    Args:
        setup: has an algorithm as player.
        episodes: how many.
        seed: of the first environment; the next one has `seed + 1`.

    Raises:
        EnvError: if the environment cannot be created.
        SpaceError: if it has other spaces than the policies.
    """
    with same_randomness(), _evaluating(scene, *_place(scene), episodes) as sampler:
        seeds = range(seed, seed + sampler.envs.num_envs)
        return [*sampler.play(Goal(episodes, by_episodes=True), seeds).episodes]


@contextlib.contextmanager
def playing(scene: Scene, modes: Sequence[str], camera: Camera) -> Iterator[Play]:
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
    source, context = _place(scene)

    def make(env_config: EnvContext) -> Any:
        return camera.in_front_of(make_rendering(source, context, modes))

    with same_randomness():
        if not scene.is_of_policy:
            with _evaluating(scene, make, context) as sampler:
                yield lambda seed: sampler.play(Goal(1, by_episodes=True), [seed]).episodes[0]
            return
        changes = {"explore": scene.explore}
        policy = scene.player.driver.copy_with_settings(
            scene.player.policy_id, changes, rebuild=False
        )
        with on_stage(policy, make, allow_other_spaces=scene.allow_other_spaces) as play:
            yield play


def _place(scene: Scene) -> tuple[Any, EnvContext]:
    """Returns the source of the environment, and the context for its creator."""
    config: Any = getattr(scene.player, "config", None)
    if not (scene.is_of_policy or isinstance(config, AlgorithmConfig)):
        raise UsageError(f"The player must be a Policy or an Algorithm, got {scene.player!r:.100}.")
    trained, settings = (config.get(name) for name in ("env", "env_config"))
    source = trained if scene.env is None else scene.env
    if not (isinstance(source, str) or callable(source)):
        raise UsageError(
            f"env must be a name, a class or a function, got {source!r:.100}. Give one, such as "
            "env='CartPole-v1'."
        )
    return source, EnvContext((settings or {}) if source == trained else {})


@contextlib.contextmanager
def _evaluating(
    scene: Scene, env: EnvSource, env_config: EnvContext, episodes: int = 1
) -> Iterator[Any]:
    """Yields a sampler that plays with copies of an algorithm's policies, without callbacks."""
    leader, config = scene.player.worker, scene.player.config
    overrides = {"env": env, "env_config": dict(env_config), "explore": scene.explore}
    overrides |= {"callbacks": DefaultCallbacks}
    config = config.copy(copy_frozen=False).evaluation(
        evaluation_config={**(config.evaluation_config or {}), **overrides},
        evaluation_duration=episodes,
        evaluation_duration_unit="episodes",
        evaluation_num_workers=0,
        custom_evaluation_function=None,
    )

    def new_workers(config: AlgorithmConfig, count: int) -> WorkerSet:
        kind = leader.default_policy_class
        return WorkerSet(config=config, default_policy_class=kind, num_workers=count)

    evaluator = Evaluator(config, new_workers, leader)
    try:
        workers = evaluator.prepare()
        workers.follow(leader)
        yield workers.local_worker().sampler
    finally:
        evaluator.stop()


def _told(total: float) -> str:
    """Formats a return for the captions.

    >>> _told(-1200.0), _told(0.125)
    ('-1,200', '0.12')
    """
    return f"{total:,.0f}" if total == round(total) else f"{total:,.2f}"
