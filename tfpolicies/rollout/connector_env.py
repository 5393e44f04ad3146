"""Environments with connectors: policies observe and act through the connectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.connectors.connector import ActionStep, AgentStep
from tfpolicies.connectors.pipelines import ActionConnectorPipeline, AgentConnectorPipeline
from tfpolicies.envs.fault_tolerance import EnvSupervisor
from tfpolicies.envs.vector_adapters import StepResult, VectorEnvAdapter
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.policy_connectors import NO_PIPELINES, get_pipelines
from tfpolicies.rollout.space_checks import require_trained_spaces
from tfpolicies.rollout.timing import now


def wrap_connectors(envs: VectorEnvAdapter, policy: Policy) -> VectorEnvAdapter:
    """Wraps environments with the connectors of the policy that acts in them, if it has any.

    Raises:
        SpaceError: if a connector does not fit the environments' spaces.
    """
    pipelines = get_pipelines(policy)
    if pipelines is NO_PIPELINES:
        return envs
    agent_pipeline, action_pipeline = pipelines
    return ConnectorEnv(
        envs,
        agent_pipeline or AgentConnectorPipeline(),
        action_pipeline or ActionConnectorPipeline(),
    )


def connect_environments(
    envs: VectorEnvAdapter, policy: Policy, *, allow_other_spaces: bool
) -> VectorEnvAdapter:
    """Wraps environments with the connectors of a trained policy, and checks their spaces.

    Args:
        envs: the environments.
        policy: acts in them.
        allow_other_spaces: see `require_trained_spaces`.

    Raises:
        SpaceError: if their spaces differ from those in training.
    """
    envs = wrap_connectors(envs, policy)
    require_trained_spaces(
        policy.policy_id,
        (policy.observation_space, policy.action_space),
        (envs.observation_space, envs.action_space),
        allow_different=allow_other_spaces,
    )
    return envs


def get_connector_metrics(policy: Policy) -> dict[str, Any]:
    """Returns the connector times of the only policy, by its id, for metrics."""
    metrics = policy.get_connector_metrics()
    return {DEFAULT_POLICY_ID: metrics} if metrics else {}


class ConnectorEnv(VectorEnvAdapter):
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
        base_envs: VectorEnvAdapter,
        agent: AgentConnectorPipeline,
        action: ActionConnectorPipeline,
    ) -> None:
        self.base_envs = base_envs
        self.agent = agent
        self.action = action
        self.num_envs = base_envs.num_envs
        self.observation_space = agent.connect(base_envs.observation_space)
        self.action_space = action.connect(base_envs.action_space)
        self.env_factory = base_envs.env_factory
        self._env_ids = np.arange(self.num_envs)

    def set_supervisor(self, supervisor: EnvSupervisor) -> None:
        self.base_envs.set_supervisor(supervisor)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        self.agent.reset(self._env_ids)
        self.action.reset(self._env_ids)
        return self.agent(AgentStep(self.base_envs.reset(seeds), self._env_ids)).obs

    def step(self, actions: Structure) -> StepResult:
        start = now()
        actions = self.action(ActionStep(actions, self._env_ids)).actions
        step_start = now()
        step = self.base_envs.step(actions)
        step_end = now()
        final = step.final_obs
        if final is not None:
            indices, final_obs = final
            final = (indices, self.agent(AgentStep(final_obs, indices)).obs)
            self._reset_connectors(indices)
        if step.reset_only is not None and step.reset_only.any():
            self._reset_connectors(np.flatnonzero(step.reset_only))
        agent_step = self.agent(AgentStep(step.obs, self._env_ids, step.rewards))
        rewards = step.rewards if agent_step.rewards is None else agent_step.rewards
        action_ns, obs_ns = self.connector_ns
        self.connector_ns = (action_ns + step_start - start, obs_ns + now() - step_end)
        return step._replace(obs=agent_step.obs, rewards=rewards, final_obs=final)

    def _reset_connectors(self, env_ids: np.ndarray) -> None:
        self.agent.reset(env_ids)
        self.action.reset(env_ids)

    def get_sub_environments(self) -> list[Any]:
        return self.base_envs.get_sub_environments()

    def close(self) -> None:
        self.base_envs.close()

    def get_state(self) -> None:
        return None
