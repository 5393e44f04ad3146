"""Settings as they come from a file: what would import something on its word is held back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.exploration.exploration import Exploration
from tfpolicies.exploration.making import STRATEGIES
from tfpolicies.storage.import_paths import Missing, class_of_name
from tfpolicies.storage.json_values import decode_value

_OF_USERS = ("env_config", "custom_model_config")  # nothing in them is looked up by this package


def decode_settings(record: Any) -> Any:
    """Returns settings that `encode_value` stored, with a `Missing` for each foreign object.

    Beside the objects that `decode_value` leaves out these are exploration strategies by the path
    "package.module.Class", unless they are classes of trusted packages, and objects that an
    optimizer's settings describe, which Keras would make.

    Args:
        record: JSON values.

    Raises:
        CheckpointError: if they are malformed.

    >>> decode_settings({"lr": 0.1, "exploration_config": {"type": "antigravity.Strategy"}})
    {'lr': 0.1, 'exploration_config': {'type': Missing(name='antigravity.Strategy', \
importable=True)}}
    """
    return held_back(decode_value(record))


def held_back(value: Any) -> Any:
    """Returns what `decode_settings` does, given values instead of their records."""
    if isinstance(value, Mapping):
        return {key: _held_back_setting(key, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(held_back, value))
    return value


def _held_back_setting(name: Any, value: Any) -> Any:
    if name in _OF_USERS:
        return value
    if name == "exploration_config":
        return _strategies(value)
    if name == "optimizer" and isinstance(value, Mapping):
        return {
            key: Missing(f"{each.get('class_name', key)}") if isinstance(each, Mapping) else each
            for key, each in value.items()
        }
    return held_back(value)


def _strategies(config: Any) -> Any:
    """Returns an `exploration_config`; the strategies that it names may have some of their own."""
    if not isinstance(config, Mapping):
        return config
    return {key: _strategy(x) if key == "type" else _strategies(x) for key, x in config.items()}


def _strategy(kind: Any) -> Any:
    if not isinstance(kind, str) or kind in STRATEGIES:
        return kind
    return class_of_name(kind, (Exploration,))
