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
import statistics
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from tfpolicies.algorithms.run_logger import RunLogger
from tfpolicies.algorithms.training_loop import ENDED_BY_STEPS, ENDED_BY_TARGET, TrainingLoop
from tfpolicies.cli.arguments import RUNS
from tfpolicies.cli.exit_codes import (
    DONE,
    FAILED,
    NOT_FINITE,
    TARGET_MISSED,
    describe_error,
    get_exit_status,
)
from tfpolicies.cli.export_playback import describe_loaded_packages, play_in_subprocess
from tfpolicies.cli.run_lookup import (
    ExportedPolicy,
    export_policy,
    find_run,
    format_export_command,
    load_policy,
    load_tensorflow_with_status,
    print_files,
)
from tfpolicies.cli.train_options import (
    IMPORT_OPTIONS,
    OPTIONS,
    TrainSettings,
    get_algorithm_class,
    get_flag,
    is_custom_algorithm,
    require_no_duplicate_settings,
)
from tfpolicies.cli.training_data import (
    check_data,
    check_data_options,
    check_resumed_options,
    complete_data_settings,
    describe_plan,
    require_data,
    require_trust,
)
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.config.settings_allowlist import ALGORITHM_SETTINGS, check_environment_name
from tfpolicies.envs.env_factory import check_env_name
from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.reporting.progress_display import CommandConsole, format_count, make_summary_table
from tfpolicies.reporting.progress_row import RECENT_PREFIX, find_loss
from tfpolicies.reporting.run_folder import RunFolder, find_runs
from tfpolicies.storage.allowed_objects import resolve_allowed
from tfpolicies.storage.json_values import UnresolvedObject, find_unresolved
from tfpolicies.system.atomic import write_atomically
from tfpolicies.system.paths import resolve_path, shorten_path
from tfpolicies.system.regular_files import read_regular
from tfpolicies.system.signal_handling import SignalInterrupt, get_active_handler, print_to_stderr

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm import Algorithm

logger = logging.getLogger("tfpolicies")

_DEFAULT_STEPS_WITH_TARGET = 1_000_000
_EXTRA_BATCHES = 10  # further train batches if the exported policy missed the target
_PLAY_SEED = 1_000_003  # far from the seeds of training episodes
_PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
_MAX_CONFIG_BYTES = 1 << 20  # bytes of a file of settings
_NON_SETTING_ARGUMENTS = ("command", "debug", "run")


class TrainingJob(NamedTuple):
    """A training with its run folder and console."""

    run: RunFolder
    settings: TrainSettings
    training: TrainingLoop
    console: Console


def train(args: argparse.Namespace) -> int:
    """Trains, exports and plays; see `tfpolicies train --help`.

    Errors of settings, environment and construction are raised before a run folder is made.
    """
    arguments = {
        name: value for name, value in vars(args).items() if name not in _NON_SETTING_ARGUMENTS
    }
    require_no_duplicate_settings(arguments)
    model_work_limit = arguments.pop("model_work_limit", 1.0)  # not stored in the run folder
    console = CommandConsole()
    with contextlib.ExitStack() as exit_stack:
        run, parent = None, resolve_path(arguments.get("run_dir", RUNS))
        if "resume" in arguments:
            resume_path = arguments.pop("resume")
            path = arguments.pop("run_dir", RUNS) if resume_path is None else resume_path
            run = exit_stack.enter_context(_find_run_to_resume(path).acquire())
            settings = require_trust(_make_resumed_settings(run, arguments), arguments)
            if not arguments and _is_finished(run, console):
                return DONE
        else:
            settings = _make_new_settings(arguments)
            console.print(settings.describe_tuned(), highlight=False, soft_wrap=True)
        load_tensorflow_with_status(console)
        if run is not None:
            _require_no_stored_imports(run, settings)
            if settings.data:
                require_data(settings, shlex.join(_make_resume_command(run)))
        if settings.data:
            settings = complete_data_settings(settings, arguments, console, is_new=run is None)
        with console.status("building"):
            algorithm = restore_or_build(run, settings, model_work_limit)
        exit_stack.callback(_stop, algorithm)
        if settings.data:
            check_data(algorithm, settings, console)
            console.print(describe_plan(algorithm, settings), highlight=False, soft_wrap=True)
        algorithm.warns_about_unserializable = False
        _require_single_policy(algorithm, settings)
        _require_rendering(algorithm, settings)
        if run is None:
            run_json = _make_run_json(settings)
            run = exit_stack.enter_context(RunFolder.create(parent, settings.run_name, run_json))
        elif arguments:
            run.write_settings(_make_run_json(settings))
        records = RunLogger(run, algorithm, settings.goals)
        exit_stack.callback(records.close)
        training = TrainingLoop(algorithm, settings.goals, records, console)
        job = TrainingJob(run, settings, training, console)
        try:
            folder = f"Run folder: {shorten_path(run.path)}  (seed {settings.seed})"
            console.print(folder, highlight=False)
            return _train_and_export(job)
        except BaseException as error:
            return _handle_early_end(job, error, debug=args.debug)


