"""The settings of `tfpolicies train`: those of new runs, and of runs that are resumed."""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from tfpolicies.cli.run_lookup import find_run
from tfpolicies.cli.train_options import (
    IMPORT_OPTIONS,
    OPTIONS,
    TrainSettings,
    get_flag,
    is_custom_algorithm,
)
from tfpolicies.cli.training_data import check_data_options, check_resumed_options
from tfpolicies.config.settings_allowlist import ALGORITHM_SETTINGS, check_environment_name
from tfpolicies.envs.env_factory import check_env_name
from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.reporting.run_folder import (
    ENDED_BY_CALLBACK,
    ENDED_BY_STEPS,
    ENDED_BY_TARGET,
    RunFolder,
    find_runs,
)
from tfpolicies.storage.allowed_objects import resolve_allowed
from tfpolicies.storage.json_values import UnresolvedObject, find_unresolved
from tfpolicies.system.paths import resolve_path, shorten_path
from tfpolicies.system.regular_files import read_regular

logger = logging.getLogger("tfpolicies")

_DEFAULT_STEPS_WITH_TARGET = 1_000_000
_YAML_SUFFIXES = (".yml", ".yaml")
_MAX_CONFIG_BYTES = 1 << 20  # bytes of a file of settings


# -- settings ---------------------------------------------------------------------------------


def make_new_settings(arguments: dict[str, Any]) -> TrainSettings:
    """Returns the settings of a new run.

    Args:
        arguments: the options that were given, by name, with `config`, the path of a file; changed.

    Raises:
        UsageError: for a file that cannot be read, or options that exclude each other.
        EnvError: for an unknown environment.
    """
    path = arguments.pop("config", None)
    from_file = _read_zoo_file(path, arguments) if is_zoo_file(path) else _read_config_file(path)
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
    lists = {name: tuple(arguments.get(name, ())) for name in ("set", "logger")}
    return TrainSettings(**{**arguments, **lists})


def is_zoo_file(path: str | None) -> bool:
    """Whether `--config` names a file of RL Baselines3 Zoo, by its suffix."""
    return path is not None and Path(path).suffix in _YAML_SUFFIXES


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


