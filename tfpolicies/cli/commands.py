"""What each command does."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import secrets
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from tfpolicies.cli.arguments import RUNS
from tfpolicies.cli.ends import BROKE, DONE, FELL_SHORT, NOT_FINITE, described, status_of
from tfpolicies.cli.serving import find_export, play_in_own_process
from tfpolicies.cli.settings import TrainSettings, require_one_value_each
from tfpolicies.cli.signals import SignalEnd, current, say
from tfpolicies.cli.training_run import STEPS, TARGET, TrainingRun, restore_or_build
from tfpolicies.config.stored_environments import environment_of_file
from tfpolicies.config.stored_settings import ALGORITHM_SETTINGS
from tfpolicies.envs.making import EnvContext, check_source, make_environments
from tfpolicies.errors import CheckpointError, ConfigError, UsageError
from tfpolicies.reporting.console import CommandConsole, summary_table
from tfpolicies.reporting.run_folder import RunFolder, find_runs, newest_run
from tfpolicies.storage.json_values import Missing, find_missing
from tfpolicies.storage.places import admitted
from tfpolicies.system.atomic import place_file
from tfpolicies.system.quiet import load_tensorflow

logger = logging.getLogger("tfpolicies")

_STEPS_WITH_TARGET = 1_000_000
_GOALS = ("steps", "until", "export", "play", "keep_best", "checkpoint_every")  # may be changed
_GOING_ON = (*_GOALS, "allow_other_spaces")
_ROUND = 10  # train batches of a further round, after an exported policy fell short
_PLAY_SEED = 1_000_003  # far from the seeds of training episodes
_EVALUATION_ENVS = 16


class Shipped(NamedTuple):
    """What was exported, and how it did."""

    files: Mapping[str, Path]
    figures: Mapping[str, str]
    mean_return: float | None = None  # of the exported policy; None if it did not play


# -- train ------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    """Trains, ships and plays; see `tfpolicies train --help`.

    What can go wrong with settings, environment and building goes wrong before there is a folder.
    """
    given = {name: value for name, value in vars(args).items() if name not in ("command", "debug")}
    require_one_value_each(given)
    console = CommandConsole()
    with contextlib.ExitStack() as closing:
        run, parent = None, given.get("run_dir", RUNS)
        if "resume" in given:
            run = closing.enter_context(_run_to_resume(given.pop("resume")).hold())
            settings = _resumed(run, given)
            if not given and _is_finished(run, console):
                return DONE
        else:
            settings = _started(given)
        _load(console)
        if run is not None:
            _require_own_words(run, settings)
        with console.status("building"):
            algorithm = restore_or_build(run, settings)
        closing.callback(_stop, algorithm)
        if run is None:
            name = f"{settings.algo.lower()}-{settings.env}"
            run = closing.enter_context(RunFolder.create(parent, name, _content(settings)))
        elif given:
            run.write_settings(_content(settings))
        training = closing.enter_context(TrainingRun(run, settings, algorithm, console))
        try:
            folder = f"Run folder: {_shown(run.path)}  (seed {settings.seed})"
            console.print(folder, highlight=False)
            return _train_and_ship(training)
        except BaseException as error:
            return _ended(training, error, debug=args.debug)


def _stop(algorithm: Any) -> None:
    """Closes an algorithm; environments that break in that do not change how the command ends."""
    try:
        algorithm.stop()
    except Exception as error:
        logger.warning("The environments could not be closed: %r", error)


def _started(given: dict[str, Any]) -> TrainSettings:
    if "env" not in given:
        raise UsageError("train takes an environment: `tfpolicies train CartPole-v1`.")
    check_source(given["env"])
    given.pop("run_dir", None)
    given.setdefault("seed", secrets.randbelow(10_000))
    if "until" in given:
        given.setdefault("steps", _STEPS_WITH_TARGET)
    return TrainSettings(**{**given, "set": tuple(given.get("set", ()))})


def _run_to_resume(path: str) -> RunFolder:
    run = find_run(path)
    if run is not None:
        return run
    without = [_shown(run.path) for run in find_runs(path)]
    hint = f" {without[0]} has no checkpoint yet; name it to begin it anew." if without else ""
    raise CheckpointError(f"--resume needs a run folder, or a folder of runs.{hint}")


def _is_finished(run: RunFolder, console: Console) -> bool:
    """Says so if a run has reached its goals."""
    finished = run.settings.get("finished")
    if finished is None:
        return False
    console.print(f"{_shown(run.path)} is finished: {_REASONS[finished]}.", highlight=False)
    _print_hint(console, "To train on, raise a goal:", [*_resume_words(run), "--steps", "..."])
    return True


def _resumed(run: RunFolder, given: dict[str, Any]) -> TrainSettings:
    content = run.settings
    settings = TrainSettings.from_json(content.get("train", {}), str(run.run_json))
    named = given.pop("env", None)
    if named is None:
        _require_own_environment(run, settings.env)
    elif named != settings.env:
        given["env"] = named
    fixed = [name for name in given if name not in _GOING_ON]
    if fixed:
        names = ", ".join(
            f"--{name.replace('_', '-')}" if name != "env" else "ENV" for name in fixed
        )
        raise UsageError(
            f"{names} cannot be given with --resume: {_shown(run.path)} holds what is trained. "
            "Goals may be changed: --steps, --until, --export, --play, --keep-best, "
            "--checkpoint-every."
        )
    return dataclasses.replace(settings, **given)


def _require_own_environment(run: RunFolder, env: str) -> None:
    """Refuses an environment that only the run's file would have imported."""
    if isinstance(environment_of_file(env), Missing):
        raise UsageError(
            f"{_shown(run.path)} trains in {env!r}, which is not imported on a file's word. Name "
            f"it again: {shlex.join(_resume_words(run))}"
        )


