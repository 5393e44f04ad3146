"""Describes a config for records: its algorithm, and the settings that differ from defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfpolicies.base.type_aliases import Json
from tfpolicies.config.config_serialization import encode_config

_ALGORITHMS = "tfpolicies.algorithms."
_MAX_SETTING_LENGTH = 2000  # characters of a setting as JSON; longer ones are summarised


def encode_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a flat config as a JSON file would hold them; see `encode_value`."""
    settings: dict[str, Any] = json.loads(json.dumps(encode_config(config)["settings"]))
    return settings


def get_changed_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Json]:
    """Returns the settings of a flat config that differ from the defaults.

    Args:
        config: complete settings.
        defaults: those to compare with. In nested settings, only the keys that differ are returned.
    """
    changed = _find_changes(encode_settings(config), encode_settings(defaults))
    return {name: _shorten(value) for name, value in changed.items()}


def _find_changes(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    changed = {}
    for name, value in settings.items():
        default = defaults.get(name)
        if value == default and name in defaults:
            continue
        are_dicts = isinstance(value, dict) and isinstance(default, dict)
        changed[name] = _find_changes(value, default) if are_dicts and default else value
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
