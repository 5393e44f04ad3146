"""Reads files of hyperparameters of RL Baselines3 Zoo, such as its `hyperparams/ppo.yml`.

A file belongs to one algorithm and has an entry for each environment. Settings that an entry leaves
out have the defaults of Stable-Baselines3. Expressions such as `"dict(net_arch=[64, 64])"` are
parsed and never evaluated.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.algorithms.zoo_conversion import SUPPORTED, convert_entry
from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import ConfigError, MissingPackageError, show_value
from tfpolicies.system.installed_distributions import get_install_command
from tfpolicies.system.paths import resolve_path
from tfpolicies.system.regular_files import read_regular

_MAX_BYTES = 1 << 20
_MAX_PAIRS = 10_000  # keys of a mapping, with those that it merges


class ZooSettings(NamedTuple):
    """The settings of an entry.

    Attributes:
        settings: as `config.update_from_dict` takes them.
        steps: environment steps of training.
        warnings: for settings that are not used, each with a next step.
    """

    settings: dict[str, Any]
    steps: int
    warnings: tuple[str, ...]


def read_zoo_file(path: str | PathLike[str], algo: str, env: str) -> ZooSettings:
    """Returns the settings of a file for an algorithm and an environment.

    The entry of another version of the environment is used, with a warning, if there is none of
    this one.

    Args:
        path: the file, in YAML, of the algorithm.
        algo: such as `"PPO"`.
        env: the name of the environment.

    Raises:
        ConfigError: if the file cannot be read, or has no such entry, or if a setting has no
            equivalent here.
        MissingPackageError: if PyYAML is not installed.

    Example::

        entry = read_zoo_file("ppo.yml", "PPO", "CartPole-v1")
        config = PPOConfig().environment("CartPole-v1").update_from_dict(entry.settings)
    """
    name = str(path)
    if algo not in SUPPORTED:
        raise ConfigError(
            f"{name!r}: files of RL Baselines3 Zoo are read for {', '.join(SUPPORTED)}, got "
            f"{algo!r}. Give a JSON file."
        )
    entries = _load(name, resolve_path(path))
    entry_name = _find_entry(name, entries, env)
    entry = entries[entry_name]
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{name!r}: {entry_name} must have settings, such as n_timesteps: 100000, got "
            f"{show_value(entry)}."
        )
    try:
        settings, steps, warnings = convert_entry(algo, entry)
    except ConfigError as error:
        raise ConfigError(f"{name!r}, {entry_name}: {error}") from error
    if entry_name != env:
        warnings.insert(0, f"there is no entry for {env}: these are the settings of {entry_name}")
    return ZooSettings(settings, steps, tuple(warnings))


def _load(name: str, path: Path) -> dict[str, Json]:
    yaml: Any = _import_yaml()

    class Loader(yaml.SafeLoader):
        """Limits what merged mappings become, which may double with each line."""

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MAX_PAIRS:
                raise ValueError(f"a mapping has more than {_MAX_PAIRS:,} keys")

    try:
        content = yaml.load(read_regular(path, _MAX_BYTES).decode(), Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{name!r} cannot be read as YAML: {reason}.") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(
            f"{name!r} must have an entry for each environment, as a file of RL Baselines3 Zoo "
            f"has, got {show_value(content, 60)}. Settings without environments go into a JSON "
            "file."
        )
    return content


def _import_yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingPackageError(
            "YAML files need PyYAML, which is not installed. Install it: "
            f"{get_install_command('yaml')}."
        ) from error
    return yaml


def _find_entry(name: str, entries: Mapping[str, Json], env: str) -> str:
    if env in entries:
        return env
    versions = [x for x in entries if _strip_version(x) == _strip_version(env)]
    if versions:
        return max(versions)
    near = difflib.get_close_matches(env, entries, 3, 0.6) or list(entries)[:3]
    raise ConfigError(
        f"{name!r} has no entry for {env}; it has {len(entries)}, such as {', '.join(near)}. Copy "
        f"one and name it {env}."
    )


def _strip_version(env: str) -> str:
    return env.rpartition(":")[2].rpartition("-v")[0] or env
