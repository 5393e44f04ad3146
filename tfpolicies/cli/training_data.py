"""Recorded experience as the input of `tfpolicies train`: checks the options and the data."""

from __future__ import annotations

import dataclasses
import glob
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tfpolicies.cli.train_options import TrainSettings, get_flag
from tfpolicies.errors import BatchError, ConfigError, UsageError
from tfpolicies.reporting.progress_display import format_count
from tfpolicies.system.paths import resolve_path, shorten_path

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm import Algorithm

_DEFAULT_ALGORITHM = "BC"
_DEFAULT_EPOCHS, _MIN_DEFAULT_ROWS = 10, 100_000
_EVALUATIONS = 10  # of a run with an environment, unless --eval-every is given
_NEEDS_DATA = ("columns", "trusted_data", "epochs")
_NEEDS_ENV = (
    *("until", "eval_every", "eval_episodes", "keep_best", "record_every", "play"),
    "num_envs",
)


def check_data_options(arguments: dict[str, Any]) -> None:
    """Checks the options of a new run against each other, and completes those of `--data`.

    Args:
        arguments: the options of the command, by name; `data` gets absolute paths, and `algo` its
            default.

    Raises:
        UsageError: for options that need data or an environment, which are not given.
        ConfigError: if there is no such file.
    """
    if "data" not in arguments:
        for name in _NEEDS_DATA:
            if name in arguments:
                raise UsageError(f"{get_flag(name)} needs --data PATH, the recorded experience.")
        return
    arguments.setdefault("algo", _DEFAULT_ALGORITHM)
    if "env" not in arguments:
        _require_env(arguments)
    elif "num_envs" in arguments:
        raise UsageError(
            "--num-envs is for sampling environments, but with --data all steps are read from "
            "the data. Leave it out."
        )
    _require_one_end(arguments)
    arguments["data"] = resolve_data(arguments["data"])


def resolve_data(data: list[str]) -> tuple[str, ...]:
    """Returns absolute paths and patterns, after checking that they name files.

    Raises:
        ConfigError: if one of them does not.
    """
    from tfpolicies.offline.open_data import find_files

    for path in data:
        try:
            find_files(path, None)
        except ConfigError as error:
            hint = ""
            if not glob.has_magic(path) and "." not in path and "/" not in path:
                hint = " An environment is written before --data."
            raise ConfigError(f"--data: {error}{hint}") from error
    return tuple(str(resolve_path(path)) for path in data)


def require_data(settings: TrainSettings, command: str) -> None:
    """Checks that the files of a run still exist.

    Args:
        settings: of the run.
        command: resumes it.

    Raises:
        ConfigError: if they do not.
    """
    from tfpolicies.offline.open_data import find_files

    try:
        find_files(settings.data, None)
    except ConfigError as error:
        raise ConfigError(
            f"{error} If they were moved, name them again: `{command} --data PATH`."
        ) from error


def check_resumed_options(settings: TrainSettings, arguments: dict[str, Any]) -> None:
    """Checks the options with which a run is resumed that reads recorded experience.

    Args:
        settings: of the run.
        arguments: the options of the command; `data` gets absolute paths.
    """
    if settings.env is None:
        _require_env(arguments)
    _require_one_end(arguments)
    if "steps" in arguments:
        arguments["epochs"] = None
    if "data" in arguments:
        arguments["data"] = resolve_data(arguments["data"])


def require_trust(settings: TrainSettings, arguments: Mapping[str, Any]) -> TrainSettings:
    """Returns the settings of a resumed run, whose files are trusted only if the user says so.

    Args:
        settings: of the run, from a file.
        arguments: the options of the command.
    """
    return dataclasses.replace(settings, trusted_data="trusted_data" in arguments)


