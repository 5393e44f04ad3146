"""What configs have under names that only code written for RLlib asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.compat.methods import as_method
from tfpolicies.storage.spaces_json import encode_space

NOT_SERIALIZABLE = "__not_serializable__"
"""What `serialize()` has in place of functions and objects."""


def get_rollout_fragment_length(config: Any, worker_index: int = 0) -> int:
    """Returns how many steps a worker samples of each environment; of 0, the common number."""
    return int(config.fragment_length(worker_index=worker_index))


def is_atari(config: Any) -> bool:
    """Whether the environment is given by the name of an Atari game."""
    name = config.env
    spec = gym.registry.get(name) if isinstance(name, str) else None
    entry = str(getattr(spec, "entry_point", ""))
    return entry.startswith("ale_py") or str(name).startswith("ALE/")


def multiagent(config: Any) -> dict[str, Any]:
    """Returns the settings about several agents, as old dict configs have them."""
    return {name: config[name] for name, home in config._homes.items() if home == "multi_agent"}


def serialize(config: Any) -> dict[str, Any]:
    """Returns all settings as JSON values; classes by their paths.

    Functions and objects that JSON does not have are `NOT_SERIALIZABLE`. Checkpoints hold a config
    that can be loaded again; this is for reading and comparing.
    """
    return dict(_plain(config.to_dict()))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, gym.Space):
        return encode_space(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    is_json = value is None or isinstance(value, bool | int | float | str)
    return value if is_json else NOT_SERIALIZABLE


CONFIG_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "get_rollout_fragment_length": as_method(get_rollout_fragment_length),
    "is_atari": is_atari,
    "multiagent": multiagent,
    "pop": lambda config: config.get,
    "serialize": as_method(serialize),
    "total_train_batch_size": lambda config: config.train_batch_size,
}
"""By name, what returns it."""
