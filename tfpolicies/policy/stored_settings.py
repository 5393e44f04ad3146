"""Settings as they come from a file: what would import something on its word is held back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfpolicies.exploration.exploration import Exploration
from tfpolicies.exploration.making import STRATEGIES
from tfpolicies.models.keras_names import OPTIMIZERS
from tfpolicies.storage.import_paths import Missing, class_of_name
from tfpolicies.storage.json_values import decode_value

_OF_USERS = ("env_config", "custom_model_config")  # nothing in them is looked up by this package

_PLAUSIBLE = {
    **dict.fromkeys(("num_envs_per_worker", "num_envs_per_env_runner"), 1 << 14),
    **dict.fromkeys(("num_rollout_workers", "num_workers", "num_env_runners"), 1 << 10),
    **dict.fromkeys(("evaluation_num_workers", "evaluation_num_env_runners"), 1 << 10),
    **dict.fromkeys(("max_seq_len", "num_atoms"), 1 << 16),
    **dict.fromkeys(("train_batch_size", "rollout_fragment_length"), 1 << 27),
    **dict.fromkeys(("sgd_minibatch_size", "minibatch_size"), 1 << 27),
    "capacity": 1 << 30,
}
"""The largest numbers taken from a file alone, of what costs memory and shows in no weight."""


def decode_settings(record: Any) -> Any:
    """Returns settings that `encode_value` stored, with a `Missing` for each foreign object.

    Beside the objects that `decode_value` leaves out these are exploration strategies by the path
    "package.module.Class", unless they are classes of trusted packages; objects that an
    optimizer's settings describe, which Keras would make; and types of optimizers that are neither
    Keras's own nor registered in this process. So are numbers that nobody means (`_PLAUSIBLE`).

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
    if isinstance(value, int | float) and value > _PLAUSIBLE.get(name, value):
        return Missing(f"{value}, more than the {_PLAUSIBLE[name]} that a file may choose")
    if name == "exploration_config":
        return _strategies(value)
    if name == "optimizer" and isinstance(value, Mapping):
        return {key: _of_optimizer(key, each) for key, each in value.items()}
    return held_back(value)


def _of_optimizer(name: str, value: Any) -> Any:
    """Returns a setting of an optimizer: its type by name, and numbers."""
    if name == "type":
        found = keras.saving.get_registered_object(value) if isinstance(value, str) else None
        is_own = isinstance(value, str) and value.lower() in OPTIMIZERS
        is_registered = isinstance(found, type) and issubclass(found, keras.optimizers.Optimizer)
        return value if is_registered or (is_own and found is None) else Missing(f"{value}")
    if isinstance(value, Mapping):
        return Missing(f"{value.get('class_name', name)}")
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else Missing(name)


def _strategies(config: Any) -> Any:
    """Returns an `exploration_config`; the strategies that it names may have some of their own."""
    if not isinstance(config, Mapping):
        return config
    return {key: _strategy(x) if key == "type" else _strategies(x) for key, x in config.items()}


def _strategy(kind: Any) -> Any:
    if not isinstance(kind, str) or kind in STRATEGIES:
        return kind
    return class_of_name(kind, (Exploration,))
