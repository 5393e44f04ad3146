"""The commands `record` (video of a trained policy) and `watch` (window)."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tfpolicies.cli.ends import DONE
from tfpolicies.cli.settings import algorithm_of, imported
from tfpolicies.cli.sources import (
    environment_for,
    find_checkpoint,
    load,
    load_policy,
    print_files,
    run_of,
)
from tfpolicies.envs.making import check_source
from tfpolicies.errors import UsageError
from tfpolicies.reporting.console import CommandConsole, counted, summary_table
from tfpolicies.reporting.video import ENDINGS, require_video_packages
from tfpolicies.system.paths import resolve_path

if TYPE_CHECKING:
    from tfpolicies.algorithms.recording import Scene

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
"""Environment variables of a display, a virtual one included."""


def record(args: argparse.Namespace) -> int:
    """Makes a video of episodes of a trained policy."""
    console = CommandConsole()
    require_video_packages()
    checkpoint = find_checkpoint(args.source, best=args.best)
    paths = _paths(args.to, checkpoint, gif=args.gif)
    with scene_of(args, checkpoint, console) as scene:
        from tfpolicies.algorithms import recording

        seeds = range(args.seed, args.seed + args.episodes)
        with console.status(f"recording {counted(args.episodes, 'episode')}"):
            made = recording.record(scene, paths, seeds, args.fps, args.max_steps)
    figures: dict[str, Any] = {
        f"episode {i}": _told(total, length)
        for i, (total, length) in enumerate(zip(made.returns, made.lengths, strict=True), 1)
    }
    console.print(summary_table(title_of(scene), figures))
    print_files(console, {path.suffix[1:].upper(): path for path in made.paths})
    return DONE


def watch(args: argparse.Namespace) -> int:
    """Shows episodes of a trained policy in a window."""
    console = CommandConsole()
    checkpoint = find_checkpoint(args.source, best=args.best)
    if not any(os.environ.get(name) for name in _DISPLAYS):
        raise UsageError(
            "watch opens a window, but there is no display: neither DISPLAY nor WAYLAND_DISPLAY is "
            f"set. Make a video instead: tfpolicies record {args.source}"
        )
    with scene_of(args, checkpoint, console) as scene:
        from tfpolicies.algorithms.recording import playing
        from tfpolicies.envs.rendering import WINDOW
        from tfpolicies.rollout.filming import Camera

        console.print(title_of(scene), highlight=False)
        with playing(scene, [WINDOW], Camera(None, args.max_steps)) as play:
            for i in range(args.episodes):
                played = play(args.seed + i)
                told = _told(played.episode_reward, played.episode_length)
                console.print(f"episode {i + 1}  {told}", highlight=False)
    return DONE


def _told(total: float, length: int) -> str:
    return f"return {total:,.2f}, {counted(length, 'step')}"


def title_of(scene: Scene) -> str:
    """Returns the class of the policy or algorithm and whether it is greedy, as a title."""
    how = "sampling" if scene.explore else "greedy"
    return f"{type(scene.player).__name__}, {how}"


def _paths(to: str | None, checkpoint: Path, *, gif: bool) -> list[Path]:
    """Returns the paths of the videos.

    Raises:
        UsageError: for a file with another suffix.
    """
    run = run_of(checkpoint)
    home = resolve_path("videos") if run is None else run.videos
    path = home if to is None else resolve_path(to)
    if path.suffix.lower() not in ENDINGS:
        if path.suffix and not path.is_dir():
            raise UsageError(
                f"--to takes a file that ends in {' or '.join(ENDINGS)}, or a folder, got {to!r}."
            )
        path = path / f"{checkpoint.name}.mp4"
    return [path, path.with_suffix(".gif")] if gif and path.suffix != ".gif" else [path]


@contextlib.contextmanager
def scene_of(args: argparse.Namespace, checkpoint: Path, console: Console) -> Iterator[Scene]:
    """Yields what is played and in which environment.

    It is a policy, or the algorithm if there are several policies or agents.
    """
    if args.env is not None:
        check_source(args.env)
    load(console)
    from tfpolicies.algorithms.recording import Scene, has_several_agents

    how = {"explore": args.explore, "allow_other_spaces": args.allow_other_spaces}
    if len([*checkpoint.glob("policies/*")]) <= 1:
        policy = load_policy(checkpoint, console, args, explore=args.explore)
        scene = Scene(policy, environment_for(policy.config, args.env), **how)
        if not has_several_agents(scene):
            yield scene
            return
    algorithm = _restored(args, checkpoint)
    try:
        yield Scene(algorithm, environment_for(algorithm.config, args.env), **how)
    finally:
        algorithm.stop()


def _restored(args: argparse.Namespace, checkpoint: Path) -> Any:
    """Restores the algorithm of a checkpoint, with a single environment."""
    from tfpolicies.algorithms.algorithm import Algorithm
    from tfpolicies.config.callbacks import DefaultCallbacks

    few = {"num_rollout_workers": 0, "num_envs_per_worker": 1, "env_processes": 0}
    given: dict[str, Any] = {"callbacks": DefaultCallbacks}  # replaces the callbacks of training
    if args.env is not None:
        given["env"] = args.env
    if args.model is not None:
        given["model"] = {"custom_model": imported("model", args.model)}
    mapping = args.policy_mapping
    kind = Algorithm if args.algo is None else algorithm_of(args.algo)
    return kind.from_checkpoint(
        checkpoint,
        policy_mapping_fn=None if mapping is None else imported("policy_mapping", mapping),
        config={**few, "log_level": "ERROR", **given},
        allow_other_spaces=args.allow_other_spaces,
        model_work_limit=args.model_work_limit,
    )
