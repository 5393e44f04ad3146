"""The environments of a rollout worker: made as its config says, watched, behind connectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.connectors import ActionConnectorPipeline, AgentConnectorPipeline, restore
from tfpolicies.envs.making import EnvContext, make_any_environments
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.repairs import Repairs, Watchdog
from tfpolicies.envs.vector import Environments
from tfpolicies.errors import ConfigError
from tfpolicies.rollout.connected import ConnectedEnvironments

Connectors = tuple[AgentConnectorPipeline, ActionConnectorPipeline]


def connectors_of(config: AlgorithmConfig) -> Connectors | None:
    """Returns new connectors as the config has them, not connected yet; None if it has none."""
    agent, action = config.agent_connectors, config.action_connectors
    if not agent and not action:
        return None
    return (
        AgentConnectorPipeline(restore(*state) for state in agent),
        ActionConnectorPipeline(restore(*state) for state in action),
    )


def make_worker_environments(
    source: Any,
    config: AlgorithmConfig,
    context: EnvContext,
    connectors: Connectors | None,
    on_created: Callable[[Any, EnvContext, int], None],
    *,
    may_be_none: bool,
) -> tuple[Environments | MultiAgentEnvironments | None, Watchdog | None]:
    """Makes `num_envs_per_worker` environments that step together.

    Args:
        source: a creator, class, name or instance.
        config: of the worker.
        context: what creators are called with; each environment gets a copy with its index.
        connectors: what stands between environments and policies.
        on_created: called with each environment, its context and its index, also later with those
            that replace broken ones.
        may_be_none: whether a creator may give no environment.

    Returns:
        The environments, or None without any, and who watches their time, if somebody is to.

    Raises:
        ConfigError: if the config is for other environments than the source gives.
        EnvError: if they cannot be made, or do not pass their check.
    """
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
        _require_fitting(made, source, config, connectors)
    except ConfigError:
        made.close()
        raise
    limit = config.env_step_timeout_s
    watchdog = None if limit is None else Watchdog(limit)
    restarts = config.restart_failed_sub_environments and made.maker is not None
    again = _maker(made.maker, context, on_created) if restarts else None
    made.guard(Repairs(again, context.worker_index, watchdog))
    if connectors is not None and not isinstance(made, MultiAgentEnvironments):
        return ConnectedEnvironments(made, *connectors), watchdog
    return made, watchdog


def _require_fitting(
    made: Environments | MultiAgentEnvironments,
    source: Any,
    config: AlgorithmConfig,
    connectors: Connectors | None,
) -> None:
    several_agents = isinstance(made, MultiAgentEnvironments)
    if several_agents and connectors is not None:
        raise ConfigError(
            "agent_connectors and action_connectors are for environments with one agent; "
            "use observation_fn, or wrap the environment."
        )
    if not several_agents and config.is_multi_agent():
        raise ConfigError(
            f"Have multiple policies {sorted(config.policies)}, but the environment "
            f"{source!r} has one agent. Give a MultiAgentEnv or a PettingZoo environment, or "
            "leave `multi_agent(policies=...)` out."
        )


def _maker(
    maker: Any, context: EnvContext, on_created: Callable[[Any, EnvContext, int], None]
) -> Callable[[int], Any]:
    """Returns what makes an environment again, by index."""

    def make(index: int) -> Any:
        env = maker(index)
        on_created(env, context.copy_with(index), index)
        return env

    return make
