"""Creates the environments of a rollout worker, and the connectors of its policies."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.sections import CONNECTORS, encode_connector
from tfpolicies.connectors import (
    ActionConnectorPipeline,
    AgentConnectorPipeline,
    OwnFilter,
    restore,
)
from tfpolicies.envs.env_checker import check_new_env
from tfpolicies.envs.env_factory import (
    AnyEnv,
    EnvContext,
    check_instance_suffices,
    is_env_instance,
    make_any_environments,
    notify_created,
)
from tfpolicies.envs.env_registry import EnvSource, get_env_name
from tfpolicies.envs.fault_tolerance import EnvSupervisor, Watchdog
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.subprocess_adapter import SubprocessEnvAdapter, make_process_environments
from tfpolicies.envs.vector_adapters import SyncEnvAdapter, VectorEnvAdapter
from tfpolicies.errors import ConfigError, EnvError, SpaceMismatchError
from tfpolicies.rollout.base_worker import BaseWorker

_CHECK_STEPS = 3  # played in a new environment before training
_MAX_CREATION_SECONDS = 1.0  # environments that take longer to create are not checked
_CHECK_HINT = (
    f"It was found by playing {_CHECK_STEPS} steps before training; "
    "environment(disable_env_checking=True) skips that check."
)
_SETTINGS_THAT_SKIP_CHECKS = (
    "disable_env_checking",
    "env_step_timeout_s",
    "ignore_worker_failures",
    "recreate_failed_workers",
    "restart_failed_sub_environments",
)
"""Settings that skip the check of environments: they expect faults."""

logger = logging.getLogger("tfpolicies")

ConnectorPair = tuple[AgentConnectorPipeline, ActionConnectorPipeline]


def make_connectors(config: AlgorithmConfig | Mapping[str, Any]) -> ConnectorPair | None:
    """Creates the connectors that a config lists, not connected yet; None without connectors.

    Args:
        config: the complete config of a policy; or the settings of a custom policy.

    Raises:
        ConfigError: if the config lists something else.
    """
    agent, action = (
        [
            restore(*encode_connector(name, connector_class, connector_spec))
            for connector_spec in config.get(name) or ()
        ]
        for name, connector_class in CONNECTORS.items()
    )
    make_filter = config.get("observation_filter")
    if callable(make_filter):
        agent.append(OwnFilter(make_filter, updates=not config.get("in_evaluation", False)))
    if not agent and not action:
        return None
    return AgentConnectorPipeline(agent), ActionConnectorPipeline(action)


def make_worker_environments(
    worker: BaseWorker,
    source: EnvSource,
    context: EnvContext,
    validate_env: Callable[[Any, EnvContext], None] | None,
) -> tuple[VectorEnvAdapter | MultiAgentEnvAdapter | None, Watchdog | None]:
    """Creates `num_envs_per_worker` environments that step together.

    Args:
        worker: a `RolloutWorker`, whose `seconds_to_make` is set. If it was given spaces, the
            creator may return None.
        source: a creator, class, name or instance.
        context: argument of creators; each environment gets a copy with its index.
        validate_env: see `RolloutWorker`. Like the callback, it is also called for environments
            that replace broken ones later.

    Returns:
        The environments (None without any), and the watchdog of their step time (None without
        `env_step_timeout_s`).

    Raises:
        ConfigError: if the config does not match the kind of environment.
        EnvError: if an environment cannot be created or does not pass its check.
    """
    config = worker.config

    def on_created(env: object, env_context: EnvContext, index: int) -> None:
        if validate_env is not None:
            validate_env(env, env_context)
        worker.callbacks.on_sub_environment_created(
            worker=worker, sub_environment=env, env_context=env_context, env_index=index
        )

    if config.in_evaluation and is_env_instance(source):
        check_instance_suffices(source, 1, 0, evaluates=True)
    start, count = time.perf_counter(), config.num_envs_per_worker
    check_options = {"checked": not config.disable_env_checking, "may_be_none": bool(worker.spaces)}
    environments: VectorEnvAdapter | MultiAgentEnvAdapter | None
    if config.env_processes:
        counts = count, config.env_processes
        environments = make_process_environments(
            source, *counts, context, on_created, **check_options
        )
    else:
        environments = make_any_environments(source, count, context, on_created, **check_options)
    worker.seconds_to_make = time.perf_counter() - start
    if isinstance(environments, SubprocessEnvAdapter):
        worker.seconds_to_make = environments.seconds_to_make
    if environments is None:
        return None, None
    try:
        _require_multi_agent(environments, source, config)
    except ConfigError:
        environments.close()
        raise
    seconds = config.env_step_timeout_s
    watchdog = None if seconds is None else Watchdog(seconds)
    make_env = environments.env_factory if config.restart_failed_sub_environments else None

    def on_recreated(env: AnyEnv, index: int) -> None:
        notify_created(env, index, context, on_created)

    limit = config.max_num_sub_environment_restarts
    environments.set_supervisor(
        EnvSupervisor(make_env, worker.worker_index, watchdog, limit, on_recreated)
    )
    return environments, watchdog


def check_environment(worker: BaseWorker) -> None:
    """Plays a few steps in a new environment like the worker's, and closes it.

    Skips the check with `disable_env_checking`, with settings that expect faults, and where it
    would be slow or impossible; also if the environment's `_skip_env_checking` is true, or if it
    leaves its spaces to the policies. Shared random number generators stay as they are.

    Args:
        worker: a `RolloutWorker`.
    """
    envs: Any = worker.environments
    check: Callable[[int, str], None]
    if isinstance(envs, SubprocessEnvAdapter):
        check = envs.check_new_env
    elif isinstance(envs, SyncEnvAdapter | MultiAgentEnvAdapter) and envs.env_factory is not None:
        check = functools.partial(check_new_env, envs.env_factory)
    else:
        return
    slow = worker.seconds_to_make > _MAX_CREATION_SECONDS * worker.config.num_envs_per_worker
    if slow or any(worker.config[name] for name in _SETTINGS_THAT_SKIP_CHECKS):
        return
    try:
        check(_CHECK_STEPS, worker.config.action_mask_key)
    except SpaceMismatchError as error:
        logger.warning("Environment %r: %s %s", get_env_name(worker.config.env), error, _CHECK_HINT)
    except EnvError as error:
        raise EnvError(f"{error} {_CHECK_HINT}") from error


def _require_multi_agent(
    environments: VectorEnvAdapter | MultiAgentEnvAdapter,
    source: EnvSource,
    config: AlgorithmConfig,
) -> None:
    if not isinstance(environments, MultiAgentEnvAdapter) and config.is_multi_agent():
        raise ConfigError(
            f"Have multiple policies {sorted(config.policies)}, but the environment "
            f"{source!r} has one agent. Give a MultiAgentEnv or a PettingZoo environment, or "
            "omit `multi_agent(policies=...)`."
        )
