"""`ray.tune` for ported scripts: it also takes algorithms, their names and their configs.

Everything else is Ray Tune's own::

    from tfpolicies.compat import tune

    tuner = tune.Tuner("PPO", param_space=config.to_dict(), run_config=tune.RunConfig(stop=stop))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.compat.envs import register_env
from tfpolicies.compat.finding import get_trainable_cls
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.distributed.tune import ray_tune, tune_trainable

__all__ = ["Tuner", "register_env", "run"]


def Tuner(
    trainable: Any, *, param_space: AlgorithmConfig | Mapping[str, Any] | None = None, **rest: Any
) -> Any:
    """Returns a `ray.tune.Tuner`.

    Args:
        trainable: an algorithm's class or name; anything else goes to Ray Tune as it is.
        param_space: a config, or a dict of settings, also nested as in `config.to_dict()`.
        **rest: as Ray Tune takes it.

    Raises:
        ConfigError: if Ray Tune is not installed, or for a name that no algorithm has.
    """
    return ray_tune().Tuner(as_trainable(trainable), param_space=_settings(param_space), **rest)


def run(trainable: Any, *args: Any, config: Any = None, **rest: Any) -> Any:
    """Returns what `ray.tune.run` does; the arguments are those of `Tuner`.

    Raises:
        ConfigError: likewise.
    """
    return ray_tune().run(as_trainable(trainable), *args, config=_settings(config), **rest)


def as_trainable(trainable: Any) -> Any:
    """Returns the trainable of an algorithm, given its class or name, and other ones as they are.

    Raises:
        ConfigError: for a name that no algorithm has.
    """
    algorithm = get_trainable_cls(trainable) if isinstance(trainable, str) else trainable
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return tune_trainable(algorithm)
    return algorithm


def _settings(given: Any) -> dict[str, Any]:
    return given.to_dict() if isinstance(given, AlgorithmConfig) else dict(given or {})


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(ray_tune(), name)
