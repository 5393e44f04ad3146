"""The command `tune`: searches settings, or resumes a search, and shows how to train with them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tfpolicies.cli.arguments import RUNS
from tfpolicies.cli.exit_codes import DONE, TARGET_MISSED, describe_error, get_exit_status
from tfpolicies.cli.run_lookup import load_tensorflow_with_status
from tfpolicies.cli.run_settings import (
    get_import_texts,
    get_program,
    is_zoo_file,
    make_new_settings,
    require_no_stored_imports,
)
from tfpolicies.cli.train_options import (
    TrainSettings,
    get_algorithm_class,
    get_flag,
    require_no_duplicate_settings,
)
from tfpolicies.cli.training_data import complete_data_settings, require_trust
from tfpolicies.cli.tune_arguments import TUNE_OPTIONS
from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.reporting.progress_display import CommandConsole
from tfpolicies.system.paths import resolve_path, shorten_path
from tfpolicies.system.regular_files import read_regular
from tfpolicies.system.signal_handling import SignalInterrupt, get_active_handler, print_to_stderr
from tfpolicies.tuning.options import TuneOptions
from tfpolicies.tuning.search_folder import SearchFolder, find_newest_search, make_search_name
from tfpolicies.tuning.search_space import SearchSpace
from tfpolicies.tuning.shipped_spaces import get_search_space
from tfpolicies.tuning.study import import_optuna

if TYPE_CHECKING:
    from tfpolicies.config.algorithm_config import AlgorithmConfig
    from tfpolicies.tuning.search_results import TuneResult

_OPTIONS = ("trials", "seeds", "steps", "jobs", "until", "eval_episodes")
_MAY_CHANGE = ("trials", "jobs", "until")
_MAX_SPACE_BYTES = 1 << 20


def tune(args: argparse.Namespace) -> int:
    """Searches settings; see `tfpolicies tune --help`.

    Errors of settings, environment and construction are raised before a folder is made.
    """
    arguments = {name: x for name, x in vars(args).items() if name not in ("command", "run")}
    debug = arguments.pop("debug", False)
    console = CommandConsole()
    if arguments.pop("show_space", False):
        return _show_space(arguments, console)
    import_optuna()
    require_no_duplicate_settings(arguments)
    if "resume" in arguments:
        folder, settings, options = _read_search(arguments)
    else:
        folder, settings, options = _make_search(arguments)
        console.print(settings.describe_tuned(), highlight=False, soft_wrap=True)
    space = None if "space" not in arguments else _read_space(arguments["space"])
    load_tensorflow_with_status(console)
    from tfpolicies.tuning.tuner import SearchPlan, run_search

    if folder.is_search:
        require_no_stored_imports(folder.tune_json, settings)
    if settings.data:
        settings = complete_data_settings(settings, arguments, console, is_new=not folder.is_search)
        options = dataclasses.replace(options, steps=settings.steps)
    plan = SearchPlan(
        config=settings.make_config(),
        space=space,
        options=options,
        preset_names=_get_preset_names(settings, arguments.get("config")),
        bases=[_make_train_config(settings)],
        command=settings.as_json(),
    )
    try:
        result = run_search(plan, folder, console)
    except BaseException as error:
        if not folder.is_search:
            raise
        return _handle_early_end(folder, settings, error, debug=debug)
    _print_train_command(console, result, settings, options)
    is_missed = options.until is not None and result.best_return < options.until
    return TARGET_MISSED if is_missed else DONE


def _show_space(arguments: Mapping[str, Any], console: Console) -> int:
    """Prints the search space of an algorithm as JSON, with its source on standard error."""
    load_tensorflow_with_status(console)
    space = get_search_space(get_algorithm_class(arguments.get("algo", "PPO")).get_default_config())
    content = {**{name: x.to_json() for name, x in space.ranges.items()}, **space.constants}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in content.items())
    print_to_stderr(f"The search space of {space.source}.")
    console.print(f"{{\n{lines}\n}}", markup=False, highlight=False, soft_wrap=True)
    return DONE


# -- settings ---------------------------------------------------------------------------------


def _make_search(
    arguments: dict[str, Any],
) -> tuple[SearchFolder, TrainSettings, TuneOptions]:
    if "env" not in arguments and "config" not in arguments:
        raise UsageError("tune takes an environment: `tfpolicies tune CartPole-v1 --algo PPO`.")
    names = (*TUNE_OPTIONS, "env", "config", "steps")
    train_arguments = {name: arguments[name] for name in names if name in arguments}
    settings = make_new_settings(train_arguments)
    if settings.env is None:
        raise UsageError("tune needs an environment to play in: `tfpolicies tune ENV --data ...`.")
    values = {name: arguments[name] for name in _OPTIONS if name in arguments}
    options = TuneOptions(**{**values, "steps": settings.steps, "seed": settings.seed})
    if "to" in arguments:
        folder = SearchFolder(arguments["to"])
        if folder.is_search:
            raise UsageError(
                f"{shorten_path(folder.path)} holds a search already. Resume it: `tfpolicies tune "
                f"--resume {shorten_path(folder.path)}`; or give another folder."
            )
    else:
        folder = SearchFolder(Path(RUNS, make_search_name(settings.algo_name, settings.env)))
    return folder, settings, options


def _read_search(
    arguments: dict[str, Any],
) -> tuple[SearchFolder, TrainSettings, TuneOptions]:
    """Returns the search to resume, with the settings in its folder."""
    path = arguments.pop("resume")
    folder = SearchFolder(path) if path is not None else find_newest_search(RUNS)
    if folder is None:
        raise CheckpointError(
            f"--resume: there is no search in {RUNS!r}. Give its folder: `tfpolicies tune --resume "
            "FOLDER`."
        )
    content = folder.read()
    command = content.get("command")
    if not isinstance(command, dict):
        raise UsageError(
            f"{shorten_path(folder.path)} is the search of a script. Resume it there: "
            f"tune(..., folder={str(folder.path)!r})."
        )
    settings = TrainSettings.from_json(command, str(folder.tune_json))
    import_texts = get_import_texts(settings)
    if missing := [text for name, text in import_texts.items() if name not in arguments]:
        raise UsageError(
            f"{shorten_path(folder.path)} uses {' and '.join(missing)}, but your code is only "
            "imported if you name it. Name it again: "
            f"`{shlex.join(_make_resume_command(folder, settings))}`."
        )
    _require_changeable(folder, settings, arguments)
    settings = require_trust(settings, arguments)
    changes = {name: arguments[name] for name in _MAY_CHANGE if name in arguments}
    try:
        options = TuneOptions(**{**content["options"], **changes})
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{shorten_path(folder.tune_json)} is damaged: {error}. Start a new search."
        ) from error
    return folder, settings, options


def _require_changeable(
    folder: SearchFolder, settings: TrainSettings, arguments: Mapping[str, Any]
) -> None:
    repeatable = ("env", "algo", "callbacks", "model", "policy_mapping", "trusted_data")
    unchangeable = [
        name
        for name, value in arguments.items()
        if name not in _MAY_CHANGE
        and not (name in repeatable and value == getattr(settings, name))
        and name != "trusted_data"
    ]
    if unchangeable:
        raise UsageError(
            f"{', '.join(map(get_flag, unchangeable))} cannot be given with --resume: "
            f"{shorten_path(folder.path)} has fixed settings. These may be changed: --trials, "
            "--jobs, --until."
        )


def _read_space(path: str) -> SearchSpace:
    try:
        content = json.loads(read_regular(resolve_path(path), _MAX_SPACE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--space: {path!r} cannot be read as JSON: {error}.") from error
    return SearchSpace.from_mapping(content)


def _get_preset_names(settings: TrainSettings, config_path: str | None) -> list[str]:
    """Returns the settings that are not searched, also `"model.fcnet_hiddens"`: the user's.

    A file of RL Baselines3 Zoo has all settings, so its values are those of trial 0 only.
    """
    names = [text.partition("=")[0].strip() for text in settings.set]
    if settings.lr is not None:
        names.append("lr")
    if settings.num_envs is not None:
        names.append("num_envs_per_worker")
    from_file = {} if is_zoo_file(config_path) else settings.from_file
    for name, value in from_file.items():
        names += [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
    return names


def _make_train_config(settings: TrainSettings) -> AlgorithmConfig:
    """Returns the config of `tfpolicies train` without further settings."""
    return TrainSettings(env=settings.env, algo=settings.algo, data=settings.data).make_config()


# -- output -----------------------------------------------------------------------------------


def _print_train_command(
    console: Console, result: TuneResult, settings: TrainSettings, options: TuneOptions
) -> None:
    env = [settings.env] if settings.env is not None else []
    imports = get_import_texts(settings)
    code = [
        word
        for name, x in imports.items()
        if name not in ("env", "algo")
        for word in (get_flag(name), x)
    ]
    command = [*get_program(), "train", *env, "--algo", settings.algo, *code]
    command += ["--config", shorten_path(result.best_json), "--steps", str(options.steps)]
    command += ["--no-tuned"] * settings.no_tuned
    if settings.data:
        command += ["--data", *(shorten_path(Path(path)) for path in settings.data)]
    console.print("\nTrain with the best settings:", highlight=False)
    console.print(f"  {shlex.join(command)}", markup=False, highlight=False, soft_wrap=True)


def _make_resume_command(folder: SearchFolder, settings: TrainSettings) -> list[str]:
    import_texts = get_import_texts(settings)
    env = [import_texts.pop("env")] if "env" in import_texts else []
    options = [word for name, text in import_texts.items() for word in (get_flag(name), text)]
    return [*get_program(), "tune", *env, "--resume", shorten_path(folder.path), *options]


def _handle_early_end(
    folder: SearchFolder, settings: TrainSettings, error: BaseException, *, debug: bool
) -> int:
    """Prints how a search ended and how to resume it; returns the exit status."""
    signals = get_active_handler()
    signals.acknowledge()
    if signals.requested is not None and not isinstance(error, SignalInterrupt):
        error = SignalInterrupt(signals.requested)
    message = describe_error(error)
    if isinstance(error, KeyboardInterrupt):
        message = f"{message.capitalize()}. Trials that were running will run again"
    else:
        message = f"tfpolicies: error: {message}"
    if debug:
        import traceback

        traceback.print_exception(error)
    print_to_stderr(f"{message}.")
    command = shlex.join(_make_resume_command(folder, settings))
    print_to_stderr(f"Resume with:\n  {command}")
    return get_exit_status(error, work_started=True)
