"""Search spaces of Ray Tune in a config: kept for Tune, rejected where a value is needed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from tfpolicies.base.type_aliases import Setting
from tfpolicies.config.live_dict import PLAIN_TYPES
from tfpolicies.errors import ConfigError


def require_values(search_spaces: Mapping[str, Any]) -> None:
    """Raises a `ConfigError` that refers to Ray Tune if settings have search spaces.

    Args:
        search_spaces: settings with search spaces, by name.

    >>> require_values({})
    >>> require_values({"lr": {"grid_search": [0.1, 0.2]}})
    Traceback (most recent call last):
    ...
    tfpolicies.errors.ConfigError: lr has the search space {'grid_search': [0.1, 0.2]}, ...
    """
    for name, value in search_spaces.items():
        raise ConfigError(
            f"{name} has the search space {value}, but a value is needed here. Give the config "
            "without it to Ray Tune: tune.Tuner(tune_trainable(config), "
            f"param_space={{{name!r}: ...}}), with tfpolicies.distributed.tune.tune_trainable; or "
            'the whole config, as RLlib\'s scripts do: tune.Tuner("PPO", param_space=config), with '
            "the `tune` that docs/migrate/rllib.md names."
        )


def has_search_space(value: Setting) -> bool:
    """Returns whether a setting is, or contains, a search space.

    That is a dict whose only key is "grid_search", or an instance of a class of `ray.tune.search`;
    Ray is not imported.

    >>> has_search_space({"a": {"grid_search": [1]}}), has_search_space({"a": [1]})
    (True, False)
    """
    if isinstance(value, Mapping):
        return set(value) == {"grid_search"} or any(
            map(has_search_space, [x for x in value.values() if type(x) not in PLAIN_TYPES])
        )
    bases = inspect.getmro(type(value))
    return any(base.__module__.startswith("ray.tune.search") for base in bases)
