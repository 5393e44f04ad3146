"""The commands `evaluate`, `export`, `play-exported` and `tuned`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from tfpolicies.algorithms.registry import find_algorithm, registered_names
from tfpolicies.algorithms.tuned import tuned_entries
from tfpolicies.cli.ends import DONE
from tfpolicies.cli.recording import scene_of, title_of
from tfpolicies.cli.serving import find_export, loaded, play_in_own_process
from tfpolicies.cli.sources import export_policy, find_checkpoint, load_policy, print_files
from tfpolicies.envs.making import EnvContext, check_source, make_environments
from tfpolicies.errors import ConfigError
from tfpolicies.export.web import WebPage
from tfpolicies.reporting.console import CommandConsole, summary_table
from tfpolicies.system.paths import resolve_path, shown

if TYPE_CHECKING:
    from tfpolicies.algorithms.recording import Scene
    from tfpolicies.rollout.episode import RolloutMetrics

_EVALUATION_ENVS = 16


def evaluate(args: argparse.Namespace) -> int:
    """Plays whole episodes with a trained policy and prints their returns."""
    console = CommandConsole()
    if args.env is not None:
        check_source(args.env)
    checkpoint = find_checkpoint(args.source, best=args.best)
    with scene_of(args, checkpoint, console) as scene:
        from tfpolicies.algorithms import recording
        from tfpolicies.rollout.metrics import summarize_episodes

        if scene.is_of_policy:
            played = _played_by_one(scene, args.episodes, args.seed)
        else:
            played = recording.play(scene, args.episodes, args.seed)
    summary = summarize_episodes(played)
    figures = {
        "episodes": len(played),
        "mean return": summary["episode_reward_mean"],
        "standard deviation": float(np.std(summary["hist_stats"]["episode_reward"])),
        "lowest": summary["episode_reward_min"],
        "highest": summary["episode_reward_max"],
        "mean length": summary["episode_len_mean"],
        **{f"mean of {pid}": mean for pid, mean in summary["policy_reward_mean"].items()},
    }
    console.print(summary_table(title_of(scene), figures))
    return DONE


def _played_by_one(scene: Scene, episodes: int, seed: int) -> list[RolloutMetrics]:
    """Plays episodes with a single policy."""
    from tfpolicies.rollout.connected import connected
    from tfpolicies.rollout.evaluation import play_episodes
    from tfpolicies.rollout.fitting_spaces import require_trained_spaces
    from tfpolicies.rollout.sampler import Goal

    policy = scene.player
    own = scene.env == policy.config["env"]
    context = EnvContext(policy.config["env_config"] if own else {})
    envs = make_environments(scene.env, min(episodes, _EVALUATION_ENVS), context)
    try:
        envs = connected(envs, policy)
        require_trained_spaces(
            policy.policy_id,
            (policy.observation_space, policy.action_space),
            (envs.observation_space, envs.action_space),
            allow_other=scene.allow_other_spaces,
        )
        seeds = [seed + i for i in range(envs.num_envs)]
        return play_episodes(policy, envs, Goal(episodes, by_episodes=True), seeds=seeds)
    finally:
        envs.close()


def export(args: argparse.Namespace) -> int:
    """Writes a trained policy as SavedModel and ONNX, or in the chosen format, and verifies it."""
    console = CommandConsole()
    WebPage.wanted(args.web, args.ort_web)  # raises before anything slow runs
    checkpoint = find_checkpoint(args.source, best=args.best)
    target = resolve_path(args.to)
    policy = load_policy(checkpoint, console, args, policy_id=args.policy)
    both = not (args.onnx or args.saved_model or args.layout or args.litert or args.web)
    forms = {name: getattr(args, name) for name in ("layout", "litert", "web", "ort_web")}
    forms |= {name: getattr(args, name) or both for name in ("onnx", "saved_model")}
    exported = export_policy(policy, target, console, forms)
    console.print(summary_table(f"Exported {type(policy).__name__}", exported.figures))
    print_files(console, exported.files)
    if args.web:
        folder = shown(exported.files["ONNX"].parent)
        console.print(f"See it at http://localhost:8000: python3 -m http.server -d {folder}")
    return DONE


def play_exported(args: argparse.Namespace) -> int:
    """Plays with an exported ONNX file in a process without this package."""
    check_source(args.env)
    path = find_export(args.exported)
    played = play_in_own_process(
        path, args.env, args.episodes, args.seed, args.env_config, args.device
    )
    figures = {
        "episodes": played["episodes"],
        "mean return": played["mean_return"],
        "standard deviation": played["std_return"],
        "lowest": played["min_return"],
        "highest": played["max_return"],
        "steps": played["steps"],
        "seconds": round(played["seconds"], 2),
    }
    title = f"{shown(path)} through ONNX Runtime, {loaded(played)}"
    CommandConsole().print(summary_table(title, figures))
    return DONE


def tuned(args: argparse.Namespace) -> int:
    """Lists tuned settings; for a single entry, with all details."""
    if args.algo not in (None, *registered_names()):
        find_algorithm(args.algo)  # importing another package registers its tuned settings
    found = tuned_entries(args.algo or "", args.env)
    console = CommandConsole()
    if not found:
        raise ConfigError(
            f"No tuned settings are for an environment with {args.env!r} in its name."
        )
    wide = [max(map(len, names)) for names in zip(*found, strict=True)]
    for (algo, env), entry in found.items():
        goal = "no score" if entry.threshold is None else f"score {entry.threshold:,.1f}"
        console.print(
            f"{algo:{wide[0]}}  {env:{wide[1]}}  {goal:>14}  {entry.steps:>10,} steps  "
            f"{entry.source}",
            highlight=False,
            soft_wrap=True,
        )
    if len(found) == 1:
        (entry,) = found.values()
        console.print(summary_table("Settings", entry.settings))
        for words in entry.deviations:
            console.print(f"Unlike the source: {words}.", highlight=False, soft_wrap=True)
    return DONE