def _stop(algorithm: Algorithm) -> None:
    """Closes an algorithm; errors of environments are logged and do not change the exit status."""
    try:
        algorithm.stop()
    except Exception as error:
        logger.warning("The environments could not be closed: %r", error)


# -- settings ---------------------------------------------------------------------------------


def _make_new_settings(arguments: dict[str, Any]) -> TrainSettings:
    from_file = _read_config_file(arguments.pop("config", None))
    for name in {"env", "seed"} & from_file.keys():  # the command line overrides these as well
        arguments.setdefault(name, from_file.pop(name))
    if "env" not in arguments and "data" not in arguments:
        raise UsageError(
            "train takes an environment, or recorded experience: `tfpolicies train CartPole-v1`, "
            "`tfpolicies train --data logs.parquet`."
        )
    if "env" in arguments:
        check_env_name(arguments["env"])
    check_data_options(arguments)
    arguments.pop("run_dir", None)
    arguments.setdefault("seed", secrets.randbelow(10_000))
    if "until" in arguments:
        arguments.setdefault("steps", _DEFAULT_STEPS_WITH_TARGET)
    arguments["from_file"] = from_file
    return TrainSettings(**{**arguments, "set": tuple(arguments.get("set", ()))})


def _read_config_file(path: str | None) -> dict[str, Any]:
    """Returns the settings in a JSON file; none without a file."""
    if path is None:
        return {}
    try:
        settings = json.loads(read_regular(resolve_path(path), _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--config: {path!r} cannot be read as JSON: {error}.") from error
    if not isinstance(settings, dict):
        raise UsageError(
            f'--config: {path!r} must hold an object of settings, such as {{"lr": 0.001}}, got '
            f"{settings!r:.60}."
        )
    if not isinstance(settings.get("env", ""), str):
        raise UsageError(
            f'--config: {path!r}: env must be the name of an environment, such as "CartPole-v1", '
            f"got {settings['env']!r:.60}."
        )
    return settings


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
        objects = settings.import_objects()
        data = settings.data_settings if settings.data else {}
        return get_algorithm_class(settings.algo).from_checkpoint(
            run.latest,
            policy_mapping_fn=objects.pop("policy_mapping_fn", None),
            config={"env": settings.env, **data, **objects},
            allow_other_spaces=settings.allow_other_spaces,
            allow_non_finite=settings.make_config().on_nan == "warn",
            model_work_limit=model_work_limit,
        )
    algorithm: Algorithm = settings.make_config().build()
    return algorithm


def _require_single_policy(algorithm: Algorithm, settings: TrainSettings) -> None:
    """Refuses `--export` and `--play` if there are several policies."""
    ids = sorted(algorithm.worker.policy_map)
    if (settings.export or settings.play) and DEFAULT_POLICY_ID not in ids:
        raise UsageError(
            f"--export and --play need a run with one policy, but this one has {ids}. Train "
            f"without them, and export a policy afterwards: {format_export_command('RUN', ids[0])}."
        )


def _require_rendering(algorithm: Algorithm, settings: TrainSettings) -> None:
    """Checks that the environment renders, if videos are to be recorded."""
    if settings.record_every:
        from tfpolicies.algorithms.episode_playback import PlaySetup, require_renderable

        require_renderable(PlaySetup(algorithm))


# -- resume -----------------------------------------------------------------------------------


def _find_run_to_resume(path: str) -> RunFolder:
    run = find_run(path)
    if run is not None:
        return run
    unsaved_runs = [shorten_path(run.path) for run in find_runs(path)]
    hint = (
        f" {unsaved_runs[0]} has no checkpoint yet; name it to restart it." if unsaved_runs else ""
    )
    raise CheckpointError(
        f"--resume needs a run folder, or a folder of runs, but {path!r} has no run with a "
        f"checkpoint.{hint}"
    )


def _make_resumed_settings(run: RunFolder, arguments: dict[str, Any]) -> TrainSettings:
    content = run.settings
    if "learn" in content:
        raise UsageError(
            f"{shorten_path(run.path)} was trained by a script. Resume it there: "
            f"algorithm.learn(..., run_dir={str(run.path)!r})."
        )
    settings = TrainSettings.from_json(content.get("train", {}), str(run.run_json))
    import_texts = _get_import_texts(settings)
    if missing := [text for name, text in import_texts.items() if name not in arguments]:
        raise UsageError(
            f"{shorten_path(run.path)} uses {' and '.join(missing)}, but your code is only "
            f"imported if you name it. Name it again: `{shlex.join(_make_resume_command(run))}`."
        )
    repeated = [name for name in ("env", "algo", *IMPORT_OPTIONS) if name in arguments]
    for name in repeated:
        if arguments[name] == getattr(settings, name):
            del arguments[name]
    changeable = [name for name, word in OPTIONS.items() if word.may_change_on_resume]
    unchangeable = [name for name in arguments if name not in changeable]
    if unchangeable:
        raise UsageError(
            f"{', '.join(map(get_flag, unchangeable))} cannot be given with --resume: "
            f"{shorten_path(run.path)} has fixed settings. These may be changed: "
            f"{', '.join(map(get_flag, changeable))}."
        )
    if settings.data:
        check_resumed_options(settings, arguments)
    return dataclasses.replace(settings, **arguments)


def _get_import_texts(settings: TrainSettings) -> dict[str, str]:
    """Returns the imports that the user must name again on resuming, by setting."""
    imports = {name: getattr(settings, name) for name in IMPORT_OPTIONS}
    imports["algo"] = settings.algo if is_custom_algorithm(settings.algo) else None
    is_import = isinstance(check_environment_name(settings.env), UnresolvedObject)
    env = settings.env if is_import else None
    return {name: text for name, text in {"env": env, **imports}.items() if text is not None}


def _require_no_stored_imports(run: RunFolder, settings: TrainSettings) -> None:
    """Refuses settings in run.json that would import something that the user did not name again."""
    allowed = {} if settings.env is None else {settings.env: settings.env}
    missing = find_unresolved(
        resolve_allowed(settings.make_config().to_dict(), ALGORITHM_SETTINGS, objects=allowed)
    )
    if missing:
        names = ", ".join(missing_object.name for missing_object in missing.values())
        raise UsageError(
            f"{shorten_path(run.run_json)} sets {names}, but your code is only imported if you "
            "name it. Start a new run with the same settings, or write a script."
        )


def _is_finished(run: RunFolder, console: Console) -> bool:
    """Prints a hint if a run has reached its goals."""
    finished = run.settings.get("finished")
    if finished is None:
        return False
    settings = TrainSettings.from_json(run.settings.get("train", {}), str(run.run_json))
    end = _describe_end(settings, finished)
    console.print(f"{shorten_path(run.path)} is finished: {end}.", highlight=False)
    _print_hint(console, "To train longer, use:", [*_make_resume_command(run), "--steps", "..."])
    return True


def _make_run_json(settings: TrainSettings, finished: str | None = None) -> dict[str, Any]:
    return {"train": settings.as_json(), "finished": finished}


_REASONS = {ENDED_BY_TARGET: "the target was reached", ENDED_BY_STEPS: "all steps were used"}


def _describe_end(settings: TrainSettings, reason: str) -> str:
    if settings.data and reason == ENDED_BY_STEPS:
        return "all rows were read"
    return _REASONS[reason]


def _make_resume_command(run: RunFolder) -> list[str]:
    """Returns the command that resumes a run; it repeats the imports that a file may not name."""
    train_settings = run.settings.get("train", {})
    import_texts = _get_import_texts(TrainSettings.from_json(train_settings, str(run.run_json)))
    env = [import_texts.pop("env")] if "env" in import_texts else []
    options = [word for name, text in import_texts.items() for word in (get_flag(name), text)]
    return [*_get_program(), "train", *env, "--resume", shorten_path(run.path), *options]


def _get_program() -> list[str]:
    """Returns how this program was called, as it can be typed again."""
    name = Path(sys.argv[0])
    if name.name == "__main__.py":
        return [_shorten_program(sys.executable), "-m", "tfpolicies"]
    return [_shorten_program(sys.argv[0])] if name.name == "tfpolicies" else ["tfpolicies"]


def _shorten_program(program: str) -> str:
    name = Path(program).name
    return name if shutil.which(name) == program else shorten_path(Path(program))


# -- training and exporting -------------------------------------------------------------------


def _train_and_export(job: TrainingJob) -> int:
    """Trains until the exported policy also reaches the target, or the steps are used up."""
    settings, training, console, run = job.settings, job.training, job.console, job.run
    extra_steps = 0
    while True:
        reason = training.train(
            lambda what: _save_after_error(job, what), min_new_steps=extra_steps
        )
        exported = _export_and_play(job, reason)
        mean_return = exported.mean_return
        if (
            reason == ENDED_BY_STEPS
            or mean_return is None
            or settings.until is None
            or mean_return >= settings.until
        ):
            break
        console.print(
            f"The exported policy played {mean_return:.1f}, short of {settings.until:g}: training "
            "continues.",
            highlight=False,
        )
        extra_steps = _EXTRA_BATCHES * training.algorithm.config.train_batch_size
    run.write_settings(_make_run_json(settings, reason))
    evaluation = _get_last_evaluation(job)
    _print_summary(job, reason, exported, evaluation)
    if settings.until is None:
        return DONE
    reached = reason == ENDED_BY_TARGET if mean_return is None else mean_return >= settings.until
    if mean_return is None and evaluation is not None:
        reached |= evaluation["episode_reward_mean"] >= settings.until
    return DONE if reached else TARGET_MISSED


def _get_last_evaluation(job: TrainingJob) -> Mapping[str, Any] | None:
    """Evaluates the policy of a run that learned from data, unless the last iteration did.

    Returns:
        The results of the evaluation; None for other runs, and without an environment.
    """
    algorithm = job.training.algorithm
    if not job.settings.data or algorithm.config.evaluation_interval is None:
        return None
    evaluation: Mapping[str, Any] | None = job.training.result.get("evaluation")
    if evaluation is None:
        with job.console.status("evaluating"):
            evaluation = algorithm.evaluate()["evaluation"]
    return evaluation


def _export_and_play(job: TrainingJob, reason: str) -> ExportedPolicy:
    """Exports the policy and plays with it, as requested.

    It exports the policy that reached the target; otherwise the best one, if it was kept.
    """
    settings, run, algorithm = job.settings, job.run, job.training.algorithm
    if not (settings.export or settings.play):
        return ExportedPolicy({}, {})
    policy = algorithm.get_policy()
    if reason != ENDED_BY_TARGET and settings.keep_best and run.best.exists():
        policy = load_policy(run.best, job.console, settings)
    exported = export_policy(policy, run.export, job.console, {"onnx": True, "saved_model": True})
    if not settings.play or settings.env is None:
        return exported
    with job.console.status(
        f"playing {format_count(settings.play, 'episode')} through ONNX Runtime"
    ):
        config = algorithm.config.env_config
        report = play_in_subprocess(run.export, settings.env, settings.play, _PLAY_SEED, config)
    mean, std = float(report["mean_return"]), report["std_return"]
    episodes = format_count(settings.play, "greedy episode")
    figure = (
        f"{mean:.2f} {_PLUS_MINUS} {std:.2f} over {episodes}, {describe_loaded_packages(report)}"
    )
    return ExportedPolicy(exported.files, {**exported.figures, "ONNX played": figure}, mean)


def _describe_returns(row: Mapping[str, float]) -> str:
    """Describes mean and standard deviation of the recent returns in a row of progress."""
    mean, std, episodes = (
        row.get(RECENT_PREFIX + name, math.nan) for name in ("mean", "std", "episodes")
    )
    if math.isnan(mean):
        return "none, since no episode has ended. Give the environment a time limit"
    over = format_count(int(episodes), "training episode")
    return f"{mean:.2f} {_PLUS_MINUS} {std:.2f} over the last {over}"


def _describe_progress(
    job: TrainingJob, last: Mapping[str, float], evaluation: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the figures of a run: steps, speed, and how well it learned."""
    unit = "rows" if job.settings.data else "steps"
    figures: dict[str, Any] = {
        unit: last["env_steps"],
        "seconds": round(last["time_s"], 1),
        f"{unit}/s": round(last["env_steps"] / last["time_s"]),
    }
    if not job.settings.data:
        return {**figures, "mean return": _describe_returns(last)}
    if job.settings.data_rows:
        figures["epochs"] = f"{last['env_steps'] / job.settings.data_rows:,.4g}"
    if not math.isnan(loss := find_loss(last)):
        figures["loss"] = loss
    if evaluation is not None:
        returns = evaluation["hist_stats"]["episode_reward"]
        mean, std = evaluation["episode_reward_mean"], statistics.pstdev(returns or [0.0])
        episodes = format_count(len(returns), "episode")
        figures["mean return"] = f"{mean:.2f} {_PLUS_MINUS} {std:.2f} over {episodes}"
    return figures


def _print_summary(
    job: TrainingJob,
    reason: str,
    exported: ExportedPolicy,
    evaluation: Mapping[str, Any] | None,
) -> None:
    run, settings = job.run, job.settings
    figures = _describe_progress(job, read_progress(run.progress_csv)[-1], evaluation)
    files = {
        **exported.files,
        "learning curve": run.learning_curve,
        "progress CSV": run.progress_csv,
        "TensorBoard": run.events,
        "checkpoint": run.latest,
        "best checkpoint": run.best,
        "videos": run.videos,
    }
    job.console.print()
    title = f"{settings.title}: {_describe_end(settings, reason)}"
    job.console.print(make_summary_table(title, {**figures, **exported.figures}))
    job.console.print()
    print_files(job.console, files)
    if _get_import_texts(settings):
        text = "To train longer, name your code again:"
        _print_hint(job.console, text, [*_make_resume_command(run), "--steps", "..."])


def _print_hint(console: Console, text: str, command: list[str]) -> None:
    console.print(text)
    console.print(f"  {shlex.join(command)}", markup=False, highlight=False, soft_wrap=True)


# -- early ends -------------------------------------------------------------------------------


def _handle_early_end(job: TrainingJob, error: BaseException, *, debug: bool) -> int:
    """Saves the state of an interrupted training, prints how to resume; returns the exit status."""
    signals = get_active_handler()
    signals.acknowledge()
    if signals.requested is not None and not isinstance(error, SignalInterrupt):
        error = SignalInterrupt(signals.requested)  # environments' processes may get it as well
    status, message = get_exit_status(error, work_started=True), describe_error(error)
    if isinstance(error, KeyboardInterrupt):
        message = message.capitalize()
    else:
        message = f"tfpolicies: error: {message}"
    if status in (FAILED, NOT_FINITE):
        trace = "".join(traceback.format_exception(error))
        if debug:
            print_to_stderr(trace)
        with contextlib.suppress(OSError):
            write_atomically(job.run.error_txt, trace.encode(errors="replace"))
            message = f"{message}.\nThe traceback is in {shorten_path(job.run.error_txt)}"
    if status == NOT_FINITE:  # the state is not worth saving
        print_to_stderr(f"{message}. Nothing was saved.")
        _print_resume_command(job.run)
        return status
    with signals.allow_unlimited_time():
        _save_after_error(job, message)
    return status


def _save_after_error(job: TrainingJob, message: str) -> None:
    """Saves unsaved progress, and prints what happened and how to resume."""
    run = job.run
    try:
        job.training.run_logger.emergency_save()
    except CheckpointError as error:
        print_to_stderr(f"{message}. Unsaved progress is lost: {error}")
    else:
        outcome = (
            f"Saved in {shorten_path(run.latest)}."
            if run.has_checkpoint
            else "Nothing was trained yet."
        )
        print_to_stderr(f"{message}. {outcome}")
    _print_resume_command(run)


def _print_resume_command(run: RunFolder) -> None:
    print_to_stderr(f"Resume with:\n  {shlex.join(_make_resume_command(run))}")
