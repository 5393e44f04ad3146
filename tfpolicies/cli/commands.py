"""The commands `evaluate`, `export` and `play-exported`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from tfpolicies.cli.exit_codes import DONE
from tfpolicies.cli.export_playback import describe_loaded_packages, find_export, play_in_subprocess
from tfpolicies.cli.run_lookup import (
    export_policy,
    find_checkpoint,
    load_policy,
    make_checkpoint_card,
    print_files,
)
from tfpolicies.cli.show_policy import make_title, open_recording_source
from tfpolicies.envs.env_factory import check_env_name, make_environments
from tfpolicies.export.web import WebPage
from tfpolicies.reporting.progress_display import CommandConsole, make_summary_table
from tfpolicies.system.paths import resolve_path, shorten_path

if TYPE_CHECKING:
    from tfpolicies.algorithms.episode_playback import PlaySetup
    from tfpolicies.rollout.episode import RolloutMetrics

_EVALUATION_ENVS = 16


def evaluate(args: argparse.Namespace) -> int:
    """Plays whole episodes with a trained policy and prints their returns."""
    console = CommandConsole()
    if args.env is not None:
        check_env_name(args.env)
    checkpoint = find_checkpoint(args.source, best=args.best)
    with open_recording_source(args, checkpoint, console) as source:
        from tfpolicies.algorithms import episode_playback as episode_playback
        from tfpolicies.rollout.episode_summaries import summarize_episodes

        if source.is_single_policy:
            episodes = _play_with_policy(source, args.episodes, args.seed)
        else:
            episodes = episode_playback.play_episodes(source, args.episodes, args.seed)
    summary = summarize_episodes(episodes)
    figures = {
        "episodes": len(episodes),
        "mean return": summary["episode_reward_mean"],
        "standard deviation": float(np.std(summary["hist_stats"]["episode_reward"])),
        "lowest": summary["episode_reward_min"],
        "highest": summary["episode_reward_max"],
        "mean length": summary["episode_len_mean"],
        **{f"mean of {pid}": mean for pid, mean in summary["policy_reward_mean"].items()},
    }
    console.print(make_summary_table(make_title(source), figures))
    return DONE


def _play_with_policy(source: PlaySetup, episodes: int, seed: int) -> list[RolloutMetrics]:
    from tfpolicies.algorithms.episode_playback import get_env_source
    from tfpolicies.rollout.connector_env import connect_environments
    from tfpolicies.rollout.evaluation import play_episodes
    from tfpolicies.rollout.sampler import EvaluationDuration

    policy = source.player
    env, context = get_env_source(source)
    envs = make_environments(env, min(episodes, _EVALUATION_ENVS), context)
    try:
        envs = connect_environments(envs, policy, allow_other_spaces=source.allow_other_spaces)
        seeds = [seed + i for i in range(envs.num_envs)]
        return play_episodes(
            policy, envs, EvaluationDuration(episodes, by_episodes=True), seeds=seeds
        )
    finally:
        envs.close()


def export(args: argparse.Namespace) -> int:
    """Writes a trained policy as SavedModel and ONNX, or in the chosen format, and verifies it."""
    console = CommandConsole()
    WebPage.from_arguments(args.web, args.ort_web)  # raises before anything slow runs
    checkpoint = find_checkpoint(args.source, best=args.best)
    target = resolve_path(args.to)
    policy = load_policy(checkpoint, console, args, policy_id=args.policy)
    default_formats = not (args.onnx or args.saved_model or args.layout or args.litert or args.web)
    formats = {name: getattr(args, name) for name in ("layout", "litert", "web", "ort_web")}
    formats |= {name: getattr(args, name) or default_formats for name in ("onnx", "saved_model")}
    exported = export_policy(policy, target, console, formats, make_checkpoint_card(checkpoint))
    console.print(make_summary_table(f"Exported {type(policy).__name__}", exported.figures))
    print_files(console, exported.files)
    if args.web:
        folder = shorten_path(exported.files["ONNX"].parent)
        console.print(f"See it at http://localhost:8000: python3 -m http.server -d {folder}")
    return DONE


def play_exported(args: argparse.Namespace) -> int:
    """Plays with an exported ONNX file in a process without this package."""
    check_env_name(args.env)
    path = find_export(args.exported)
    report = play_in_subprocess(
        path, args.env, args.episodes, args.seed, args.env_config, args.device
    )
    figures = {
        "episodes": report["episodes"],
        "mean return": report["mean_return"],
        "standard deviation": report["std_return"],
        "lowest": report["min_return"],
        "highest": report["max_return"],
        "steps": report["steps"],
        "seconds": round(report["seconds"], 2),
    }
    title = f"{shorten_path(path)} through ONNX Runtime, {describe_loaded_packages(report)}"
    CommandConsole().print(make_summary_table(title, figures))
    return DONE
