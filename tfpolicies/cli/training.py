"""The command `train`: trains or resumes a run, exports and plays the policy, prints a summary."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import secrets
import shlex
import shutil
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from tfpolicies.algorithms.run_records import RunRecords
from tfpolicies.algorithms.training_run import STEPS, TARGET, TrainingRun
from tfpolicies.cli.arguments import RUNS
from tfpolicies.cli.ends import BROKE, DONE, FELL_SHORT, NOT_FINITE, described, status_of
from tfpolicies.cli.serving import loaded, play_in_own_process
from tfpolicies.cli.settings import (
    IMPORTED,
    WORDS,
    TrainSettings,
    algorithm_of,
    flag,
    is_own,
    require_one_value_each,
)
from tfpolicies.cli.sources import (
    Shipped,
    export_command,
    export_policy,
    find_run,
    load,
    load_policy,
    print_files,
)
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.config.stored_settings import ALGORITHM_SETTINGS, environment_of_file
from tfpolicies.envs.making import check_source
from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.reporting.console import CommandConsole, counted, summary_table
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.reporting.progress_row import RECENT
from tfpolicies.reporting.run_folder import RunFolder, find_runs
from tfpolicies.storage.json_values import Missing, find_missing
from tfpolicies.storage.places import admitted
from tfpolicies.system.atomic import place_file
from tfpolicies.system.paths import resolve_path, shown
from tfpolicies.system.regular_files import read_regular
from tfpolicies.system.signals import SignalEnd, current, say

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm import Algorithm

logger = logging.getLogger("tfpolicies")

_STEPS_WITH_TARGET = 1_000_000
_ROUND = 10  # further train batches if the exported policy missed the target
_PLAY_SEED = 1_000_003  # far from the seeds of training episodes
_PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
_LARGEST = 1 << 20  # bytes of a file of settings
_NO_SETTINGS = ("command", "debug", "run")


class Job(NamedTuple):
    """A training with its run folder and console."""

    run: RunFolder
    settings: TrainSettings
    training: TrainingRun
    console: Console


def train(args: argparse.Namespace) -> int:
    """Trains, exports and plays; see `tfpolicies train --help`.

    Errors of settings, environment and construction are raised before a run folder is made.
    """
    given = {name: value for name, value in vars(args).items() if name not in _NO_SETTINGS}
    require_one_value_each(given)
    model_work_limit = given.pop("model_work_limit", 1.0)  # not stored in the run folder
    console = CommandConsole()
    with contextlib.ExitStack() as closing:
        run, parent = None, resolve_path(given.get("run_dir", RUNS))
        if "resume" in given:
            named = given.pop("resume")
            path = given.pop("run_dir", RUNS) if named is None else named
            run = closing.enter_context(_run_to_resume(path).hold())
            settings = _resumed(run, given)
            if not given and _is_finished(run, console):
                return DONE
        else:
            settings = _started(given)
            console.print(settings.told_tuned(), highlight=False, soft_wrap=True)
        load(console)
        if run is not None:
            _require_own_words(run, settings)
        with console.status("building"):
            algorithm = restore_or_build(run, settings, model_work_limit)
        closing.callback(_stop, algorithm)
        algorithm.tells_of_unheld = False
        _require_one_policy_to_ship(algorithm, settings)
        _require_pictures(algorithm, settings)
        if run is None:
            name = f"{settings.algo_name.lower()}-{settings.env}"
            run = closing.enter_context(RunFolder.create(parent, name, _content(settings)))
        elif given:
            run.write_settings(_content(settings))
        records = RunRecords(run, algorithm, settings.goals)
        closing.callback(records.close)
        training = TrainingRun(algorithm, settings.goals, records, console)
        job = Job(run, settings, training, console)
        try:
            folder = f"Run folder: {shown(run.path)}  (seed {settings.seed})"
            console.print(folder, highlight=False)
            return _train_and_ship(job)
        except BaseException as error:
            return _ended(job, error, debug=args.debug)


def _stop(algorithm: Algorithm) -> None:
    """Closes an algorithm; errors of environments are logged and do not change the exit status."""
    try:
        algorithm.stop()
    except Exception as error:
        logger.warning("The environments could not be closed: %r", error)


# -- settings ---------------------------------------------------------------------------------


def _started(given: dict[str, Any]) -> TrainSettings:
    from_file = _settings_in(given.pop("config", None))
    for name in {"env", "seed"} & from_file.keys():  # the command line overrides these as well
        given.setdefault(name, from_file.pop(name))
    if "env" not in given:
        raise UsageError("train takes an environment: `tfpolicies train CartPole-v1`.")
    check_source(given["env"])
    given.pop("run_dir", None)
    given.setdefault("seed", secrets.randbelow(10_000))
    if "until" in given:
        given.setdefault("steps", _STEPS_WITH_TARGET)
    given["from_file"] = from_file
    return TrainSettings(**{**given, "set": tuple(given.get("set", ()))})


def _settings_in(path: str | None) -> dict[str, Any]:
    """Returns the settings in a JSON file; none without a file.

    Raises:
        UsageError: if it cannot be read, or is not a JSON object.
    """
    if path is None:
        return {}
    try:
        found = json.loads(read_regular(resolve_path(path), _LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--config: {path!r} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UsageError(
            f'--config: {path!r} must hold an object of settings, such as {{"lr": 0.001}}, got '
            f"{found!r:.60}."
        )
    if not isinstance(found.get("env", ""), str):
        raise UsageError(
            f'--config: {path!r}: env must be the name of an environment, such as "CartPole-v1", '
            f"got {found['env']!r:.60}."
        )
    return found


def restore_or_build(
    run: RunFolder | None, settings: TrainSettings, model_work_limit: float = 1.0
) -> Algorithm:
    """Returns the algorithm from the run's newest checkpoint, or a new one if there is none yet.

    Args:
        run: the folder; None for a new run.
        settings: of the training.
        model_work_limit: how many times the usual work a stored Keras model may take.

    Raises:
        ConfigError: for settings that contradict each other.
        EnvError: for an unknown environment.
        CheckpointError: if the checkpoint is damaged.
    """
    if run is not None and run.has_checkpoint:
        given = settings.imported()
        return algorithm_of(settings.algo).from_checkpoint(
            run.latest,
            policy_mapping_fn=given.pop("policy_mapping_fn", None),
            config={"env": settings.env, **given},
            allow_other_spaces=settings.allow_other_spaces,
            allow_non_finite=settings.config().on_nan == "warn",
            model_work_limit=model_work_limit,
        )
    algorithm: Algorithm = settings.config().build()
    return algorithm


def _require_one_policy_to_ship(algorithm: Algorithm, settings: TrainSettings) -> None:
    """Refuses `--export` and `--play` if there are several policies."""
    ids = sorted(algorithm.worker.policy_map)
    if (settings.export or settings.play) and DEFAULT_POLICY_ID not in ids:
        raise UsageError(
            f"--export and --play need a run with one policy, but this one has {ids}. Train "
            f"without them, and export a policy afterwards: {export_command('RUN', ids[0])}."
        )


def _require_pictures(algorithm: Algorithm, settings: TrainSettings) -> None:
    """Checks that the environment renders, if videos are to be recorded."""
    if settings.record_every:
        from tfpolicies.algorithms.recording import Scene, require_pictures

        require_pictures(Scene(algorithm))


# -- resume -----------------------------------------------------------------------------------


def _run_to_resume(path: str) -> RunFolder:
    run = find_run(path)
    if run is not None:
        return run
    without = [shown(run.path) for run in find_runs(path)]
    hint = f" {without[0]} has no checkpoint yet; name it to restart it." if without else ""
    raise CheckpointError(
        f"--resume needs a run folder, or a folder of runs, but {path!r} has no run with a "
        f"checkpoint.{hint}"
    )


def _resumed(run: RunFolder, given: dict[str, Any]) -> TrainSettings:
    content = run.settings
    if "learn" in content:
        raise UsageError(
            f"{shown(run.path)} was trained by a script. Resume it there: "
            f"algorithm.learn(..., run_dir={str(run.path)!r})."
        )
    settings = TrainSettings.from_json(content.get("train", {}), str(run.run_json))
    again = _named_again(settings)
    if missing := [text for name, text in again.items() if name not in given]:
        raise UsageError(
            f"{shown(run.path)} uses {' and '.join(missing)}, but your code is only imported if "
            f"you name it. Name it again: `{shlex.join(_resume_words(run))}`."
        )
    given_again = [name for name in ("env", "algo", *IMPORTED) if name in given]
    for name in given_again:
        if given[name] == getattr(settings, name):
            del given[name]
    goals = [name for name, word in WORDS.items() if word.goal]
    fixed = [name for name in given if name not in goals]
    if fixed:
        raise UsageError(
            f"{', '.join(map(flag, fixed))} cannot be given with --resume: {shown(run.path)} has "
            f"fixed settings. These may be changed: {', '.join(map(flag, goals))}."
        )
    return dataclasses.replace(settings, **given)


def _named_again(settings: TrainSettings) -> dict[str, str]:
    """Returns the imports that the user must name again on resuming, by setting."""
    found = {name: getattr(settings, name) for name in IMPORTED}
    found["algo"] = settings.algo if is_own(settings.algo) else None
    env = settings.env if isinstance(environment_of_file(settings.env), Missing) else None
    return {name: text for name, text in {"env": env, **found}.items() if text is not None}


def _require_own_words(run: RunFolder, settings: TrainSettings) -> None:
    """Refuses settings in run.json that would import something that the user did not name again."""
    known = {settings.env: settings.env}
    foreign = find_missing(admitted(settings.config().to_dict(), ALGORITHM_SETTINGS, known=known))
    if foreign:
        names = ", ".join(found.name for found in foreign.values())
        raise UsageError(
            f"{shown(run.run_json)} sets {names}, but your code is only imported if you name "
            "it. Start a new run with the same settings, or write a script."
        )


def _is_finished(run: RunFolder, console: Console) -> bool:
    """Prints a hint if a run has reached its goals."""
    finished = run.settings.get("finished")
    if finished is None:
        return False
    console.print(f"{shown(run.path)} is finished: {_REASONS[finished]}.", highlight=False)
    _print_hint(console, "To train longer, use:", [*_resume_words(run), "--steps", "..."])
    return True


def _content(settings: TrainSettings, finished: str | None = None) -> dict[str, Any]:
    return {"train": settings.as_json(), "finished": finished}


_REASONS = {TARGET: "the target was reached", STEPS: "all steps were used"}


def _resume_words(run: RunFolder) -> list[str]:
    """Returns the command that resumes a run; it names again what a file may not import."""
    train = run.settings.get("train", {})
    again = _named_again(TrainSettings.from_json(train, str(run.run_json)))
    env = [again.pop("env")] if "env" in again else []
    options = [word for name, text in again.items() for word in (flag(name), text)]
    return [*_program(), "train", *env, "--resume", shown(run.path), *options]


def _program() -> list[str]:
    """Returns how this program was called, as it can be typed again."""
    name = Path(sys.argv[0])
    if name.name == "__main__.py":
        return [_typed(sys.executable), "-m", "tfpolicies"]
    return [_typed(sys.argv[0])] if name.name == "tfpolicies" else ["tfpolicies"]


def _typed(program: str) -> str:
    name = Path(program).name
    return name if shutil.which(name) == program else shown(Path(program))


# -- training and exporting -------------------------------------------------------------------


def _train_and_ship(job: Job) -> int:
    """Trains until the exported policy also reaches the target, or the steps are used up."""
    settings, training, console, run = job.settings, job.training, job.console, job.run
    further = 0
    while True:
        reason = training.train(lambda what: _rescue(job, what), at_least_steps=further)
        shipped = _ship(job, reason)
        played = shipped.mean_return
        if reason == STEPS or played is None or settings.until is None or played >= settings.until:
            break
        console.print(
            f"The exported policy played {played:.1f}, short of {settings.until:g}: training "
            "continues.",
            highlight=False,
        )
        further = _ROUND * training.algorithm.config.train_batch_size
    run.write_settings(_content(settings, reason))
    _print_summary(job, reason, shipped)
    if settings.until is None:
        return DONE
    reached = reason == TARGET if played is None else played >= settings.until
    return DONE if reached else FELL_SHORT


def _ship(job: Job, reason: str) -> Shipped:
    """Exports the policy and plays with it, as requested.

    It exports the policy that reached the target; otherwise the best one, if it was kept.
    """
    settings, run, algorithm = job.settings, job.run, job.training.algorithm
    if not (settings.export or settings.play):
        return Shipped({}, {})
    policy = algorithm.get_policy()
    if reason != TARGET and settings.keep_best and run.best.exists():
        policy = load_policy(run.best, job.console, settings)
    shipped = export_policy(policy, run.export, job.console, {"onnx": True, "saved_model": True})
    if not settings.play:
        return shipped
    with job.console.status(f"playing {counted(settings.play, 'episode')} through ONNX Runtime"):
        config = algorithm.config.env_config
        played = play_in_own_process(run.export, settings.env, settings.play, _PLAY_SEED, config)
    mean, std = float(played["mean_return"]), played["std_return"]
    over = counted(settings.play, "greedy episode")
    figure = f"{mean:.2f} {_PLUS_MINUS} {std:.2f} over {over}, {loaded(played)}"
    return Shipped(shipped.files, {**shipped.figures, "ONNX played": figure}, mean)


def _describe_returns(row: Mapping[str, float]) -> str:
    """Describes mean and standard deviation of the recent returns in a row of progress."""
    mean, std, episodes = (row.get(RECENT + name, math.nan) for name in ("mean", "std", "episodes"))
    if math.isnan(mean):
        return "none, since no episode has ended. Give the environment a time limit"
    over = counted(int(episodes), "training episode")
    return f"{mean:.2f} {_PLUS_MINUS} {std:.2f} over the last {over}"


def _print_summary(job: Job, reason: str, shipped: Shipped) -> None:
    run, settings = job.run, job.settings
    last = read_progress(run.progress_csv)[-1]
    figures: dict[str, Any] = {
        "steps": last["env_steps"],
        "seconds": round(last["time_s"], 1),
        "steps/s": round(last["env_steps"] / last["time_s"]),
        "mean return": _describe_returns(last),
    }
    files = {
        **shipped.files,
        "learning curve": run.learning_curve,
        "progress CSV": run.progress_csv,
        "TensorBoard": run.events,
        "checkpoint": run.latest,
        "best checkpoint": run.best,
        "videos": run.videos,
    }
    job.console.print()
    title = f"{settings.title}: {_REASONS[reason]}"
    job.console.print(summary_table(title, {**figures, **shipped.figures}))
    job.console.print()
    print_files(job.console, files)
    if _named_again(settings):
        text = "To train longer, name your code again:"
        _print_hint(job.console, text, [*_resume_words(run), "--steps", "..."])


def _print_hint(console: Console, text: str, words: list[str]) -> None:
    console.print(text)
    console.print(f"  {shlex.join(words)}", markup=False, highlight=False, soft_wrap=True)


# -- early ends -------------------------------------------------------------------------------


def _ended(job: Job, error: BaseException, *, debug: bool) -> int:
    """Saves the state of an interrupted training, prints how to resume; returns the exit status."""
    signals = current()
    signals.caught()
    if signals.requested is not None and not isinstance(error, SignalEnd):
        error = SignalEnd(signals.requested)  # environments' processes may get it as well
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
            place_file(job.run.error_txt, trace.encode(errors="replace"))
            what = f"{what}.\nThe traceback is in {shown(job.run.error_txt)}"
    if status == NOT_FINITE:  # the state is not worth saving
        say(f"{what}. Nothing was saved.")
        _say_how_to_go_on(job.run)
        return status
    with signals.unhurried():
        _rescue(job, what)
    return status


def _rescue(job: Job, what: str) -> None:
    """Saves unsaved progress, and prints what happened and how to resume."""
    run = job.run
    try:
        job.training.records.rescue()
    except CheckpointError as error:
        say(f"{what}. Unsaved progress is lost: {error}")
    else:
        saved = (
            f"Saved in {shown(run.latest)}." if run.has_checkpoint else "Nothing was trained yet."
        )
        say(f"{what}. {saved}")
    _say_how_to_go_on(run)


def _say_how_to_go_on(run: RunFolder) -> None:
    say(f"Resume with:\n  {shlex.join(_resume_words(run))}")