def _require_own_words(run: RunFolder, settings: TrainSettings) -> None:
    """Refuses settings of a run's file that would import something; `ENV` was looked at before."""
    known = {settings.env: settings.env}
    foreign = find_missing(admitted(settings.config().to_dict(), ALGORITHM_SETTINGS, known=known))
    if foreign:
        names = ", ".join(found.name for found in foreign.values())
        raise UsageError(
            f"{_shown(run.run_json)} sets {names}, which is not imported on a file's word. Start a "
            "new run with the same settings, or write a script."
        )


def _content(settings: TrainSettings, finished: str | None = None) -> dict[str, Any]:
    return {"train": settings.as_json(), "finished": finished}


_REASONS = {
    TARGET: "the target was reached",
    STEPS: "all steps were used",
}


def _train_and_ship(training: TrainingRun) -> int:
    """Trains until the exported policy reaches the target too, or the steps are used up."""
    settings, console, run = training.settings, training.console, training.run
    further = 0
    while True:
        reason = training.train(lambda what: _rescue(training, what), at_least_steps=further)
        shipped = _ship(training, reason)
        played = shipped.mean_return
        if reason == STEPS or played is None or settings.until is None or played >= settings.until:
            break
        console.print(
            f"The exported policy played {played:.1f}, short of {settings.until:g}: training goes "
            "on.",
            highlight=False,
        )
        further = _ROUND * training.algorithm.config.train_batch_size
    run.write_settings(_content(settings, reason))
    _print_summary(training, reason, shipped)
    if settings.until is None:
        return DONE
    reached = reason == TARGET if played is None else played >= settings.until
    return DONE if reached else FELL_SHORT


def _ship(training: TrainingRun, reason: str) -> Shipped:
    """Exports and plays as far as asked for.

    Shipped is the policy that reached the target; where none did, the best one if it was kept.
    """
    settings, run = training.settings, training.run
    if not (settings.export or settings.play):
        return Shipped({}, {})
    policy = training.algorithm.get_policy()
    if reason != TARGET and settings.keep_best and run.best.exists():
        policy = load_policy(run.best, training.console)
    shipped = export_policy(policy, run.export, training.console, onnx=True, saved_model=True)
    if not settings.play:
        return shipped
    with training.console.status(f"playing {settings.play} episodes through ONNX Runtime"):
        config = training.algorithm.config.env_config
        played = play_in_own_process(run.export, settings.env, settings.play, _PLAY_SEED, config)
    mean = float(played["mean_return"])
    shown = f"{mean:.2f}, greedily over {settings.play} episodes; {_loaded(played)}"
    return Shipped(shipped.files, {**shipped.figures, "ONNX played": shown}, mean)


def _loaded(played: Mapping[str, Any]) -> str:
    """Says whether the player's process did without TensorFlow and this package."""
    if played["loaded"]:  # the environment's own imports may do so
        return f"{', '.join(played['loaded'])} were loaded"
    return "without tensorflow and tfpolicies"


