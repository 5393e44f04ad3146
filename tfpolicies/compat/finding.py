"""Algorithms by the names that RLlib gave them."""

from __future__ import annotations

from typing import Any

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.algorithms.registry import find_algorithm

get_trainable_cls = get_algorithm_class = get_trainer_class = find_algorithm


def build_trainer(
    name: str, *, default_policy: type | None = None, default_config: Any = None
) -> type[Algorithm]:
    """Returns an algorithm that samples a batch, and updates each policy on its part once.

    Args:
        name: the class's name.
        default_policy: the class of policies that name none.
        default_config: an `AlgorithmConfig`, or a dict of settings, with the defaults; by default
            those of the policy's class.
    """
    config_class: Any = getattr(default_policy, "config_class", Algorithm.config_class)

    def get_default_policy_class(cls: Any, config: Any) -> Any:
        return default_policy or super(made, cls).get_default_policy_class(config)

    def get_default_config(cls: Any) -> Any:
        return config_class().update_from_dict({} if default_config is None else default_config)

    members = {
        "config_class": config_class,
        "get_default_policy_class": classmethod(get_default_policy_class),
        "get_default_config": classmethod(get_default_config),
        "__doc__": f"{name}, made by `build_trainer`.",
    }
    made: Any = type(name, (Algorithm,), members)
    return made
