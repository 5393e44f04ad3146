"""Environments with connectors: policies observe and act through the connectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.connectors.connector import ActionStep, AgentStep
from tfpolicies.connectors.pipelines import ActionConnectorPipeline, AgentConnectorPipeline
from tfpolicies.envs.repairs import Repairs
from tfpolicies.envs.vector import Environments, Step
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.policy_connection import NO_PIPELINES, pipelines_of
from tfpolicies.rollout.timing import now
from tfpolicies.type_aliases import Structure


def connected(envs: Environments, policy: Policy) -> Environments:
    """Wraps environments with the connectors of the policy that acts in them, if it has any.

    Raises:
        SpaceError: if a connector does not fit the environments' spaces.
    """
    pipelines = pipelines_of(policy)
    if pipelines is NO_PIPELINES:
        return envs
    agent, action = pipelines
    return ConnectedEnvironments(
        envs, agent or AgentConnectorPipeline(), action or ActionConnectorPipeline()
    )


def connector_metrics_of(policy: Policy) -> dict[str, Any]:
    """Returns the connector times of the only policy, by its id, for metrics."""
    found = policy.get_connector_metrics()
    return {DEFAULT_POLICY_ID: found} if found else {}


class ConnectedEnvironments(Environments):
    """N environments whose observations, rewards and actions pass through pipelines.

    Connectors are reset when an episode ends. The state of running episodes is not available, so a
    run that is restored from a checkpoint starts new ones.

    Args:
        base_envs: the environments.
        agent: transforms observations and rewards.
        action: transforms actions, after their mapping to the environment's bounds.

    Raises:
        ConfigError: if a connector does not fit the spaces.
    """

    def __init__(
        self,
        inner: Environments,
        agent: AgentConnectorPipeline,
        action: ActionConnectorPipeline,
    ) -> None:
        self.inner = inner
        self.agent = agent
        self.action = action
        self.num_envs = inner.num_envs
        self.observation_space = agent.connect(inner.observation_space)
        self.action_space = action.connect(inner.action_space)
        self.maker = inner.maker
        self._ids = np.arange(self.num_envs)

    def guard(self, repairs: Repairs) -> None:
        self.inner.guard(repairs)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        self.agent.reset(self._ids)
        self.action.reset(self._ids)
        return self.agent(AgentStep(self.inner.reset(seeds), self._ids)).obs

    def step(self, actions: Structure) -> Step:
        started = now()
        actions = self.action(ActionStep(actions, self._ids)).actions
        sent = now()
        step = self.inner.step(actions)
        stepped = now()
        final = step.final
        if final is not None:
            indices, last = final
            final = (indices, self.agent(AgentStep(last, indices)).obs)
            self._forget(indices)
        if step.dead is not None and step.dead.any():
            self._forget(np.flatnonzero(step.dead))
        seen = self.agent(AgentStep(step.obs, self._ids, step.rewards))
        rewards = step.rewards if seen.rewards is None else seen.rewards
        before, after = self.connecting
        self.connecting = (before + sent - started, after + now() - stepped)
        return step._replace(obs=seen.obs, rewards=rewards, final=final)

    def _forget(self, env_ids: np.ndarray) -> None:
        self.agent.reset(env_ids)
        self.action.reset(env_ids)

    def get_sub_environments(self) -> list[Any]:
        return self.inner.get_sub_environments()

    def close(self) -> None:
        self.inner.close()

    def get_state(self) -> None:
        return None
