"""Describes a run by its algorithm, its environment and the settings that differ from defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfpolicies.base.type_aliases import Json
from tfpolicies.envs.env_registry import get_env_name

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
    from tfpolicies.config.algorithm_config import AlgorithmConfig

_MAX_SETTING_LENGTH = 2000  # characters of a setting as JSON; longer ones are summarised
_DESCRIBED_ELSEWHERE = ("env", "seed")


def describe_run(algorithm: AlgorithmProtocol) -> dict[str, Any]:
    """Returns the facts that `RunFolder.describe` records, as JSON values.

    They are `algorithm`, a name such as `"PPO"` or `"module:Class"`; `env`, the name of the
    environment or None; `seed`; and `config`, the settings that differ from the algorithm's
    defaults. In nested settings, only the keys that differ are there.
    """
    config, algorithm_class = algorithm.config, type(algorithm)
    name = algorithm_class.__qualname__
    if algorithm_class.__module__.rpartition(".")[0] != __package__:
        name = f"{algorithm_class.__module__}:{name}"
    settings = encode_settings(config)
    changed = get_changed_settings(settings, encode_settings(algorithm.get_default_config()))
    return {
        "algorithm": name,
        "env": None if config.env is None else get_env_name(config.env),
        "seed": config.seed,
        "config": {
            name: _shorten(value)
            for name, value in changed.items()
            if name not in _DESCRIBED_ELSEWHERE
        },
    }


def encode_settings(config: AlgorithmConfig) -> dict[str, Any]:
    """Returns all settings of a config as a JSON file would hold them; see `encode_value`."""
    from tfpolicies.config.config_serialization import encode_config  # imports Keras

    settings: dict[str, Any] = json.loads(json.dumps(encode_config(config.to_dict())["settings"]))
    return settings


def get_changed_settings(
    settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings that differ from defaults; of nested settings, the keys that differ.

    A dict with another `type` than the default's is returned whole.

    >>> get_changed_settings({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 0}, "d": 3})
    {'a': {'c': 2}}
    """
    changed = {}
    for name, value in settings.items():
        default = defaults.get(name)
        if value == default and name in defaults:
            continue
        are_dicts = isinstance(value, dict) and isinstance(default, dict)
        if are_dicts and default and value.get("type") == default.get("type"):
            value = get_changed_settings(value, default)
        changed[name] = value
    return changed


def _shorten(value: Json) -> Json:
    text = json.dumps(value)
    return (
        value if len(text) <= _MAX_SETTING_LENGTH else f"{text[:100]}... ({len(text):,} characters)"
    )
