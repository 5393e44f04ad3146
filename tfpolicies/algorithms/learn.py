"""Implements `Algorithm.learn`: run folder, resuming, callbacks and progress output."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import keras
from rich.console import Console

from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
from tfpolicies.algorithms.episode_playback import PlaySetup, require_renderable
from tfpolicies.algorithms.keras_callbacks import KerasCallbacks, is_keras_callback
from tfpolicies.algorithms.run_logger import NullRunLogger, RunLogger, TrainingOptions
from tfpolicies.algorithms.training_loop import TrainingLoop, notify_callbacks
from tfpolicies.algorithms.training_state import get_progress
from tfpolicies.base.type_aliases import Json
from tfpolicies.config.callbacks import (
    DefaultCallbacks,
    join_callbacks,
    overrides,
    warn_of_unknown_methods,
)
from tfpolicies.config.description import encode_settings
from tfpolicies.config.migration_hints import suggest_callback
from tfpolicies.envs.env_registry import get_env_name
from tfpolicies.errors import CheckpointError, ConfigError, NonFiniteError, UsageError
from tfpolicies.reporting.notebook import make_media_html
from tfpolicies.reporting.progress_row import to_number
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.rollout.experience_output import set_log_dir
from tfpolicies.storage.checkpoint import read_manifest
from tfpolicies.storage.json_values import encode_value
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST
from tfpolicies.storage.migrations import migrate_settings
from tfpolicies.system.paths import resolve_path

logger = logging.getLogger("tfpolicies")

_ALGORITHM_CALLBACKS = (
    *("on_run_start", "on_iteration_start", "on_iteration_end", "on_training_end", "on_run_end"),
    *("on_train_result", "on_evaluate_start", "on_evaluate_end"),
    *("on_workers_recreated", "on_checkpoint_loaded"),
)
_GREEDY_NOTICE = "Evaluations are greedy, since evaluation_config does not set explore."
_MAX_SETTINGS_SHOWN = 3  # different settings in a message
_AUTO_SETTINGS = ("inference", "jit_compile")  # "auto" may resolve differently in another version

Callback: TypeAlias = DefaultCallbacks | keras.callbacks.Callback | Callable[..., object]
"""A `DefaultCallbacks` or Keras callback, or a function `f(algorithm, result)`."""


class LearnResult(NamedTuple):
    """The return value of `Algorithm.learn`."""

    result: dict[str, Any]  # of `train` in the last iteration; empty if none was needed
    ended_by: str  # "steps", "target" or "callback"
    run_dir: Path | None  # absolute

    def __repr__(self) -> str:
        """Returns a one-line summary, since the result dict is long."""
        parts = [f"ended by {self.ended_by}"]
        if self.result:
            parts.insert(0, f"{self.result['timesteps_total']:,} steps")
            mean = self.result.get("recent_returns", {}).get("mean", math.nan)
            return_text = "no episode has ended" if math.isnan(mean) else f"mean return {mean:.4g}"
            parts.insert(1, return_text)
        if self.run_dir is not None:
            parts.append(f"run_dir={str(self.run_dir)!r}")
        return f"LearnResult({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Shows the learning curve in a notebook, if the run has one."""
        summary = f"<p>{html.escape(repr(self))}</p>"
        curve = None if self.run_dir is None else RunFolder(self.run_dir).learning_curve
        if curve is None or not curve.exists():
            return summary
        return summary + make_media_html([curve], "Learning curve")