def _ended(training: TrainingRun, error: BaseException, *, debug: bool) -> int:
    """Saves what a training that was ended has, says how to go on, and returns the exit status."""
    signals = current()
    signals.caught()
    if signals.requested is not None and not isinstance(error, SignalEnd):
        error = SignalEnd(signals.requested)  # which environments' processes may feel, too
    status, what = status_of(error, begun=True), described(error)
    if isinstance(error, KeyboardInterrupt):
        what = what.capitalize()
    else:
        what = f"tfpolicies: error: {what}"
    if status == BROKE:
        trace = "".join(traceback.format_exception(error))
        if debug:
            say(trace)
        with contextlib.suppress(OSError):
            place_file(training.run.error_txt, trace.encode(errors="replace"))
            what = f"{what}.\nThe traceback is in {_shown(training.run.error_txt)}"
    if status == NOT_FINITE:  # what led there is not worth keeping
        say(f"{what}. Nothing was saved.")
        _say_how_to_go_on(training.run)
        return status
    with signals.unhurried():
        _rescue(training, what)
    return status


def _rescue(training: TrainingRun, what: str) -> None:
    """Saves what would be lost, and says what happened and how to go on."""
    run = training.run
    try:
        training.rescue()
    except CheckpointError as error:
        say(f"{what}. What was not saved is lost: {error}")
    else:
        saved = (
            f"Saved in {_shown(run.latest)}." if run.has_checkpoint else "Nothing was trained yet."
        )
        say(f"{what}. {saved}")
    _say_how_to_go_on(run)


def _say_how_to_go_on(run: RunFolder) -> None:
    say(f"Go on with:\n  {shlex.join(_resume_words(run))}")


def _print_hint(console: Console, text: str, words: list[str]) -> None:
    console.print(text)
    console.print(f"  {shlex.join(words)}", markup=False, highlight=False, soft_wrap=True)


def _print_summary(training: TrainingRun, reason: str, shipped: Shipped) -> None:
    run, progress, settings = training.run, training.progress, training.settings
    figures: dict[str, Any] = {
        "steps": progress.env_steps,
        "seconds": round(progress.time_s, 1),
        "steps/s": round(progress.steps_per_s),
        "mean return": f"{progress.mean_return:.2f}, of the last 100 training episodes",
    }
    files = {
        **shipped.files,
        "learning curve": run.learning_curve,
        "progress CSV": run.progress_csv,
        "TensorBoard": run.events,
        "checkpoint": run.latest,
        "best checkpoint": run.best,
    }
    training.console.print()
    title = f"{settings.title}: {_REASONS[reason]}"
    training.console.print(summary_table(title, {**figures, **shipped.figures}))
    training.console.print()
    _print_files(training.console, files)


def _print_files(console: Console, files: Mapping[str, Path]) -> None:
    """Prints paths in lines that are never broken, so that they can be copied."""
    there = {name: path for name, path in files.items() if path.exists()}
    width = max(map(len, there), default=0)
    for name, path in there.items():
        line = Text.assemble((f"{name:{width}}  ", "dim"), _shown(path))
        console.print(line, soft_wrap=True, highlight=False)


# -- evaluate, export, play-exported ----------------------------------------------------------


def evaluate(args: argparse.Namespace) -> int:
    """Plays whole episodes with a trained policy and prints their returns."""
    console = CommandConsole()
    if args.env is not None:
        check_source(args.env)
    policy = load_policy(
        find_checkpoint(args.source, best=args.best), console, explore=args.explore
    )
    source = args.env if args.env is not None else environment_of_file(policy.config["env"])
    if isinstance(source, Missing):
        raise ConfigError(
            f"The checkpoint is of {source.name!r}, which is not imported on a file's word. Give "
            f"--env {source.name}."
        )
    if not (isinstance(source, str) or callable(source)):
        raise ConfigError("The checkpoint does not say where to play. Give --env NAME.")
    from tfpolicies.rollout.connected import connected
    from tfpolicies.rollout.evaluation import play_episodes
    from tfpolicies.rollout.fitting_spaces import require_trained_spaces
    from tfpolicies.rollout.metrics import summarize_episodes

    own = args.env in (None, policy.config["env"])
    context = EnvContext(policy.config["env_config"] if own else {})
    envs = make_environments(source, min(args.episodes, _EVALUATION_ENVS), context)
    try:
        envs = connected(envs, policy)
        require_trained_spaces(
            policy.policy_id,
            (policy.observation_space, policy.action_space),
            (envs.observation_space, envs.action_space),
            allow_other=args.allow_other_spaces,
        )
        seeds = [args.seed + i for i in range(envs.num_envs)]
        played = play_episodes(policy, envs, seeds=seeds, episodes=args.episodes)
    finally:
        envs.close()
    summary = summarize_episodes(played)
    figures = {
        "episodes": len(played),
        "mean return": summary["episode_reward_mean"],
        "lowest": summary["episode_reward_min"],
        "highest": summary["episode_reward_max"],
        "mean length": summary["episode_len_mean"],
    }
    how = "sampling" if args.explore else "greedy"
    console.print(summary_table(f"{type(policy).__name__}, {how}", figures))
    return DONE


