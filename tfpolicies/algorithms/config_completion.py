"""Completes and checks the config of an algorithm, and resolves its "auto" settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.base_config import as_overrides
from tfpolicies.config.migration_hints import describe_positional_config
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.distributed.tune import make_default_config
from tfpolicies.errors import ConfigError
from tfpolicies.reporting.progress_display import format_count
from tfpolicies.rollout.experience_input import infer_missing_spaces

EnvSource = str | Callable[..., object] | None
"""The source of environments: a name, a class or a function; None for no environment."""


def complete_config(
    algorithm_class: Any, config: AlgorithmConfig | Mapping[str, Any] | None, env: EnvSource
) -> AlgorithmConfig:
    """Returns the complete, validated config of an algorithm.

    Args:
        algorithm_class: a subclass of `Algorithm`.
        config: a config, a dict of settings, or None.
        env: the environment, if the config names none.
    """
    if not (config is None or isinstance(config, AlgorithmConfig | Mapping)):
        raise ConfigError(describe_positional_config(algorithm_class.__name__, config))
    complete = config
    if not isinstance(complete, AlgorithmConfig):
        complete = algorithm_class.get_default_config().update_from_dict(config or {})
    if not isinstance(complete, algorithm_class.config_class):
        complete = _add_defaults(algorithm_class, complete)
    if env is not None:
        if complete.env not in (None, env):
            raise ConfigError(
                f"env must be given once: it is {env!r} as an argument and {complete.env!r} in the "
                "config."
            )
        complete = complete.copy(copy_frozen=False).environment(env)
    complete = _add_inferred_spaces(complete)
    _require_restorable(algorithm_class, complete)
    complete.validate()
    _require_spaces(complete)
    return complete


def _add_inferred_spaces(config: AlgorithmConfig) -> AlgorithmConfig:
    """Adds the spaces of recorded experience, so that checkpoints have them."""
    inferred = infer_missing_spaces(config)
    if inferred is None:
        return config
    result = config.copy(copy_frozen=False)
    observation_space, action_space = inferred
    result.environment(
        observation_space=config.observation_space or observation_space,
        action_space=config.action_space or action_space,
    )
    return result


def _add_defaults(algorithm_class: Any, config: AlgorithmConfig) -> AlgorithmConfig:
    if not issubclass(algorithm_class.config_class, type(config)):
        raise ConfigError(
            f"{algorithm_class.__name__} has settings that {type(config).__name__} lacks; begin "
            f"with {algorithm_class.config_class.__name__}()."
        )
    return make_default_config(algorithm_class).update_from_dict(as_overrides(config))


def _require_restorable(algorithm_class: Any, config: AlgorithmConfig) -> None:
    """Checks that a checkpoint of the algorithm can restore all settings of a config."""
    if type(config) is algorithm_class.config_class:
        return
    default = make_default_config(algorithm_class)
    expected_name, name = type(default).__name__, type(config).__name__
    unknown = [setting for setting in config.to_dict() if setting not in default]
    if unknown:
        raise ConfigError(
            f"{name} has the setting {unknown[0]!r}, but the config of {algorithm_class.__name__} "
            f"is {expected_name}, which has no such setting, so that no checkpoint could be "
            "restored. "
            f"Subclass {algorithm_class.__name__}, set `config_class = {name}` in it (or "
            f'`lazy_class("{name}")` if the config is defined below it), and build that class.'
        )


def _require_spaces(config: AlgorithmConfig) -> None:
    """Checks that the config has an environment, or observation and action spaces."""
    has_spaces = config.observation_space is not None and config.action_space is not None
    reads_data = not needs_environment(config.input_)
    if config.env is None and reads_data and config.evaluation_interval is not None:
        raise ConfigError(
            f"evaluation_interval={config.evaluation_interval} needs an environment: "
            "config.environment(...). Without one, a run from recorded experience cannot evaluate."
        )
    if config.env is None and not has_spaces and not config.is_multi_agent():
        raise ConfigError(
            "An algorithm needs an environment: config.environment('CartPole-v1'), or your own "
            "class. One that only acts, evaluates or learns from your batches needs "
            "config.environment(observation_space=..., action_space=...)."
        )


def record_resolved_settings(algorithm: AlgorithmProtocol) -> None:
    """Records the resolved "auto" settings in an algorithm's config and prints them."""
    config, worker = algorithm.config, algorithm.worker
    envs = algorithm.workers.num_envs()
    length = config.get_fragment_length(envs)
    config.record_resolved(rollout_fragment_length=length)
    policies = [worker.get_policy(), *worker.policy_map.values()]
    with_backend = (
        candidate
        for candidate in policies
        if candidate is not None and candidate.driver.acting.inference
    )
    policy = next(with_backend, None)  # the default policy, or the first one
    if policy is None:
        return
    inference = policy.driver.acting.inference
    config.record_resolved(inference=inference, jit_compile=policy.config["jit_compile"])
    if config.log_level != "ERROR":
        print(
            f"{type(algorithm).__name__}: acting through {inference}, learning through "
            f"{policy.driver.learning.compile_mode}, {_describe_sample(algorithm, envs, length)} "
            "per sample."
        )


def _describe_sample(algorithm: AlgorithmProtocol, envs: int, length: int) -> str:
    if not needs_environment(algorithm.config.input_):
        rows = algorithm.workers.rows_per_sample()
        return f"{format_count(rows, 'row')} of recorded experience"
    return f"{format_count(envs, 'environment')} x {format_count(length, 'step')}"
