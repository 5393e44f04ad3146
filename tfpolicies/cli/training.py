"""The command `train`: trains or resumes a run, exports and plays the policy, prints a summary."""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import statistics
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from tfpolicies.algorithms.run_logger import RunLogger
from tfpolicies.algorithms.training_loop import TrainingLoop, notify_callbacks
from tfpolicies.analysis.diagnosis import diagnose_record
from tfpolicies.analysis.run_record import read_run
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
    format_export_command,
    load_policy,
    load_tensorflow_with_status,
    make_checkpoint_card,
    print_files,
)
from tfpolicies.cli.run_settings import (
    describe_reason,
    find_run_to_resume,
    get_import_texts,
    get_own_loggers,
    get_program,
    is_finished,
    make_new_settings,
    make_resume_command,
    make_resumed_settings,
    make_run_json,
    print_hint,
    require_no_stored_imports,
)
from tfpolicies.cli.train_options import (
    TrainSettings,
    get_algorithm_class,
    make_loggers,
)
from tfpolicies.cli.training_data import (
    check_data,
    complete_data_settings,
    describe_plan,
    require_data,
    require_trust,
)
from tfpolicies.config.callbacks import join_callbacks
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.export.model_card import ReturnFigure, add_evaluation
from tfpolicies.reporting.progress_csv import read_progress_columns
from tfpolicies.reporting.progress_display import CommandConsole, format_count, make_summary_table
from tfpolicies.reporting.progress_row import RECENT_PREFIX, describe_times, find_loss
from tfpolicies.reporting.run_folder import (
    ENDED_BY_CALLBACK,
    ENDED_BY_STEPS,
    ENDED_BY_TARGET,
    RunFolder,
)
from tfpolicies.system.paths import resolve_path, shorten_path
from tfpolicies.system.signal_handling import SignalInterrupt, get_active_handler, print_to_stderr

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm import Algorithm

logger = logging.getLogger("tfpolicies")

_EXTRA_BATCHES = 10  # further train batches if the exported policy missed the target
_PLAY_SEED = 1_000_003  # far from the seeds of training episodes
_PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


class TrainingJob(NamedTuple):
    """A training with its run folder and console."""

    run: RunFolder
    records: RunLogger
    settings: TrainSettings
    training: TrainingLoop
    console: Console


def train(arguments: dict[str, Any], *, debug: bool) -> int:
    """Trains, exports and plays; see `tfpolicies train --help`. Returns the exit status.

    Errors of settings, environment and construction are raised before a run folder is made.

    Args:
        arguments: the options of the command, by name.
        debug: whether to show the traceback of an error.
    """
    run_folder = arguments.pop("run_folder", None)  # of one of several seeds
    model_work_limit = arguments.pop("model_work_limit", 1.0)  # not stored in the run folder
    console = CommandConsole()
    with contextlib.ExitStack() as exit_stack:
        run, parent = None, resolve_path(arguments.get("run_dir", RUNS))
        is_resumed = "resume" in arguments
        if is_resumed:
            resume_path = arguments.pop("resume")
            path = arguments.pop("run_dir", RUNS) if resume_path is None else resume_path
            run = exit_stack.enter_context(find_run_to_resume(path).acquire())
            settings = require_trust(make_resumed_settings(run, arguments), arguments)
            if not arguments and is_finished(run, console):
                return DONE
        else:
            settings = make_new_settings(arguments)
            console.print(settings.describe_tuned(), highlight=False, soft_wrap=True)
        loggers = make_loggers(settings.logger)
        load_tensorflow_with_status(console)
        if run is not None:
            require_no_stored_imports(run.run_json, settings)
            if settings.data:
                require_data(settings, shlex.join(make_resume_command(run)))
        if settings.data:
            settings = complete_data_settings(settings, arguments, console, is_new=run is None)
        with console.status("building"):
            algorithm = restore_or_build(run, settings, model_work_limit)
        exit_stack.callback(_stop, algorithm)
        if settings.data:
            check_data(algorithm, settings, console)
            console.print(describe_plan(algorithm, settings), highlight=False, soft_wrap=True)
        algorithm.warns_about_unserializable = False
        algorithm.callbacks = join_callbacks([algorithm.callbacks, *loggers])
        _require_exportable(algorithm, settings)
        _require_rendering(algorithm, settings)
        if run is None:
            run_json = make_run_json(settings)
            run = exit_stack.enter_context(
                RunFolder.create(parent, settings.run_name, run_json)
                if run_folder is None
                else RunFolder.create_at(run_folder, run_json)
            )
        elif arguments:
            run.write_settings(make_run_json(settings))
        records = RunLogger(run, algorithm, settings.goals)
        exit_stack.callback(records.close)
        training = TrainingLoop(algorithm, settings.goals, records, console)
        job = TrainingJob(run, records, settings, training, console)
        algorithm.run_dir = run.path
        folder = f"Run folder: {shorten_path(run.path)}  (seed {settings.seed})"
        console.print(folder, highlight=False)
        if is_resumed:
            console.print(f"Training resumes {records.describe_resumption()}", highlight=False)
        with notify_callbacks(algorithm, run.path) as end:
            try:
                status, end.reason = _train_and_export(job)
                return status
            except BaseException as error:
                end.set_error(error)
                return _handle_early_end(job, error, debug=debug)