def learn(
    algorithm: AlgorithmProtocol,
    options: TrainingOptions,
    *,
    run_dir: str | PathLike[str] | None,
    progress: bool,
    callbacks: Callback | Sequence[Callback],
) -> LearnResult:
    folder = None if run_dir is None else resolve_path(run_dir)  # environments may change the cwd
    options = _validate_options(options, algorithm)
    if options.record_every and folder is None:
        raise UsageError("record_every needs a run_dir: videos go into its folder `videos`.")
    if options.record_every:
        require_renderable(PlaySetup(algorithm))
    callback_objects, functions = _split_callbacks(callbacks)
    for callback in callback_objects:
        if isinstance(callback, KerasCallbacks):
            callback.check(algorithm)
    console = Console(quiet=not progress, force_terminal=None if progress else False)
    print_line = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, algorithm, "callbacks", algorithm.callbacks)
        if callback_objects:
            algorithm.callbacks = join_callbacks([algorithm.callbacks, *callback_objects])
        run = None
        if folder is not None:
            run = stack.enter_context(_open_run_folder(folder, type(algorithm).__name__))
            _resume(algorithm, run)
            algorithm.run_dir = run.path
            if algorithm.config.output == "logdir":
                algorithm.workers.foreach_worker(functools.partial(set_log_dir, folder=run.path))
        evaluator = algorithm._evaluator
        if evaluator.is_greedy_by_config is None:
            evaluator.explore = False
            stack.callback(setattr, evaluator, "explore", None)
            if algorithm.config.evaluation_interval is not None:
                print_line(_GREEDY_NOTICE)
        has_rows = run is not None and run.progress_csv.exists()
        if run is not None and has_rows and not (run.has_checkpoint or algorithm.iteration):
            print_line(f"The run in {run.path} has no checkpoint yet: training starts again.")
        run_logger = NullRunLogger() if run is None else RunLogger(run, algorithm, options)
        stack.callback(run_logger.close)
        if isinstance(run_logger, RunLogger) and run_logger.run.has_checkpoint:
            print_line(
                f"Training resumes in {run_logger.run.path} {run_logger.describe_resumption()}"
            )
        loop = TrainingLoop(algorithm, options, run_logger, console, functions)
        if loop.env_steps >= options.steps:
            logger.warning(
                "The algorithm has %d environment steps already, so total_timesteps=%d leaves "
                "nothing to do. Earlier steps count: give a larger number to continue training.",
                loop.env_steps,
                options.steps,
            )
        run_path = None if run is None else run.path
        if run is not None and "finished" in run.settings:
            run.write_settings({"learn": type(algorithm).__name__})  # it continues
        with notify_callbacks(algorithm, run_path) as end:
            try:
                end.reason = loop.train(lambda what: run_logger.emergency_save())
            except BaseException as error:
                if run is not None and isinstance(error, Exception):
                    run.write_error(error)
                if not isinstance(error, NonFiniteError):  # then the newest checkpoint is better
                    _emergency_save(run_logger, run)
                raise
            if run is not None:
                run.write_settings({"learn": type(algorithm).__name__, "finished": end.reason})
    return LearnResult(loop.result, end.reason, run_path)


def _validate_options(options: TrainingOptions, algorithm: AlgorithmProtocol) -> TrainingOptions:
    """Validates training options and adds a title; raises `UsageError` for invalid numbers."""
    name = get_env_name(algorithm.config.env)
    if options.until is not None and to_number(options.until) is None:
        raise UsageError(f"until must be a number or None, got {options.until!r}.")
    return dataclasses.replace(
        options,
        steps=to_positive_int("total_timesteps", options.steps),
        checkpoint_every=to_positive_int("checkpoint_every", options.checkpoint_every),
        keep_checkpoints=to_positive_int("keep_checkpoints", options.keep_checkpoints),
        record_every=options.record_every and to_positive_int("record_every", options.record_every),
        title=f"{type(algorithm).__name__} on {name}",
    )


def to_positive_int(name: str, value: float) -> int:
    """Converts a whole number >= 1 to int."""
    number = to_number(value)
    if number is None or number < 1 or not float(number).is_integer():
        raise UsageError(f"{name} must be a whole number, 1 or more, got {value!r}.")
    return int(number)


def _emergency_save(run_logger: RunLogger | NullRunLogger, run: RunFolder | None) -> None:
    """Saves unsaved training state; only logs a failure, so that the original error is raised."""
    try:
        run_logger.emergency_save()
    except CheckpointError as error:
        logger.error("Training since the last checkpoint is lost: %s", error)
        return
    if run is not None and run.has_checkpoint:
        logger.warning("Training ended early. Its state is saved in %s.", run.latest)


# -- the folder -------------------------------------------------------------------------------


def _open_run_folder(path: Path, algorithm_name: str) -> RunFolder:
    """Opens or creates the run folder and holds it.

    Raises:
        UsageError: if the folder is neither a run nor empty.
        FolderInUseError: if another process trains there.
    """
    if RunFolder(path).run_json.exists():
        return RunFolder.open(path).acquire()
    return RunFolder.create_at(path, {"learn": algorithm_name})


def _resume(algorithm: AlgorithmProtocol, run: RunFolder) -> None:
    """Restores a new algorithm from a run; checks that one that has trained belongs to the run.

    Raises:
        UsageError: if it is another run.
        CheckpointError: if its checkpoint is damaged, or does not fit the algorithm.
    """
    if not run.has_checkpoint:
        return
    manifest = read_manifest(run.latest, ALGORITHM_MANIFEST, kind="Algorithm")
    stored_progress, progress = manifest["progress"], get_progress(algorithm)
    if algorithm.iteration == 0:
        _require_same_settings(algorithm, manifest, run)
        algorithm.restore(run.latest, allow_non_finite=algorithm.config.on_nan == "warn")
        return
    is_same_run = algorithm.run_dir == run.path
    if is_same_run and stored_progress["iteration"] <= algorithm.iteration:
        return
    if any(stored_progress[key] != progress[key] for key in ("iteration", "time_total_s")):
        raise UsageError(
            f"{str(run.path)!r} holds another run, at iteration {stored_progress['iteration']}, "
            f"but this algorithm has trained {progress['iteration']} iterations elsewhere. Give "
            "another run_dir; or resume that run: "
            f"{type(algorithm).__name__}.from_checkpoint({str(run.latest)!r}).learn(..., "
            f"run_dir={str(run.path)!r})."
        )


