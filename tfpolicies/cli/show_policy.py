"""The commands `record` (video of a trained policy) and `watch` (window)."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tfpolicies.cli.exit_codes import DONE
from tfpolicies.cli.run_lookup import (
    find_checkpoint,
    find_run_folder,
    get_environment,
    import_policy_classes,
    load_policy,
    load_tensorflow_with_status,
    print_files,
)
from tfpolicies.cli.train_options import get_algorithm_class, import_option
from tfpolicies.config.settings_allowlist import ALGORITHM_SETTINGS, decode_settings
from tfpolicies.envs.env_factory import check_env_name
from tfpolicies.errors import UsageError
from tfpolicies.reporting.progress_display import CommandConsole, format_count, make_summary_table
from tfpolicies.reporting.video import VIDEO_SUFFIXES, require_video_packages
from tfpolicies.storage.checkpoint import read_manifest
from tfpolicies.storage.import_paths import index_by_path
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST
from tfpolicies.system.paths import resolve_path

if TYPE_CHECKING:
    from tfpolicies.algorithms.episode_playback import PlaySetup

_SECONDS_BETWEEN_LINES = 10.0
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
"""Environment variables of a display, a virtual one included."""


def record(args: argparse.Namespace) -> int:
    """Makes a video of episodes of a trained policy."""
    console = CommandConsole()
    require_video_packages()
    checkpoint = find_checkpoint(args.source, best=args.best)
    paths = _get_video_paths(args.to, checkpoint, gif=args.gif)
    with open_recording_source(args, checkpoint, console) as source:
        from tfpolicies.algorithms import episode_playback as episode_playback

        seeds = range(args.seed, args.seed + args.episodes)
        with console.status(f"recording {format_count(args.episodes, 'episode')}"):
            recording_result = episode_playback.record_episodes(
                source, paths, seeds, args.fps, args.max_steps, _RecordingProgress(console).show
            )
    figures: dict[str, Any] = {
        f"episode {i}": _describe_episode(total, length)
        for i, (total, length) in enumerate(
            zip(recording_result.returns, recording_result.lengths, strict=True), 1
        )
    }
    console.print(make_summary_table(make_title(source), figures))
    print_files(console, {path.suffix[1:].upper(): path for path in recording_result.paths})
    return DONE


class _RecordingProgress:
    """Prints how far a recording is, every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed_at = time.monotonic()

    def show(self, episode: int, step: int) -> None:
        if time.monotonic() - self._printed_at > _SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            count = format_count(step, "step")
            self._console.print(f"episode {episode}: {count} drawn so far", highlight=False)


def watch(args: argparse.Namespace) -> int:
    """Shows episodes of a trained policy in a window."""
    console = CommandConsole()
    checkpoint = find_checkpoint(args.source, best=args.best)
    if not any(os.environ.get(name) for name in _DISPLAYS):
        raise UsageError(
            "watch opens a window, but there is no display: neither DISPLAY nor WAYLAND_DISPLAY is "
            f"set. Make a video instead: tfpolicies record {args.source}"
        )
    with open_recording_source(args, checkpoint, console) as source:
        from tfpolicies.algorithms.episode_playback import open_player
        from tfpolicies.envs.rendering import WINDOW_MODE
        from tfpolicies.rollout.video_env import VideoRecorder

        console.print(make_title(source), highlight=False)
        with open_player(source, [WINDOW_MODE], VideoRecorder(None, args.max_steps)) as play:
            for i in range(args.episodes):
                episode = play(args.seed + i)
                description = _describe_episode(episode.episode_reward, episode.episode_length)
                console.print(f"episode {i + 1}  {description}", highlight=False)
    return DONE


def _describe_episode(total: float, length: int) -> str:
    return f"return {total:,.2f}, {format_count(length, 'step')}"


def make_title(source: PlaySetup) -> str:
    mode = "sampling" if source.explore else "greedy"
    return f"{type(source.player).__name__}, {mode}"


def _get_video_paths(to: str | None, checkpoint: Path, *, gif: bool) -> list[Path]:
    run = find_run_folder(checkpoint)
    default_folder = resolve_path("videos") if run is None else run.videos
    path = default_folder if to is None else resolve_path(to)
    if path.suffix.lower() not in VIDEO_SUFFIXES:
        if path.suffix and not path.is_dir():
            raise UsageError(
                f"--to takes a file that ends in {' or '.join(VIDEO_SUFFIXES)}, or a folder, got "
                f"{to!r}."
            )
        path = path / f"{checkpoint.name}.mp4"
    return [path, path.with_suffix(".gif")] if gif and path.suffix != ".gif" else [path]


@contextlib.contextmanager
def open_recording_source(
    args: argparse.Namespace, checkpoint: Path, console: Console
) -> Iterator[PlaySetup]:
    """Yields the player and its environment.

    It is a policy, or the algorithm if there are several policies or agents.
    """
    if args.env is not None:
        check_env_name(args.env)
    load_tensorflow_with_status(console)
    from tfpolicies.algorithms.episode_playback import PlaySetup, has_several_agents

    names = ("explore", "allow_other_spaces", "env_config")
    options = {name: getattr(args, name) for name in names}
    if len([*checkpoint.glob("policies/*")]) <= 1:
        policy = load_policy(checkpoint, console, args, explore=args.explore)
        source = PlaySetup(policy, get_environment(policy.config, args.env), **options)
        if not has_several_agents(source):
            yield source
            return
    algorithm = _restore_algorithm(args, checkpoint)
    try:
        yield PlaySetup(algorithm, get_environment(algorithm.config, args.env), **options)
    finally:
        algorithm.stop()


def _restore_algorithm(args: argparse.Namespace, checkpoint: Path) -> Any:
    from tfpolicies.algorithms.algorithm import Algorithm
    from tfpolicies.config.callbacks import DefaultCallbacks

    single_env = {"num_rollout_workers": 0, "num_envs_per_worker": 1, "env_processes": 0}
    overrides: dict[str, Any] = {
        "callbacks": DefaultCallbacks
    }  # replaces the callbacks of training
    if args.env is not None:
        overrides["env"] = args.env
    if args.env_config is not None:
        overrides["env_config"] = args.env_config
    if args.model is not None:
        overrides["model"] = {"custom_model": import_option("model", args.model)}
    if args.policy_class:
        overrides["policies"] = _read_policy_specs(checkpoint, import_policy_classes(args))
    mapping = args.policy_mapping
    algorithm_class = Algorithm if args.algo is None else get_algorithm_class(args.algo)
    return algorithm_class.from_checkpoint(
        checkpoint,
        policy_mapping_fn=None if mapping is None else import_option("policy_mapping", mapping),
        config={**single_env, "log_level": "ERROR", **overrides},
        allow_other_spaces=args.allow_other_spaces,
        model_work_limit=args.model_work_limit,
    )


def _read_policy_specs(checkpoint: Path, classes: Sequence[type]) -> Any:
    """Returns the setting `policies` of a checkpoint, with the caller's classes in it."""
    manifest = read_manifest(checkpoint, ALGORITHM_MANIFEST, kind="Algorithm")
    settings = decode_settings(
        manifest["config"]["settings"], ALGORITHM_SETTINGS, objects=index_by_path(classes)
    )
    return settings.get("policies", {})
