"""The settings of a new or resumed command that trains: its options, files and imports."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from tfpolicies.cli.train_options import IMPORT_OPTIONS, TrainSettings, is_custom_algorithm
from tfpolicies.cli.training_data import check_data_options
from tfpolicies.config.settings_allowlist import ALGORITHM_SETTINGS, check_environment_name
from tfpolicies.envs.env_factory import check_env_name
from tfpolicies.errors import UsageError
from tfpolicies.storage.allowed_objects import resolve_allowed
from tfpolicies.storage.json_values import UnresolvedObject, find_unresolved
from tfpolicies.system.paths import resolve_path, shorten_path
from tfpolicies.system.regular_files import read_regular

logger = logging.getLogger("tfpolicies")

_DEFAULT_STEPS_WITH_TARGET = 1_000_000
_YAML_SUFFIXES = (".yml", ".yaml")
_MAX_CONFIG_BYTES = 1 << 20  # bytes of a file of settings


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
    return TrainSettings(**{**arguments, "set": tuple(arguments.get("set", ()))})


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


def get_import_texts(settings: TrainSettings) -> dict[str, str]:
    """Returns the imports that the user must name again on resuming, by setting."""
    imports = {name: getattr(settings, name) for name in IMPORT_OPTIONS}
    imports["algo"] = settings.algo if is_custom_algorithm(settings.algo) else None
    is_import = isinstance(check_environment_name(settings.env), UnresolvedObject)
    env = settings.env if is_import else None
    return {name: text for name, text in {"env": env, **imports}.items() if text is not None}


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


def get_program() -> list[str]:
    """Returns how this program was called, as it can be typed again."""
    name = Path(sys.argv[0])
    if name.name == "__main__.py":
        return [_shorten_program(sys.executable), "-m", "tfpolicies"]
    return [_shorten_program(sys.argv[0])] if name.name == "tfpolicies" else ["tfpolicies"]


def _shorten_program(program: str) -> str:
    name = Path(program).name
    return name if shutil.which(name) == program else shorten_path(Path(program))
