"""Describes a run by its algorithm, its environment and the settings that differ from defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tfpolicies.base.type_aliases import Json
from tfpolicies.config.config_serialization import encode_config
from tfpolicies.envs.env_registry import get_env_name

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
    from tfpolicies.config.algorithm_config import AlgorithmConfig

_MAX_SETTING_LENGTH = 2000  # characters of a setting as JSON; longer ones are summarised
_ALWAYS_COMPARED = ("lr", "gamma", "train_batch_size")
_DESCRIBED_ELSEWHERE = ("env", "seed")


def describe_run(algorithm: AlgorithmProtocol) -> dict[str, Any]:
    """Returns the facts that `RunFolder.describe` records, as JSON values.

    They are `algorithm`, a name such as `"PPO"` or `"module:Class"`; `env`, the name of the
    environment or None; `seed`; and `config`, the settings that differ from the algorithm's
    defaults. In nested settings, only the keys that differ are there.
    """
    config, algorithm_class = algorithm.config, type(algorithm)
    name = algorithm_class.__qualname__
    if algorithm_class.__module__.rpartition(".")[0] != __package__:
        name = f"{algorithm_class.__module__}:{name}"
    settings = encode_settings(config)
    changed = _get_changed(settings, encode_settings(algorithm.get_default_config()))
    return {
        "algorithm": name,
        "env": None if config.env is None else get_env_name(config.env),
        "seed": config.seed,
        "config": {
            name: _shorten(value)
            for name, value in changed.items()
            if name not in _DESCRIBED_ELSEWHERE
        },
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


def get_compared_settings(algorithm: AlgorithmProtocol) -> dict[str, str | float | bool]:
    """Returns the settings by which TensorBoard's table of runs compares them.

    They are those of `describe_run`, and a few that are always there. Nested names are joined by a
    dot.
    """
    description = describe_run(algorithm)
    settings = encode_settings(algorithm.config)
    always = {name: settings[name] for name in _ALWAYS_COMPARED}
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


def encode_settings(config: AlgorithmConfig) -> dict[str, Any]:
    """Returns all settings of a config as a JSON file would hold them; see `encode_value`."""
    settings: dict[str, Any] = json.loads(json.dumps(encode_config(config.to_dict())["settings"]))
    return settings


def _get_changed(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    changed = {}
    for name, value in settings.items():
        default = defaults.get(name)
        if value == default and name in defaults:
            continue
        are_dicts = isinstance(value, dict) and isinstance(default, dict)
        changed[name] = _get_changed(value, default) if are_dicts and default else value
    return changed


def _shorten(value: Json) -> Json:
    text = json.dumps(value)
    return (
        value if len(text) <= _MAX_SETTING_LENGTH else f"{text[:100]}... ({len(text):,} characters)"
    )
