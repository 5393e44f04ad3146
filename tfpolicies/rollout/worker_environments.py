"""The environments of a rollout worker, made as its config says, and the connectors of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.sections import CONNECTORS, connector_state
from tfpolicies.connectors import ActionConnectorPipeline, AgentConnectorPipeline, restore
from tfpolicies.envs.making import (
    EnvContext,
    announce,
    is_instance,
    make_any_environments,
    require_alone,
)
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.repairs import Repairs, Watchdog
from tfpolicies.envs.vector import Environments
from tfpolicies.errors import ConfigError

Connectors = tuple[AgentConnectorPipeline, ActionConnectorPipeline]


def connectors_of(config: AlgorithmConfig | Mapping[str, Any]) -> Connectors | None:
    """Returns new connectors as a config has them, not connected yet; None if it has none.

    Args:
        config: of a policy, whole; or the settings of one that was written by hand.

    Raises:
        ConfigError: if it lists something else.
    """
    agent, action = (
        [restore(*connector_state(name, kind, each)) for each in config.get(name) or ()]
        for name, kind in CONNECTORS.items()
    )
    if not agent and not action:
        return None
    return AgentConnectorPipeline(agent), ActionConnectorPipeline(action)


def make_worker_environments(
    source: Any,
    config: AlgorithmConfig,
    context: EnvContext,
    on_created: Callable[[Any, EnvContext, int], None],
    *,
    may_be_none: bool,
) -> tuple[Environments | MultiAgentEnvironments | None, Watchdog | None]:
    """Makes `num_envs_per_worker` environments that step together.

    Args:
        source: a creator, class, name or instance.
        config: of the worker.
        context: what creators are called with; each environment gets a copy with its index.
        on_created: called with each environment, its context and its index, also later with those
            that replace broken ones.
        may_be_none: whether a creator may give no environment.

    Returns:
        The environments, or None without any, and who watches their time, if somebody is to.

    Raises:
        ConfigError: if the config is for other environments than the source gives.
        EnvError: if they cannot be made, or do not pass their check.
    """
    if config.in_evaluation and is_instance(source):
        require_alone(source, 1, 0, evaluates=True)
    made = make_any_environments(
        source,
        config.num_envs_per_worker,
        context,
        on_created,
        checked=not config.disable_env_checking,
        may_be_none=may_be_none,
    )
    if made is None:
        return None, None
    try:
        _require_fitting(made, source, config)
    except ConfigError:
        made.close()
        raise
    seconds = config.env_step_timeout_s
    watchdog = None if seconds is None else Watchdog(seconds)
    restarts = config.restart_failed_sub_environments and made.maker is not None

    def on_made(env: Any, index: int) -> None:
        announce(env, index, context, on_created)

    again = made.maker if restarts else None
    limit = config.max_num_sub_environment_restarts
    made.guard(Repairs(again, context.worker_index, watchdog, limit, on_made))
    return made, watchdog


def _require_fitting(
    made: Environments | MultiAgentEnvironments, source: Any, config: AlgorithmConfig
) -> None:
    if not isinstance(made, MultiAgentEnvironments) and config.is_multi_agent():
        raise ConfigError(
            f"Have multiple policies {sorted(config.policies)}, but the environment "
            f"{source!r} has one agent. Give a MultiAgentEnv or a PettingZoo environment, or "
            "leave `multi_agent(policies=...)` out."
        )
