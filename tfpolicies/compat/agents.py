"""RLlib's older names of algorithms: trainers, lookups by name, and `build_trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.algorithms.algorithm_registry import find_algorithm, get_registered_names
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.errors import ConfigError

get_trainable_cls = get_algorithm_class = get_trainer_class = find_algorithm


class _Trainer(Algorithm):
    """An algorithm with the constructor of a trainer.

    Args:
        config: a dict of settings, which may contain `multiagent`, or an `AlgorithmConfig`; missing
            settings have the algorithm's defaults.
        env: the environment, if the config names none.
        logger_creator: must be None.

    Raises:
        ConfigError: for wrong settings, or an `env` that differs from that of the config.
    """

    def __init__(
        self,
        config: AlgorithmConfig | Mapping[str, Any] | None = None,
        env: Any = None,
        logger_creator: Any = None,
    ) -> None:
        if logger_creator is not None:
            raise ConfigError("logger_creator must be None; log the results of `train()` instead.")
        algorithm_config = (
            config.copy(copy_frozen=False)
            if isinstance(config, AlgorithmConfig)
            else self.config_class.from_dict(config or {})
        )
        super().__init__(algorithm_config, env)

    @classmethod
    def get_default_config(cls) -> dict[str, Any]:
        """Returns all settings with their defaults, as a dict to modify."""
        return cls.config_class().to_dict()


def build_trainer(
    name: str, *, default_policy: type | None = None, default_config: Any = None
) -> type[Algorithm]:
    """Returns an algorithm that samples a batch, and updates each policy once on its part.

    Args:
        name: the class's name.
        default_policy: the class of policies that do not set one.
        default_config: an `AlgorithmConfig`, or a dict of settings, with the defaults; by default
            those of the policy's class.
    """
    config_class: Any = getattr(default_policy, "config_class", Algorithm.config_class)

    def get_default_policy_class(cls: Any, config: Any) -> Any:
        return default_policy or super(algorithm_class, cls).get_default_policy_class(config)

    def get_default_config(cls: Any) -> Any:
        return config_class().update_from_dict({} if default_config is None else default_config)

    members = {
        "config_class": config_class,
        "get_default_policy_class": classmethod(get_default_policy_class),
        "get_default_config": classmethod(get_default_config),
        "__doc__": f"{name}, made by `build_trainer`.",
    }
    algorithm_class: Any = type(name, (Algorithm,), members)
    return algorithm_class


def __getattr__(name: str) -> Any:
    """Returns `<algorithm>Trainer` or `<algorithm>_DEFAULT_CONFIG`, made on first use."""
    for suffix, make in (("Trainer", _make_trainer), ("_DEFAULT_CONFIG", _make_default_config)):
        algorithm = name.removesuffix(suffix)
        if algorithm != name and algorithm in get_registered_names():
            globals()[name] = make(algorithm)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_trainer(algorithm: str) -> Any:
    text = f"{algorithm}; see `_Trainer` for the arguments."
    members = {"__module__": __name__, "__doc__": text}
    return type(f"{algorithm}Trainer", (_Trainer, find_algorithm(algorithm)), members)


def _make_default_config(algorithm: str) -> dict[str, Any]:
    settings: dict[str, Any] = find_algorithm(algorithm).config_class().to_dict()
    return settings