def _read_zoo_file(path: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings in a file of RL Baselines3 Zoo; completes the options of the command.

    The run starts with these settings and its steps, not with tuned ones.
    """
    from tfpolicies.algorithms.zoo_file import read_zoo_file

    if "env" not in arguments:
        raise UsageError(
            f"--config {path} has an entry for each environment. Name one: `tfpolicies train "
            f"CartPole-v1 --algo PPO --config {path}`."
        )
    entry = read_zoo_file(path, arguments.get("algo", "PPO"), arguments["env"])
    for warning in entry.warnings:
        logger.warning("%s: %s.", path, warning)
    arguments.setdefault("steps", entry.steps)
    arguments["no_tuned"] = True
    return entry.settings


# -- resume -----------------------------------------------------------------------------------


def find_run_to_resume(path: str) -> RunFolder:
    run = find_run(path)
    if run is not None:
        return run
    unsaved_runs = [shorten_path(run.path) for run in find_runs(path)]
    hint = (
        f" To restart {unsaved_runs[0]}, use `tfpolicies train --resume {unsaved_runs[0]}`."
        if unsaved_runs
        else ""
    )
    raise CheckpointError(
        f"--resume needs a run folder, or a folder of runs, but {path!r} has no run with a "
        f"checkpoint.{hint}"
    )


def make_resumed_settings(run: RunFolder, arguments: dict[str, Any]) -> TrainSettings:
    """Returns the settings of a run that is resumed; see `change_settings`."""
    content = run.settings
    if "learn" in content:
        raise UsageError(
            f"{shorten_path(run.path)} was trained by a script. Resume it there: "
            f"algorithm.learn(..., run_dir={str(run.path)!r})."
        )
    settings = TrainSettings.from_json(content.get("train", {}), str(run.run_json))
    return change_settings(run.path, settings, arguments)


def change_settings(
    folder: Path, settings: TrainSettings, arguments: dict[str, Any]
) -> TrainSettings:
    """Returns stored settings, changed by the options of a command that resumes them.

    Args:
        folder: of the run, or of the seeds, for messages.
        settings: as they were.
        arguments: the options, by name; those that only repeat a setting are removed.

    Raises:
        UsageError: if an option cannot be changed, or an import must be named again.
    """
    import_texts = get_import_texts(settings)
    missing = [text for name, text in import_texts.items() if name not in arguments]
    missing += [] if "logger" in arguments else get_own_loggers(settings)
    if missing:
        command = shlex.join(format_resume_command(folder, settings))
        raise UsageError(
            f"{shorten_path(folder)} uses {' and '.join(missing)}, but your code is only "
            f"imported if you name it. Name it again: `{command}`."
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
            f"{shorten_path(folder)} has fixed settings. These may be changed: "
            f"{', '.join(map(get_flag, changeable))}."
        )
    if settings.data:
        check_resumed_options(settings, arguments)
    return dataclasses.replace(settings, **arguments)


def get_import_texts(settings: TrainSettings) -> dict[str, str]:
    """Returns the imports that the user must name again on resuming, by setting."""
    imports = {name: getattr(settings, name) for name in IMPORT_OPTIONS}
    imports["algo"] = settings.algo if is_custom_algorithm(settings.algo) else None
    is_import = isinstance(check_environment_name(settings.env), UnresolvedObject)
    env = settings.env if is_import else None
    return {name: text for name, text in {"env": env, **imports}.items() if text is not None}


def get_own_loggers(settings: TrainSettings) -> list[str]:
    """Returns the loggers that are the user's code."""
    return [name for name in settings.logger if ":" in name]


def require_no_stored_imports(file: Path, settings: TrainSettings) -> None:
    """Refuses stored settings that would import something that the user did not name again.

    Args:
        file: holds them.
        settings: the stored ones.
    """
    allowed = {} if settings.env is None else {settings.env: settings.env}
    missing = find_unresolved(
        resolve_allowed(settings.make_config().to_dict(), ALGORITHM_SETTINGS, objects=allowed)
    )
    if missing:
        names = ", ".join(missing_object.name for missing_object in missing.values())
        raise UsageError(
            f"{shorten_path(file)} sets {names}, but your code is only imported if you "
            "name it. Start a new run with the same settings, or write a script."
        )


def is_finished(run: RunFolder, console: Console) -> bool:
    """Prints a hint if a run has reached its goals."""
    finished = run.settings.get("finished")
    if finished is None:
        return False
    settings = TrainSettings.from_json(run.settings.get("train", {}), str(run.run_json))
    end = describe_reason(settings, finished)
    console.print(f"{shorten_path(run.path)} is finished: {end}.", highlight=False)
    print_hint(console, "To train longer, use:", [*make_resume_command(run), "--steps", "..."])
    return True


def make_run_json(settings: TrainSettings, finished: str | None = None) -> dict[str, Any]:
    return {"train": settings.as_json(), "finished": finished}


_REASONS = {
    ENDED_BY_TARGET: "the target was reached",
    ENDED_BY_STEPS: "all steps were used",
    ENDED_BY_CALLBACK: "a callback ended it",
}


def describe_reason(settings: TrainSettings, reason: str) -> str:
    if settings.data and reason == ENDED_BY_STEPS:
        return "all rows were read"
    return _REASONS[reason]


def make_resume_command(run: RunFolder) -> list[str]:
    """Returns the command that resumes a run; it repeats the imports that a file may not name."""
    train_settings = run.settings.get("train", {})
    settings = TrainSettings.from_json(train_settings, str(run.run_json))
    return format_resume_command(run.path, settings)


def format_resume_command(folder: Path, settings: TrainSettings) -> list[str]:
    """Returns the command that resumes a run, or a folder of seeds, with these settings."""
    import_texts = get_import_texts(settings)
    env = [import_texts.pop("env")] if "env" in import_texts else []
    options = [word for name, text in import_texts.items() for word in (get_flag(name), text)]
    if get_own_loggers(settings):
        options += [word for name in settings.logger for word in ("--logger", name)]
    return [*get_program(), "train", *env, "--resume", shorten_path(folder), *options]


def get_program() -> list[str]:
    """Returns how this program was called, as it can be typed again."""
    name = Path(sys.argv[0])
    if name.name == "__main__.py":
        return [_shorten_program(sys.executable), "-m", "tfpolicies"]
    return [_shorten_program(sys.argv[0])] if name.name == "tfpolicies" else ["tfpolicies"]


def _shorten_program(program: str) -> str:
    name = Path(program).name
    return name if shutil.which(name) == program else shorten_path(Path(program))


def print_hint(console: Console, text: str, command: list[str]) -> None:
    console.print(text)
    console.print(f"  {shlex.join(command)}", markup=False, highlight=False, soft_wrap=True)
