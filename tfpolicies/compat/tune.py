"""`ray.tune` for ported scripts, extended to accept algorithms, their names and their configs.

Other names are Ray Tune's own::

    from tfpolicies.compat import tune

    tuner = tune.Tuner("PPO", param_space=config.to_dict(), run_config=tune.RunConfig(stop=stop))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.compat.agents import get_trainable_cls
from tfpolicies.compat.envs import register_env as register_env
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.search_spaces import has_search_space
from tfpolicies.distributed.tune import import_ray_tune, make_default_config, tune_trainable


def Tuner(
    trainable: Any, *, param_space: AlgorithmConfig | Mapping[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Returns a `ray.tune.Tuner`.

    Settings that are not search spaces become part of the trainable: `result.config` has the
    others.

    Args:
        trainable: an algorithm's class or name; other trainables are passed on unchanged.
        param_space: a config, or a dict of settings, which may be nested as in `config.to_dict()`.
        **kwargs: further arguments of Ray Tune.

    Raises:
        ConfigError: if Ray Tune is not installed, for a name that no algorithm has, or for a
            setting that is unknown or invalid.
    """
    ray_trainable, space = make_trainable(trainable, param_space)
    return import_ray_tune().Tuner(ray_trainable, param_space=space, **kwargs)


def run(trainable: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
    """Calls `ray.tune.run` with the arguments of `Tuner`, and returns its result.

    Raises:
        ConfigError: as `Tuner` does.
    """
    ray_trainable, space = make_trainable(trainable, config)
    return import_ray_tune().run(ray_trainable, *args, config=space, **kwargs)


def make_trainable(trainable: Any, settings: Any = None) -> tuple[Any, Any]:
    """Returns a trainable for Ray Tune, and the settings to search.

    Args:
        trainable: an algorithm's class or name; anything else is returned with its settings.
        settings: a config, or a dict of settings.

    Raises:
        ConfigError: for a name that no algorithm has, or a setting that is unknown or invalid.
    """
    algorithm = get_trainable_cls(trainable) if isinstance(trainable, str) else trainable
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        return trainable, settings
    all_settings = (
        settings.to_dict() if isinstance(settings, AlgorithmConfig) else dict(settings or {})
    )
    space = {name: value for name, value in all_settings.items() if has_search_space(value)}
    fixed = {name: value for name, value in all_settings.items() if name not in space}
    return tune_trainable(make_default_config(algorithm).update_from_dict(fixed)), space


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_ray_tune(), name)
