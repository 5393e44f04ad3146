"""Search spaces of Ray Tune where a config needs a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.errors import ConfigError


def refuse_search_space(name: str, value: Any) -> None:
    """Raises a `ConfigError` that names Tune's way if a setting is, or holds, a search space.

    That is a dict whose only key is "grid_search", or an object of a class of `ray.tune.search`;
    Ray is not imported.

    >>> refuse_search_space("model", {"fcnet_hiddens": [64]})
    >>> refuse_search_space("lr", {"grid_search": [0.1, 0.2]})
    Traceback (most recent call last):
    ...
    tfpolicies.errors.ConfigError: lr has the search space {'grid_search': [0.1, 0.2]}, ...
    """
    if has_search_space(value):
        raise ConfigError(
            f"{name} has the search space {value}, but a config holds values. Give the config "
            "without it to Ray Tune: tune.Tuner(tune_trainable(config), "
            f"param_space={{{name!r}: ...}}), with tfpolicies.distributed.tune.tune_trainable."
        )


def has_search_space(value: Any) -> bool:
    """Whether a setting is, or holds, a search space.

    >>> has_search_space({"a": {"grid_search": [1]}}), has_search_space({"a": [1]})
    (True, False)
    """
    if isinstance(value, Mapping):
        return set(value) == {"grid_search"} or any(map(has_search_space, value.values()))
    return _is_of_tune(value)


def _is_of_tune(value: Any) -> bool:
    return any(kind.__module__.startswith("ray.tune.search") for kind in type(value).__mro__)
