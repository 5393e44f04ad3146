"""Creates the environments of a rollout worker, and the connectors of its policies."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.sections import CONNECTORS, connector_state
from tfpolicies.connectors import (
    ActionConnectorPipeline,
    AgentConnectorPipeline,
    OwnFilter,
    restore,
)
from tfpolicies.envs.checking import UnlikeSpaceError, check_new_env
from tfpolicies.envs.making import (
    AnyEnv,
    EnvContext,
    announce,
    is_instance,
    make_any_environments,
    require_alone,
)
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.process_environments import ProcessEnvironments, make_process_environments
from tfpolicies.envs.registry import Source, env_name
from tfpolicies.envs.repairs import Repairs, Watchdog
from tfpolicies.envs.vector import Environments, PlainEnvironments
from tfpolicies.errors import ConfigError, EnvError
from tfpolicies.rollout.worker import Worker

_STEPS = 3  # played in a new environment before training
_MOST_SECONDS = 1.0  # environments that take longer to create are not checked
_FOUND = (
    f"It was found by playing {_STEPS} steps before training; "
    "environment(disable_env_checking=True) skips that check."
)
_UNCHECKED = (
    "disable_env_checking",
    "env_step_timeout_s",
    "ignore_worker_failures",
    "recreate_failed_workers",
    "restart_failed_sub_environments",
)
"""Settings that skip the check of environments: they expect faults."""

logger = logging.getLogger("tfpolicies")

Connectors = tuple[AgentConnectorPipeline, ActionConnectorPipeline]


def connectors_of(config: AlgorithmConfig | Mapping[str, Any]) -> Connectors | None:
    """Creates the connectors that a config lists, not connected yet; None without connectors.

    Args:
        config: the complete config of a policy; or the settings of a custom policy.

    Raises:
        ConfigError: if the config lists something else.
    """
    agent, action = (
        [restore(*connector_state(name, kind, each)) for each in config.get(name) or ()]
        for name, kind in CONNECTORS.items()
    )
    make_filter = config.get("observation_filter")
    if callable(make_filter):
        agent.append(OwnFilter(make_filter, updates=not config.get("in_evaluation", False)))
    if not agent and not action:
        return None
    return AgentConnectorPipeline(agent), ActionConnectorPipeline(action)


def make_worker_environments(
    worker: Worker,
    source: Source,
    context: EnvContext,
    validate_env: Callable[[Any, EnvContext], None] | None,
) -> tuple[Environments | MultiAgentEnvironments | None, Watchdog | None]:
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

    if config.in_evaluation and is_instance(source):
        require_alone(source, 1, 0, evaluates=True)
    began, count = time.perf_counter(), config.num_envs_per_worker
    checks = {"checked": not config.disable_env_checking, "may_be_none": bool(worker.spaces)}
    made: Environments | MultiAgentEnvironments | None
    if config.env_processes:
        numbers = count, config.env_processes
        made = make_process_environments(source, *numbers, context, on_created, **checks)
    else:
        made = make_any_environments(source, count, context, on_created, **checks)
    worker.seconds_to_make = time.perf_counter() - began
    if isinstance(made, ProcessEnvironments):
        worker.seconds_to_make = made.seconds_to_make
    if made is None:
        return None, None
    try:
        _require_fitting(made, source, config)
    except ConfigError:
        made.close()
        raise
    seconds = config.env_step_timeout_s
    watchdog = None if seconds is None else Watchdog(seconds)
    again = made.maker if config.restart_failed_sub_environments else None

    def on_made(env: AnyEnv, index: int) -> None:
        announce(env, index, context, on_created)

    limit = config.max_num_sub_environment_restarts
    made.guard(Repairs(again, worker.worker_index, watchdog, limit, on_made))
    return made, watchdog


def check_environment(worker: Worker) -> None:
    """Plays a few steps in a new environment like the worker's, and closes it.

    Skips the check with `disable_env_checking`, with settings that expect faults, and where it
    would be slow or impossible; also if the environment's `_skip_env_checking` is true, or if it
    leaves its spaces to the policies. Shared random number generators stay as they are.

    Args:
        worker: a `RolloutWorker`.

    Raises:
        EnvError: if the check fails. An observation outside its space that can still be sampled
            only causes a warning.
    """
    envs: Any = worker.environments
    check: Callable[[int, str], None]
    if isinstance(envs, ProcessEnvironments):
        check = envs.check_new_env
    elif isinstance(envs, PlainEnvironments | MultiAgentEnvironments) and envs.maker is not None:
        check = functools.partial(check_new_env, envs.maker)
    else:
        return
    slow = worker.seconds_to_make > _MOST_SECONDS * worker.config.num_envs_per_worker
    if slow or any(worker.config[name] for name in _UNCHECKED):
        return
    try:
        check(_STEPS, worker.config.action_mask_key)
    except UnlikeSpaceError as error:
        logger.warning("Environment %r: %s %s", env_name(worker.config.env), error, _FOUND)
    except EnvError as error:
        raise EnvError(f"{error} {_FOUND}") from error


def _require_fitting(
    made: Environments | MultiAgentEnvironments, source: Source, config: AlgorithmConfig
) -> None:
    if not isinstance(made, MultiAgentEnvironments) and config.is_multi_agent():
        raise ConfigError(
            f"Have multiple policies {sorted(config.policies)}, but the environment "
            f"{source!r} has one agent. Give a MultiAgentEnv or a PettingZoo environment, or "
            "omit `multi_agent(policies=...)`."
        )
