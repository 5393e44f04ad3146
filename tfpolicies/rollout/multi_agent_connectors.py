"""The connectors of policies in multi-agent environments.

Each policy has its own connectors. In every step they are called once for the observations of all
its agents in all sub-environments, and once for their actions. The order is:

* An environment's observations pass `observation_fn`, then the policy's agent connectors. The
  policy acts on the result, and batches hold it, including last observations of trajectories.
  Filters and action masks belong to the policy, so they come after connectors.
* Rewards are summed until the agent's next observation and pass the agent connectors with it. If
  the agent is done without another observation, the previous one is repeated. Metrics, previous
  rewards that a model reads, and batches have the result; `clip_rewards` and `reward_filter` come
  later, and change only batches. Rewards of agents that never observed anything are counted
  unchanged.
* Actions are mapped to the environment's bounds by the policy (`normalize_actions`,
  `clip_actions`), then pass its action connectors. Batches have the actions before both.

Connectors identify an agent by its environment and its index in the episode. They are reset when
an episode ends for any reason; an agent that left does not return under its earlier index. An
agent whose observations its policy's connectors do not accept is rejected when it is mapped to the
policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from tfpolicies.envs.fault_tolerance import check_observation
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.multi_agent_env import ALL
from tfpolicies.envs.vector_adapters import split_batch
from tfpolicies.errors import EnvError
from tfpolicies.models.spaces import unflatten
from tfpolicies.rollout.multi_agent_episode import MultiAgentEpisode, SubEnvState
from tfpolicies.rollout.multi_agent_tables import PolicyRows
from tfpolicies.rollout.policy_connectors import (
    NO_PIPELINES,
    PolicyConnectors,
    get_pipelines,
    has_new_pipelines,
)
from tfpolicies.rollout.space_checks import get_agent_space
from tfpolicies.rollout.transition_table import TransitionTable


class _ObservedAgents(NamedTuple):
    """Agents of one sub-environment and policy with an observation, or one that is done."""

    sub_env: SubEnvState
    agents: Sequence[Any]
    slots: np.ndarray  # int64 [K]
    observations: list[Any]  # K observations, which connectors replace in place; or none
    ended_unroll_id: int | None = None  # the unroll id of an agent that is done


class ConnectorGroup:
    """The connectors of all policies in a sampler.

    Args:
        envs: the environments.
        transitions: the transition table, with the slots and the policies' rows.
        has_env_spaces: whether agents get the environment's own observations.

    Attributes:
        connected_rows: the rows of policies with connectors; if there are none, `process_step` need
            not be
            called.
    """

    def __init__(
        self, envs: MultiAgentEnvAdapter, transitions: TransitionTable, *, has_env_spaces: bool
    ) -> None:
        self.connected_rows: list[PolicyRows] = []
        self._envs = envs
        self._transitions = transitions
        self._has_env_spaces = has_env_spaces
        self._done_agents: list[tuple[PolicyRows, _ObservedAgents]] = []  # in the current step

    def add_policy(self, rows: PolicyRows) -> None:
        if get_pipelines(rows.policy) is NO_PIPELINES:
            return
        rows.connectors = PolicyConnectors(rows, self._transitions.slots, self._get_space)
        rows.connectors.reset(np.arange(self._envs.num_envs))
        self.connected_rows.append(rows)

    def is_outdated(self, rows: PolicyRows) -> bool:
        """Returns whether a policy has other connectors now than when it started to act."""
        previous = NO_PIPELINES if rows.connectors is None else rows.connectors.pipelines
        return has_new_pipelines(rows.policy, previous)

    def remove_policy(self, rows: PolicyRows) -> None:
        """Removes the rows of a policy that no longer exists."""
        self.connected_rows = [
            connected for connected in self.connected_rows if connected is not rows
        ]

    def _get_space(self, env_id: int, agent: Hashable) -> spaces.Space[Any] | None:
        env = self._envs.envs[env_id]
        return get_agent_space(env, "observation_space", agent) if self._has_env_spaces else None

    # -- a step -------------------------------------------------------------------------------

    def add_done_agent(
        self,
        sub_env: SubEnvState,
        rows: PolicyRows,
        agent: Hashable,
        unroll_id: int,
        observations: tuple[Any, ...],
    ) -> None:
        """Records that an agent is done; `observations` has its last observation, if it has one."""
        slots = np.array([sub_env.episode.slot_by_agent[agent]])
        self._done_agents.append(
            (rows, _ObservedAgents(sub_env, (agent,), slots, list(observations), unroll_id))
        )

    def process_first_observations(self, sub_envs: Sequence[SubEnvState]) -> None:
        """Resets connectors for new episodes and sends their first observations through.

        Raises:
            EnvError: if an observation is not of the space, or not finite; it names the agent.
            ObservationError: if connectors return values that their policy does not accept.
        """
        if not (self.connected_rows and sub_envs):
            return
        env_ids = np.array([sub_env.index for sub_env in sub_envs])
        for rows in self.connected_rows:
            rows.connectors.reset(env_ids)
        for rows, groups in self._collect_agents(sub_envs).items():
            self._run_pipelines(rows, groups)

    def process_step(self, sub_envs: Sequence[SubEnvState]) -> None:
        """Sends the observations and rewards of a step through the connectors.

        Raises:
            EnvError, ObservationError: see `begin`.
        """
        columns = self._transitions.slots.columns
        for rows, groups in self._collect_agents(sub_envs).items():
            slots, rewards = self._run_pipelines(rows, groups, columns["earned"])
            difference = rewards - columns["earned"][slots]
            if difference.any():
                columns["earned"][slots] = rewards
                columns["total"][slots] += difference
                by_env = np.bincount(
                    rows.connectors.get_env_ids(slots), difference, self._envs.num_envs
                )
                for sub_env in sub_envs:
                    sub_env.episode.total_reward += float(by_env[sub_env.index])

    def _collect_agents(
        self, sub_envs: Sequence[SubEnvState]
    ) -> dict[PolicyRows, list[_ObservedAgents]]:
        """Returns the agents with observations by policy, then those that are done without one."""
        result: dict[PolicyRows, list[_ObservedAgents]] = {}
        for sub_env in sub_envs:
            for policy_group, observations in sub_env.pending:
                if policy_group.rows.connectors is not None:
                    group = _ObservedAgents(
                        sub_env, policy_group.agents, policy_group.slots, observations
                    )
                    result.setdefault(policy_group.rows, []).append(group)
        done_agents, self._done_agents = self._done_agents, []
        for rows, group in sorted(done_agents, key=lambda pair: not pair[1].observations):
            if group.sub_env in sub_envs:  # the others failed
                result.setdefault(rows, []).append(group)
        return result

    def _run_pipelines(
        self,
        rows: PolicyRows,
        groups: Sequence[_ObservedAgents],
        rewards_by_slot: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Any]:
        """Sends observations through the connectors, and replaces them by the result.

        Args:
            rows: of the agents' policy.
            groups: the agents.
            rewards_by_slot: rewards by slot; None if there are none yet.

        Returns:
            The slots of all agents, int64 `[K]`, and their rewards, float64 `[K]` or None.
        """
        slots = np.concatenate([group.slots for group in groups])
        connectors: PolicyConnectors = rows.connectors
        try:
            obs = connectors.prepare_observations(
                slots, [x for group in groups for x in group.observations]
            )
        except (ValueError, TypeError, KeyError, IndexError):
            observed_agents = [
                (group.sub_env, group.agents, group.observations) for group in groups
            ]
            raise_for_bad_observation(self._envs, observed_agents)
            raise
        rewards = None if rewards_by_slot is None else rewards_by_slot[slots]
        arrays, rewards = connectors.transform_observations(obs, slots, rewards)
        new_observations = split_batch(unflatten(rows.policy.observation_space, arrays))
        start = 0
        for group in groups:
            stop = start + len(group.observations)
            if group.ended_unroll_id is not None and group.observations:
                rows.final_observations[group.ended_unroll_id] = [
                    leaf[start:stop].copy() for leaf in arrays
                ]
            group.observations[:] = new_observations[start:stop]
            start = stop
        return slots, rewards

    def get_metrics(self, episode: MultiAgentEpisode) -> dict[str, Any]:
        """Returns the connector times of the policies that act in an episode, by id."""
        if not self.connected_rows:
            return {}
        ids = {episode.policy_for(agent) for agent in episode.slot_by_agent}
        active_rows = [rows for rows in self.connected_rows if rows.policy_id in ids]
        return {rows.policy_id: rows.policy.get_connector_metrics() for rows in active_rows}


def raise_for_bad_observation(
    envs: MultiAgentEnvAdapter,
    observed_agents: Iterable[tuple[SubEnvState, Sequence[Any], Sequence[Any]]],
) -> None:
    """Raises an `EnvError` about the first observation that is not of its space, if there is one.

    Args:
        envs: the environments.
        observed_agents: sub-environments, with their agents and these agents' observations.
    """
    for sub_env, agents, observations in observed_agents:
        source = f"`reset` or `step` of {envs.supervisor.describe_env(sub_env.index).lower()}"
        check_observations(dict(zip(agents, observations, strict=False)), sub_env.episode, source)


def check_observations(obs: Mapping[Any, Any], episode: MultiAgentEpisode, source: str) -> None:
    """Checks the observations of one sub-environment, as they are before connectors.

    Args:
        obs: by agent id.
        episode: maps agents to policies.
        source: names the source of the observations in messages.
    """
    for agent, agent_obs in obs.items():
        if agent == ALL:
            raise EnvError(f"{source} gave an observation of agent {agent!r}, which does not act.")
        policy_id = episode.policy_for(agent)
        policy = episode.policies[policy_id]
        pipeline = policy.agent_connectors
        if pipeline is None or pipeline.is_connected:  # else the first agent sets its space
            space = policy.observation_space if pipeline is None else pipeline.space
            description = f"observation of agent {agent!r} that {source} gave policy {policy_id!r}"
            check_observation(space, agent_obs, description)
