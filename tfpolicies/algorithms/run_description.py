"""Describes a run by its algorithm, its environment and the settings that differ from defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfpolicies.config.description import get_algorithm_name, get_changed_settings
from tfpolicies.envs.env_registry import get_env_name
from tfpolicies.system.git_commit import find_commit

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol

_DESCRIBED_ELSEWHERE = ("env", "seed")


def describe_run(algorithm: AlgorithmProtocol) -> dict[str, Any]:
    """Returns the facts that `RunFolder.describe` records, as JSON values.

    They are `algorithm`, a name such as `"PPO"` or `"module:Class"`; `env`, the name of the
    environment or None; `seed`; `config`, the settings that differ from the algorithm's defaults
    (in nested settings, only the keys that differ); and `commit`, that of the repository of the
    current folder, or None.
    """
    config = algorithm.config
    changed = get_changed_settings(config.to_dict(), algorithm.get_default_config().to_dict())
    return {
        "algorithm": get_algorithm_name(type(algorithm)),
        "env": None if config.env is None else get_env_name(config.env),
        "seed": config.seed,
        "config": {name: x for name, x in changed.items() if name not in _DESCRIBED_ELSEWHERE},
        "commit": find_commit("."),
    }
