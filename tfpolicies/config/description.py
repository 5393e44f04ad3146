"""Describes a config for records: its algorithm, and the settings that differ from defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfpolicies.base.type_aliases import Json

_ALGORITHMS = "tfpolicies.algorithms."
_MAX_SETTING_LENGTH = 2000  # characters of a setting as JSON; longer ones are summarised


def encode_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a flat config as a JSON file would hold them; see `encode_value`."""
    from tfpolicies.config.config_serialization import encode_config  # imports Keras

    settings: dict[str, Any] = json.loads(json.dumps(encode_config(config)["settings"]))
    return settings


def get_changed_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Json]:
    """Returns the settings of a flat config that differ from the defaults.

    Args:
        config: complete settings.
        defaults: those to compare with. In nested settings, only the keys that differ are returned.
    """
    changed = find_changes(encode_settings(config), encode_settings(defaults))
    return {name: _shorten(value) for name, value in changed.items()}


def find_changes(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the encoded settings that differ from defaults; of nested settings, the keys.

    A dict with another `type` than the default's is returned whole.

    >>> find_changes({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 0}, "d": 3})
    {'a': {'c': 2}}
    """
    changed = {}
    for name, value in settings.items():
        default = defaults.get(name)
        if value == default and name in defaults:
            continue
        are_dicts = isinstance(value, dict) and isinstance(default, dict)
        if are_dicts and default and value.get("type") == default.get("type"):
            value = find_changes(value, default)
        changed[name] = value
    return changed


def _shorten(value: Json) -> Json:
    text = json.dumps(value)
    return (
        value if len(text) <= _MAX_SETTING_LENGTH else f"{text[:100]}... ({len(text):,} characters)"
    )


def get_algorithm_name(algorithm_class: type) -> str:
    """Returns the name of an algorithm of this package, or `"module:Class"` for others."""
    name, module = algorithm_class.__qualname__, algorithm_class.__module__
    return name if module.startswith(_ALGORITHMS) else f"{module}:{name}"