def _stop(algorithm: Algorithm) -> None:
    """Closes an algorithm; errors of environments are logged and do not change the exit status."""
    try:
        algorithm.stop()
    except Exception as error:
        logger.warning("The environments could not be closed: %r", error)


# -- building ---------------------------------------------------------------------------------


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


def _require_exportable(algorithm: Algorithm, settings: TrainSettings) -> None:
    """Refuses `--export` and `--play` with several policies, and `--play` with several agents."""
    ids = sorted(algorithm.worker.policy_map)
    if (settings.export or settings.play) and DEFAULT_POLICY_ID not in ids:
        raise UsageError(
            f"--export and --play need a run with one policy, but this one has {ids}. Train "
            f"without them, and export a policy afterwards: {format_export_command('RUN', ids[0])}."
        )
    if settings.play and isinstance(algorithm.worker.environments, MultiAgentEnvAdapter):
        raise UsageError(
            f"--play plays environments with one agent, but {settings.env} has several. Train "
            "without it, and use `tfpolicies evaluate RUN` afterwards."
        )


def _require_rendering(algorithm: Algorithm, settings: TrainSettings) -> None:
    """Checks that the environment renders, if videos are to be recorded."""
    if settings.record_every:
        from tfpolicies.algorithms.episode_playback import PlaySetup, require_renderable

        require_renderable(PlaySetup(algorithm))


# -- training and exporting -------------------------------------------------------------------


def _train_and_export(job: TrainingJob) -> tuple[int, str]:
    """Trains until the exported policy also reaches the target, or the steps are used up.

    Returns:
        The exit status, and the reason why training ended.
    """
    settings, training, console, run = job.settings, job.training, job.console, job.run
    extra_steps = 0
    while True:
        reason = training.train(
            lambda what: _save_after_error(job, what), min_new_steps=extra_steps
        )
        exported = _export_and_play(job, reason)
        mean_return = exported.mean_return
        if (
            reason in (ENDED_BY_STEPS, ENDED_BY_CALLBACK)
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
    run.write_settings(make_run_json(settings, reason))
    evaluation = _get_last_evaluation(job)
    _print_summary(job, reason, exported, evaluation)
    if settings.until is None:
        return DONE, reason
    reached = reason == ENDED_BY_TARGET if mean_return is None else mean_return >= settings.until
    if mean_return is None and evaluation is not None:
        reached |= evaluation["episode_reward_mean"] >= settings.until
    return DONE if reached else TARGET_MISSED, reason


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
    policy, checkpoint = algorithm.get_policy(), run.latest
    if reason != ENDED_BY_TARGET and settings.keep_best and run.best.exists():
        policy, checkpoint = load_policy(run.best, job.console, settings), run.best
    card, formats = make_checkpoint_card(checkpoint), {"onnx": True, "saved_model": True}
    exported = export_policy(policy, run.export, job.console, formats, card)
    if not settings.play or settings.env is None:
        return exported
    with job.console.status(
        f"playing {format_count(settings.play, 'episode')} through ONNX Runtime"
    ):
        config = algorithm.config.env_config
        report = play_in_subprocess(run.export, settings.env, settings.play, _PLAY_SEED, config)
    mean, std = float(report["mean_return"]), report["std_return"]
    evaluation = ReturnFigure(mean_return=mean, episodes=settings.play, explores=False)
    for path in exported.files.values():
        add_evaluation(path.parent if path.is_file() else path, evaluation)
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
        unit: int(last["env_steps"]),
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
    columns = read_progress_columns(run.progress_csv)
    last = {name: float(values[-1]) for name, values in columns.items()}
    figures = _describe_progress(job, last, evaluation)
    times = describe_times(columns)
    if times:
        figures["time"] = times
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
    title = f"{settings.title}: {describe_reason(settings, reason)}"
    job.console.print(make_summary_table(title, {**figures, **exported.figures}))
    job.console.print()
    score = job.records.best_score
    notes = {} if math.isinf(score) else {"best checkpoint": f"mean return {score:,.2f}"}
    print_files(job.console, files, notes)
    causes = diagnose_record(read_run(run.path), is_training=False).causes
    if causes:
        count = format_count(len(causes), "cause")
        text = f"The run may not learn as it could ({count} found, first: {causes[0].title}):"
        print_hint(job.console, text, [*get_program(), "doctor", shorten_path(run.path)])
    if get_import_texts(settings) or get_own_loggers(settings):
        text = "To train longer, name your code again:"
        print_hint(job.console, text, [*make_resume_command(run), "--steps", "..."])


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
        job.run.write_error(error)
        if job.run.error_txt.exists():
            message = f"{message}.\nThe traceback is in {shorten_path(job.run.error_txt)}"
    if status == NOT_FINITE:  # the state is not worth saving
        job.run.write_error(error)
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
    print_to_stderr(f"Resume with:\n  {shlex.join(make_resume_command(run))}")