def export(args: argparse.Namespace) -> int:
    """Writes a trained policy as SavedModel and ONNX, each verified."""
    console = CommandConsole()
    policy = load_policy(find_checkpoint(args.source, best=args.best), console)
    both = args.onnx is None and not args.saved_model
    exported = export_policy(
        policy,
        Path(args.to),
        console,
        onnx=args.onnx or both,
        saved_model=args.saved_model or both,
    )
    console.print(summary_table(f"Exported {type(policy).__name__}", exported.figures))
    _print_files(console, exported.files)
    return DONE


def play_exported(args: argparse.Namespace) -> int:
    """Plays with an exported ONNX file in a process without this package."""
    check_source(args.env)
    path = Path(args.exported)
    played = play_in_own_process(path, args.env, args.episodes, args.seed, args.env_config)
    figures = {
        "episodes": played["episodes"],
        "mean return": played["mean_return"],
        "lowest": played["min_return"],
        "highest": played["max_return"],
        "steps": played["steps"],
        "seconds": round(played["seconds"], 2),
    }
    title = f"{_shown(find_export(path))} through ONNX Runtime, {_loaded(played)}"
    CommandConsole().print(summary_table(title, figures))
    return DONE


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": train,
    "evaluate": evaluate,
    "export": export,
    "play-exported": play_exported,
}


# -- parts ------------------------------------------------------------------------------------


def find_run(path: str) -> RunFolder | None:
    """Returns the run at `path`, or the newest one in it with a checkpoint, or None."""
    return RunFolder.open(path) if RunFolder(path).run_json.exists() else newest_run(path)


def find_checkpoint(path: str, *, best: bool = False) -> Path:
    """Returns the checkpoint folder that a run, a folder of runs or a checkpoint folder means.

    Raises:
        CheckpointError: if there is none.
    """
    run = find_run(path)
    if run is None:
        if best:
            raise UsageError(f"--best asks for a run folder, but {path!r} is none.")
        return Path(path)
    folder = run.best if best else run.latest
    if not (folder.exists() if best else run.has_checkpoint):
        advice = (
            "Train with --keep-best." if best else "Train it on with `tfpolicies train --resume`."
        )
        raise CheckpointError(
            f"The run {_shown(run.path)} has no {folder.name} checkpoint. {advice}"
        )
    return folder


def load_policy(folder: Path, console: Console, *, explore: bool = False) -> Any:
    """Returns the policy of a checkpoint of a policy or of an algorithm.

    Raises:
        CheckpointError: if it is missing, damaged or foreign, or holds several policies.
    """
    _load(console)
    from tfpolicies.policy.policy import Policy

    found = Policy.from_checkpoint(folder, config={"explore": explore})
    if not isinstance(found, dict):
        return found
    if len(found) != 1:
        raise CheckpointError(
            f"{str(folder)!r} holds the policies {sorted(found)}; give the folder of one of them."
        )
    return next(iter(found.values()))


def export_policy(
    policy: Any, folder: Path, console: Console, *, onnx: bool | int, saved_model: bool
) -> Shipped:
    """Exports a policy, each format verified against it."""
    written: dict[str, Any] = {}
    if saved_model:
        with console.status("exporting a SavedModel"):
            written["SavedModel"] = policy.export_model(folder / "saved_model")
    if onnx:
        with console.status("exporting ONNX"):
            written["ONNX"] = policy.export_model(folder / "onnx", onnx=onnx)
    figures = {
        kind: f"verified: differs from the policy by at most {result.parity.largest_difference:.1e}"
        for kind, result in written.items()
    }
    return Shipped({kind: Path(result.path) for kind, result in written.items()}, figures)


def _load(console: Console) -> None:
    with console.status("loading TensorFlow"):
        load_tensorflow()


def _resume_words(run: RunFolder) -> list[str]:
    """Returns the command that goes on; it names an environment that a file may not name."""
    env = run.settings.get("train", {}).get("env")
    again = [env] if isinstance(environment_of_file(env), Missing) else []
    return [*_program(), "train", *again, "--resume", _shown(run.path)]


def _program() -> list[str]:
    """Returns how this program was called, as it can be typed again."""
    name = Path(sys.argv[0])
    if name.name == "__main__.py":
        return [_typed(sys.executable), "-m", "tfpolicies"]
    return [_typed(sys.argv[0])] if name.name == "tfpolicies" else ["tfpolicies"]


def _typed(program: str) -> str:
    name = Path(program).name
    return name if shutil.which(name) == program else _shown(Path(program))


def _shown(path: Path) -> str:
    """Returns a path relative to the current folder where it lies in it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
