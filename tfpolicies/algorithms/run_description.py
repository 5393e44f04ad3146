"""Describes a run by its algorithm, its environment and the settings that differ from defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tfpolicies.base.type_aliases import Json
from tfpolicies.config.description import get_algorithm_name, get_changed_settings
from tfpolicies.envs.env_registry import get_env_name
from tfpolicies.storage.json_values import encode_value
from tfpolicies.system.git_commit import find_commit

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
    from tfpolicies.config.algorithm_config import AlgorithmConfig

_ALWAYS_COMPARED = ("lr", "gamma", "train_batch_size")
_DESCRIBED_ELSEWHERE = ("env", "seed")


def describe_run(algorithm: AlgorithmProtocol) -> dict[str, Any]:
    """Returns the facts that `RunFolder.describe` records, as JSON values.

    They are `algorithm`, a name such as `"PPO"` or `"module:Class"`; `env`, the name of the
    environment or None; `seed`; `config`, the settings that differ from the algorithm's defaults
    (in nested settings, only the keys that differ; without resolved values of "auto"); and
    `commit`, that of the repository of the current folder, or None.
    """
    config = algorithm.config
    changed = get_changed_settings(config.to_dict(), algorithm.get_default_config().to_dict())
    left_out = {*_DESCRIBED_ELSEWHERE, *config.get_auto_settings()}
    return {
        "algorithm": get_algorithm_name(type(algorithm)),
        "env": None if config.env is None else get_env_name(config.env),
        "seed": config.seed,
        "config": {name: x for name, x in changed.items() if name not in left_out},
        "commit": find_commit("."),
    }


def describe_algorithm(algorithm: AlgorithmProtocol) -> list[str]:
    """Returns the lines about an algorithm in its summary: environment, workers and progress."""
    config, name = algorithm.config, type(algorithm).__name__
    env = "no environment" if config.env is None else get_env_name(config.env)
    workers = config.num_rollout_workers
    where = f"in each of {workers} workers" if workers else "in this process"
    steps = int(algorithm.counters["num_env_steps_sampled"])
    return [
        f"Algorithm: {name} on {env}",
        f"  environments  {config.num_envs_per_worker} {where}",
        f"  trained       {algorithm.iteration:,} iterations, {steps:,} environment steps",
    ]


def get_compared_settings(
    config: AlgorithmConfig, description: Mapping[str, Any]
) -> dict[str, str | float | bool]:
    """Returns the settings by which TensorBoard's table of runs compares them.

    They are those of the description, and a few that are always there. Nested names are joined by
    a dot.

    Args:
        config: of the run.
        description: of the run; see `describe_run`.
    """
    always = {name: encode_value(config[name]) for name in _ALWAYS_COMPARED}
    facts = {name: description[name] for name in ("algorithm", "env", "seed")}
    return {
        name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for name, value in flatten_settings({**facts, **always, **description["config"]})
    }


def flatten_settings(settings: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yields settings; those in a dict have its name in front, such as `model.fcnet_hiddens`.

    >>> dict(flatten_settings({"lr": 0.1, "model": {"dim": 84}}))
    {'lr': 0.1, 'model.dim': 84}
    """
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