def complete_data_settings(
    settings: TrainSettings, arguments: Mapping[str, Any], console: Console, *, is_new: bool
) -> TrainSettings:
    """Returns the settings of a run with the number of rows to read, and of evaluations.

    Args:
        settings: of the run.
        arguments: the options of the command.
        console: shows a status.
        is_new: whether the run begins; otherwise it is resumed.
    """
    with console.status("counting rows"):
        rows = count_rows(settings)
    if not is_new and settings.data_rows not in (None, rows):
        console.print(
            f"The data have {rows:,} rows, but had {settings.data_rows:,} when the run began; "
            "reading continues at the old position.",
            highlight=False,
        )
    steps = settings.steps
    if settings.epochs is not None:
        steps = math.ceil(settings.epochs * rows)
    elif is_new and "steps" not in arguments:
        steps = max(_DEFAULT_EPOCHS * rows, _MIN_DEFAULT_ROWS)
    settings = dataclasses.replace(settings, data_rows=rows, steps=steps)
    evaluates = settings.eval_every is not None or "evaluation_interval" in settings.from_file
    if settings.env is None or evaluates or not is_new:
        return settings
    config = settings.make_config()
    rows_per_iteration = max(config.min_sample_timesteps_per_iteration, config.train_batch_size)
    interval = max(1, steps // rows_per_iteration // _EVALUATIONS)
    return dataclasses.replace(settings, eval_every=interval)


def count_rows(settings: TrainSettings) -> int:
    """Returns the number of rows of a run's data.

    Raises:
        BatchError: if a file is damaged, or there are no rows.
    """
    from tfpolicies.offline.data_spaces import iter_chunks
    from tfpolicies.offline.open_data import open_data

    source = open_data([*settings.data], trusted=settings.trusted_data)
    try:
        if source.has_contiguous_episodes:  # positions are rows
            rows = sum(source.ends)
        else:
            rows = sum(chunk.rows for chunk in iter_chunks(source, source.column_names[:1]))
        if not rows:
            raise BatchError(f"There are no rows in {[*source.tables]!s:.300}.")
        return rows
    finally:
        source.close()


def check_data(algorithm: Algorithm, settings: TrainSettings, console: Console) -> None:
    """Reads all rows once, and checks the columns that the algorithm learns from.

    Raises:
        TfPoliciesError: as training would raise it, for the first wrong row.
    """
    from tfpolicies.cli.data_survey import RowCheck
    from tfpolicies.offline.open_data import open_data

    check_columns = getattr(algorithm.worker.sampler, "check_columns", None)
    if check_columns is not None:
        check_columns()
    source = open_data([*settings.data], trusted=settings.trusted_data)
    try:
        with console.status("checking the data"):
            check = RowCheck(
                source,
                settings.columns,
                dict(algorithm.worker.policy_map.items()),
                postprocesses=algorithm.config.postprocess_inputs,
            )
            check.run()
    finally:
        source.close()
    if check.note:
        console.print(check.note, highlight=False, soft_wrap=True)


def describe_plan(algorithm: Algorithm, settings: TrainSettings) -> str:
    """Describes how much a run reads, and the spaces of its policy."""
    from tfpolicies.models.spaces import describe_space

    rows = settings.data_rows or 1
    files = ", ".join(shorten_path(Path(path)) for path in settings.data)
    epochs = settings.steps / rows
    line = (
        f"Data: {format_count(rows, 'row')} of {files:.200}, {epochs:,.4g} "
        f"epoch{'' if epochs == 1 else 's'}"
    )
    if settings.env is not None and settings.eval_every is not None:
        line += f"; {settings.env} is played every {settings.eval_every} iterations"
    policy = algorithm.get_policy()
    if policy is None:
        return f"{line}."
    observations, actions = map(describe_space, (policy.observation_space, policy.action_space))
    return f"{line}. Observations {observations}, actions {actions}."


def _require_env(arguments: Mapping[str, Any]) -> None:
    for name in _NEEDS_ENV:
        if name in arguments:
            raise UsageError(
                f"{get_flag(name)} needs an environment to play in: `tfpolicies train ENV --data "
                "...`."
            )


def _require_one_end(arguments: Mapping[str, Any]) -> None:
    if "epochs" in arguments and "steps" in arguments:
        raise UsageError("--epochs and --steps both say when to stop. Leave one of them out.")
