"""Implements `Algorithm.learn`: run folder, resuming, callbacks and progress output."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tfpolicies.algorithms.host import HostAlgorithm
from tfpolicies.algorithms.recording import Scene, require_pictures
from tfpolicies.algorithms.run_records import Goals, NoRecords, RunRecords
from tfpolicies.algorithms.run_state import get_progress
from tfpolicies.algorithms.training_run import TrainingRun
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import (
    DefaultCallbacks,
    joined_callbacks,
    overrides,
    warn_of_unknown_methods,
)
from tfpolicies.config.idioms import callback_hint
from tfpolicies.config.stored_config import encode_config
from tfpolicies.envs.registry import env_name
from tfpolicies.errors import CheckpointError, ConfigError, NonFiniteError, UsageError
from tfpolicies.policy.checkpoints import ALGORITHM_MANIFEST
from tfpolicies.reporting.progress_row import as_number
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.storage.checkpoint import read_manifest
from tfpolicies.storage.json_values import encode_value
from tfpolicies.system.paths import resolve_path
from tfpolicies.type_aliases import Json

logger = logging.getLogger("tfpolicies")

_TOLD_BY_ALGORITHM = (
    *("on_train_result", "on_evaluate_start", "on_evaluate_end"),
    *("on_workers_recreated", "on_checkpoint_loaded"),
)
_GREEDY = "Evaluations are greedy, since evaluation_config does not set explore."
_SHOWN = 3  # different settings in a message
_RESOLVED = ("inference", "jit_compile")  # "auto" may resolve differently in another version

Callback = DefaultCallbacks | Callable[..., object]
"""A `DefaultCallbacks` instance or class, or a function `f(algorithm, result)`."""


class Learned(NamedTuple):
    """The return value of `Algorithm.learn`."""

    result: dict[str, Any]  # of `train` in the last iteration; empty if none was needed
    ended_by: str  # "steps", "target" or "callback"
    run_dir: Path | None  # absolute

    def __repr__(self) -> str:
        """Returns a one-line summary, since the result dict is long."""
        words = [f"ended by {self.ended_by}"]
        if self.result:
            words.insert(0, f"{self.result['timesteps_total']:,} steps")
            mean = self.result.get("recent_returns", {}).get("mean", math.nan)
            ended = "no episode has ended" if math.isnan(mean) else f"mean return {mean:.4g}"
            words.insert(1, ended)
        if self.run_dir is not None:
            words.append(f"run_dir={str(self.run_dir)!r}")
        return f"Learned({', '.join(words)})"


def learn(
    algorithm: HostAlgorithm,
    goals: Goals,
    *,
    run_dir: str | PathLike[str] | None,
    progress: bool,
    callbacks: Callback | Sequence[Callback],
) -> Learned:
    """Trains an algorithm; see `Algorithm.learn`."""
    folder = None if run_dir is None else resolve_path(run_dir)  # environments may change the cwd
    goals = _checked(goals, algorithm)
    if goals.record_every and folder is None:
        raise UsageError("record_every needs a run_dir: videos go into its folder `videos`.")
    if goals.record_every:
        require_pictures(Scene(algorithm))
    told, followers = _told(callbacks)
    console = Console(quiet=not progress, force_terminal=None if progress else False)
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    iteration = algorithm.iteration
    with contextlib.ExitStack() as closing:
        closing.callback(setattr, algorithm, "callbacks", algorithm.callbacks)
        if told:
            algorithm.callbacks = joined_callbacks([algorithm.callbacks, *told])
        run = None
        if folder is not None:
            run = closing.enter_context(_held(folder, type(algorithm).__name__))
            _go_on(algorithm, run)
            algorithm.run_dir = run.path
        if run is not None and algorithm.iteration > iteration:
            say(f"Training resumes in {run.path} after iteration {algorithm.iteration}.")
        evaluator = algorithm._evaluator
        if evaluator.is_greedy_by_config is None:
            evaluator.explore = False
            closing.callback(setattr, evaluator, "explore", None)
            if algorithm.config.evaluation_interval is not None:
                say(_GREEDY)
        records = NoRecords() if run is None else RunRecords(run, algorithm, goals)
        closing.callback(records.close)
        training = TrainingRun(algorithm, goals, records, console, followers)
        if training.env_steps >= goals.steps:
            logger.warning(
                "The algorithm has %d environment steps already, so total_timesteps=%d leaves "
                "nothing to do. Earlier steps count: give a larger number to continue training.",
                training.env_steps,
                goals.steps,
            )
        try:
            ended_by = training.train(lambda what: records.rescue())
        except NonFiniteError:  # the newest checkpoint is better than the current state
            raise
        except BaseException:
            _rescue(records, run)
            raise
    return Learned(training.result, ended_by, None if run is None else run.path)


def _checked(goals: Goals, algorithm: HostAlgorithm) -> Goals:
    """Validates training options and adds a title; raises `UsageError` for invalid numbers."""
    name = env_name(algorithm.config.env)
    if goals.until is not None and as_number(goals.until) is None:
        raise UsageError(f"until must be a number or None, got {goals.until!r}.")
    return dataclasses.replace(
        goals,
        steps=as_count("total_timesteps", goals.steps),
        checkpoint_every=as_count("checkpoint_every", goals.checkpoint_every),
        keep_checkpoints=as_count("keep_checkpoints", goals.keep_checkpoints),
        record_every=goals.record_every and as_count("record_every", goals.record_every),
        title=f"{type(algorithm).__name__} on {name}",
    )


def as_count(name: str, value: float) -> int:
    """Converts a whole number >= 1 to int.

    Raises:
        UsageError: for other values; it names the argument.
    """
    number = as_number(value)
    if number is None or number < 1 or not float(number).is_integer():
        raise UsageError(f"{name} must be a whole number, 1 or more, got {value!r}.")
    return int(number)


def _rescue(records: RunRecords | NoRecords, run: RunFolder | None) -> None:
    """Saves unsaved training state; only logs a failure, so that the original error is raised."""
    try:
        records.rescue()
    except CheckpointError as error:
        logger.error("Training since the last checkpoint is lost: %s", error)
        return
    if run is not None and run.has_checkpoint:
        logger.warning("Training ended early. Its state is saved in %s.", run.latest)


# -- the folder -------------------------------------------------------------------------------


def _held(path: Path, trained: str) -> RunFolder:
    """Opens or creates the run folder and holds it.

    Raises:
        UsageError: if the folder is neither a run nor empty.
        FolderInUseError: if another process trains there.
    """
    if RunFolder(path).run_json.exists():
        return RunFolder.open(path).hold()
    return RunFolder.make(path, {"learn": trained})


def _go_on(algorithm: HostAlgorithm, run: RunFolder) -> None:
    """Restores a new algorithm from a run; checks that one that has trained belongs to the run.

    Raises:
        UsageError: if it is another run.
        CheckpointError: if its checkpoint is damaged, or does not fit the algorithm.
    """
    if not run.has_checkpoint:
        return
    manifest = read_manifest(run.latest, ALGORITHM_MANIFEST, kind="Algorithm")
    stored, own = manifest["progress"], get_progress(algorithm)
    if algorithm.iteration == 0:
        _require_same_settings(algorithm, manifest, run)
        algorithm.restore(run.latest, allow_non_finite=algorithm.config.on_nan == "warn")
        return
    is_its_own = algorithm.run_dir == run.path
    if is_its_own and stored["iteration"] <= algorithm.iteration:
        return
    if any(stored[key] != own[key] for key in ("iteration", "time_total_s")):
        raise UsageError(
            f"{str(run.path)!r} holds another run, at iteration {stored['iteration']}, but this "
            f"algorithm has trained {own['iteration']} iterations elsewhere. Give another run_dir; "
            f"or resume that run: {type(algorithm).__name__}.from_checkpoint("
            f"{str(run.latest)!r}).learn(..., run_dir={str(run.path)!r})."
        )


def _require_same_settings(
    algorithm: HostAlgorithm, manifest: Mapping[str, Any], run: RunFolder
) -> None:
    """Checks that a new algorithm has the class and the settings of a run.

    Settings that the run lacks, from an earlier version, count as defaults, also within dicts.
    """
    defaults = _as_stored(algorithm.get_default_config())
    settings = {**defaults, **manifest["config"]["settings"]}
    stored = {"the class": manifest["algorithm_class"], **settings}
    own = {"the class": encode_value(type(algorithm)), **_as_stored(algorithm.config)}
    differing = sorted(
        name
        for name in {*stored, *own}.difference(_RESOLVED)
        if own.get(name) not in (stored.get(name), _filled(stored.get(name), defaults.get(name)))
        and own.get(name) != _as_kept_now(algorithm, name, stored)
    )
    if differing:
        shown = ", ".join(
            f"{name} (there {stored.get(name)!r:.60}, here {own.get(name)!r:.60})"
            for name in differing[:_SHOWN]
        )
        if len(differing) > _SHOWN:
            shown += f" and {len(differing) - _SHOWN} more"
        raise UsageError(
            f"{str(run.path)!r} holds a run with other settings: {shown}. Give another run_dir for "
            "a new run, or the same settings to resume that one."
        )


def _filled(stored: Json, default: Json) -> Json:
    """Returns a stored setting; missing keys of a dict are added from its default."""
    if isinstance(stored, dict) and isinstance(default, dict):
        return {**default, **stored}
    return stored


def _as_kept_now(algorithm: HostAlgorithm, name: str, stored: Mapping[str, Any]) -> Any:
    """Returns a stored setting as configs normalise it now, for example an absolute folder."""
    with contextlib.suppress(ConfigError):
        config = algorithm.get_default_config().update_from_dict({name: stored[name]})
        return _as_stored(config)[name]
    return stored.get(name)


def _as_stored(config: AlgorithmConfig) -> dict[str, Any]:
    settings = encode_config(config.to_dict())["settings"]
    return json.loads(json.dumps(settings))


# -- callbacks --------------------------------------------------------------------------------


def _told(
    callbacks: Callback | Sequence[Callback],
) -> tuple[list[DefaultCallbacks], list[Callable[..., Any]]]:
    """Splits callbacks into `DefaultCallbacks` instances and plain functions.

    Raises:
        UsageError: for other objects, and for overridden methods that only workers call.
    """
    told: list[DefaultCallbacks] = []
    followers: list[Callable[..., Any]] = []
    for given in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        made = given() if isinstance(given, type) else given
        if isinstance(made, DefaultCallbacks):
            _require_told_by_algorithm(made)
            warn_of_unknown_methods(made)
            told.append(made)
        elif callable(made):
            followers.append(made)
        else:
            raise UsageError(
                "callbacks must be functions f(algorithm, result), or DefaultCallbacks, got "
                f"{given!r:.200}.{callback_hint(given)}"
            )
    return told, followers


def _require_told_by_algorithm(callbacks: DefaultCallbacks) -> None:
    moments = [name for name in vars(DefaultCallbacks) if name.startswith("on_")]
    own = [name for name in moments if overrides(callbacks, name)]
    others = [name for name in own if name not in _TOLD_BY_ALGORITHM]
    if others:
        kind = type(callbacks).__name__
        raise UsageError(
            f"{kind} overrides {', '.join(others)}, which workers call from their creation on. "
            f"Pass the class to the config: "
            f"config.callbacks({kind})."
        )