def _require_same_settings(
    algorithm: AlgorithmProtocol, manifest: Mapping[str, Any], run: RunFolder
) -> None:
    """Checks that a new algorithm has the class and the settings of a run.

    Settings that the run lacks, from an earlier version, count as defaults, also within dicts.
    """
    defaults = encode_settings(algorithm.get_default_config().to_dict())
    settings = {**defaults, **migrate_settings(manifest["config"]["settings"])}
    stored_settings = {"the class": manifest["algorithm_class"], **settings}
    settings_now = {
        "the class": encode_value(type(algorithm)),
        **encode_settings(algorithm.config.to_dict()),
    }
    different_names = sorted(
        name
        for name in {*stored_settings, *settings_now}.difference(_AUTO_SETTINGS)
        if settings_now.get(name)
        not in (
            stored_settings.get(name),
            _fill_in_defaults(stored_settings.get(name), defaults.get(name)),
        )
        and settings_now.get(name) != _normalize_stored_setting(algorithm, name, stored_settings)
    )
    if different_names:
        differences = ", ".join(
            f"{name} (there {stored_settings.get(name)!r:.60}, here {settings_now.get(name)!r:.60})"
            for name in different_names[:_MAX_SETTINGS_SHOWN]
        )
        if len(different_names) > _MAX_SETTINGS_SHOWN:
            differences += f" and {len(different_names) - _MAX_SETTINGS_SHOWN} more"
        raise UsageError(
            f"{str(run.path)!r} holds a run with other settings: {differences}. Give another "
            "run_dir for a new run, or the same settings to resume that one."
        )


def _fill_in_defaults(stored_value: Json, default: Json) -> Json:
    """Returns a stored setting; missing keys of a dict are added from its default."""
    if isinstance(stored_value, dict) and isinstance(default, dict):
        return {**default, **stored_value}
    return stored_value


def _normalize_stored_setting(
    algorithm: AlgorithmProtocol, name: str, stored_settings: Mapping[str, Any]
) -> Any:
    """Returns a stored setting as configs normalise it now, for example an absolute folder."""
    with contextlib.suppress(ConfigError):
        config = algorithm.get_default_config().update_from_dict({name: stored_settings[name]})
        return encode_settings(config.to_dict())[name]
    return stored_settings.get(name)


# -- callbacks --------------------------------------------------------------------------------


def _split_callbacks(
    callbacks: Callback | Sequence[Callback],
) -> tuple[list[DefaultCallbacks], list[Callable[..., Any]]]:
    """Splits callbacks into `DefaultCallbacks` instances and plain functions.

    Keras callbacks become one `KerasCallbacks`.
    """
    callback_objects: list[DefaultCallbacks] = []
    functions: list[Callable[..., Any]] = []
    keras_callbacks: list[Any] = []
    for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        instance = callback() if isinstance(callback, type) else callback
        if is_keras_callback(instance):
            keras_callbacks.append(instance)
        elif isinstance(instance, DefaultCallbacks):
            _require_algorithm_callbacks(instance)
            warn_of_unknown_methods(instance)
            callback_objects.append(instance)
        elif callable(instance):
            functions.append(instance)
        else:
            raise UsageError(
                "callbacks must be functions f(algorithm, result), DefaultCallbacks or Keras "
                f"callbacks, got {callback!r:.200}.{suggest_callback(callback)}"
            )
    if keras_callbacks:
        callback_objects.append(KerasCallbacks(keras_callbacks))
    return callback_objects, functions


def _require_algorithm_callbacks(callbacks: DefaultCallbacks) -> None:
    method_names = [name for name in vars(DefaultCallbacks) if name.startswith("on_")]
    overridden = [name for name in method_names if overrides(callbacks, name)]
    unsupported = [name for name in overridden if name not in _ALGORITHM_CALLBACKS]
    if unsupported:
        class_name = type(callbacks).__name__
        raise UsageError(
            f"{class_name} overrides {', '.join(unsupported)}, which workers call from their "
            f"creation on. Pass the class to the config: config.callbacks({class_name})."
        )
