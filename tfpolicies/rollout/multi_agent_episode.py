"""Multi-agent episodes as callbacks see them, and their state in the sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.config.multi_agent import default_policy_mapping
from tfpolicies.envs.multi_agent_env import ALL
from tfpolicies.errors import EnvError, UnknownPolicyError, suggest_similar_names
from tfpolicies.rollout.episode import SINGLE_AGENT, Episode, RolloutMetrics, add_callback_metrics
from tfpolicies.rollout.multi_agent_tables import NO_AGENT, AgentSlots, PolicyGroup, PolicyRows

_MAX_CACHED_GROUPS = 256


@dataclass(eq=False)
class MultiAgentEpisode(Episode):
    """One episode of one multi-agent environment.

    An agent is mapped to a policy once, with the mapping function at the time the episode was
    created. If that policy was removed since then, the present mapping function is used.
    """

    mapping_fn: Any = None
    worker_policies: Any = None  # have the present mapping function
    policies: Mapping[str, Any] = field(default_factory=dict)
    slot_by_agent: dict[Any, int] = field(default_factory=dict)
    slots: Any = None  # the slots of all agents
    check_agent: Any = None  # f(episode, agent, policy_id), raises if their spaces are incompatible
    _policy_ids: dict[Any, str] = field(default_factory=dict)
    _rewards: dict[tuple[Any, str], float] | None = None

    @property
    def agent_rewards(self) -> dict[tuple[Any, str], float]:
        if self._rewards is not None:
            return dict(self._rewards)
        total, ids = self.slots.columns["total"], self._policy_ids
        return {
            (agent, ids[agent]): float(total[slot]) for agent, slot in self.slot_by_agent.items()
        }

    def policy_for(self, agent_id: Hashable = SINGLE_AGENT) -> str:
        """Returns the id of the policy that acts for an agent in this episode.

        Raises:
            UnknownPolicyError: if the mapping function names no policy that is there.
            SpaceError: if the policy's spaces do not fit the agent's.
        """
        if agent_id not in self._policy_ids:
            policy_id = self._map_agent(agent_id)
            self.check_agent(self, agent_id, policy_id)
            self._policy_ids[agent_id] = policy_id
        return self._policy_ids[agent_id]

    def _map_agent(self, agent_id: Hashable) -> str:
        policy_id = None
        current_fn = self.worker_policies.policy_mapping_fn
        for mapping_fn in (self.mapping_fn, current_fn):
            policy_id = mapping_fn(agent_id, self, worker=self.worker)
            if isinstance(policy_id, str) and policy_id in self.policies:
                return policy_id
        policy_ids = sorted(map(str, self.policies))
        if current_fn is default_policy_mapping:
            raise UnknownPolicyError(
                f"There is no policy_mapping_fn that maps agent {agent_id!r} to one of the "
                f"policies {policy_ids}: set multi_agent(policy_mapping_fn=...), a function "
                "(agent_id, episode, worker, **kwargs) -> policy_id."
            )
        raise UnknownPolicyError(
            f"policy_mapping_fn returned invalid policy id {policy_id!r} for agent {agent_id!r}; "
            f"there are {policy_ids}.{suggest_similar_names(str(policy_id), policy_ids)} Add the "
            "policy, or correct the function."
        )

    def get_agents(self) -> list[Any]:
        """Returns the ids of the agents that have appeared so far, in order."""
        return list(self._policy_ids)

    def set_policies(self, policy_ids: Mapping[Any, str]) -> None:
        """Restores the policy of each agent from a checkpoint."""
        self._policy_ids.update(policy_ids)

    def is_excluded(self, agent: Hashable) -> bool:
        """Returns whether the agent's last info excludes its trajectory from learning."""
        info = self.last_infos.get(agent)
        return isinstance(info, Mapping) and not info.get("training_enabled", True)

    def fix_rewards(self, rewards: Mapping[tuple[Any, str], float] | None = None) -> None:
        """Fixes the rewards of agents at the end of the episode: the given or the present ones."""
        self._rewards = self.agent_rewards if rewards is None else dict(rewards)

    def make_metrics(
        self, perf_stats: Mapping[str, float], connector_metrics: Mapping[str, Any]
    ) -> RolloutMetrics:
        """Returns the metrics of the episode, with the times of sampling and connectors."""
        metrics = RolloutMetrics(
            self.length,
            self.total_reward,
            self.agent_rewards,
            perf_stats=perf_stats,
            connector_metrics=connector_metrics,
        )
        return add_callback_metrics(metrics, self)


class AgentGroups(NamedTuple):
    """The agents that have an observation in a step, grouped by policy."""

    slots: np.ndarray  # int64 [K], in the order of the observations
    groups: tuple[PolicyGroup, ...]  # by policy


class SubEnvState:
    """The running episode of one sub-environment, with pending observations and actions.

    Args:
        index: of the sub-environment.
        slots: of all agents.
        get_rows: returns the rows of a policy by its id.

    Attributes:
        episode: the running episode.
        done: the agents that are done in it.
        pending: the agents that act next, by policy, with their observations.
        moves: the actions for the next step, by agent id.
        group_agents: cached `_cast`.
        get_slots: cached `_get_slots`.
    """

    def __init__(
        self, index: int, slots: AgentSlots, get_rows: Callable[[str], PolicyRows]
    ) -> None:
        self.index = index
        self._slots = slots
        self.get_rows = get_rows
        self.episode = MultiAgentEpisode(0, index, None)
        self.group_agents = lru_cache(_MAX_CACHED_GROUPS)(self._group_agents)
        self.get_slots = lru_cache(_MAX_CACHED_GROUPS)(self._get_slots)
        self._clear()

    def _clear(self) -> None:
        self.done: set[Any] = set()
        self.pending: list[tuple[PolicyGroup, list[Any]]] = []
        self.agent_actions: dict[Any, Any] = {}
        self.group_agents.cache_clear()
        self.get_slots.cache_clear()

    def start_episode(self, episode: MultiAgentEpisode) -> None:
        """Starts a new episode and frees the slots of the previous one."""
        self._slots.free_slots.extend(self.episode.slot_by_agent.values())
        self.episode = episode
        self._clear()

    def _group_agents(self, agents: tuple[Any, ...]) -> AgentGroups:
        """Groups agents by policy; new agents get a slot and a policy."""
        by_policy: dict[str, list[Any]] = {}
        slot_by_agent = self.episode.slot_by_agent
        for agent in agents:
            if agent in self.done:
                raise EnvError(
                    f"Environment {self.index} returned an observation of agent {agent!r}, which "
                    "was done before in this episode; an agent has a single trajectory in an "
                    "episode. Omit the observation, or let the agent return under another id."
                )
            if agent not in slot_by_agent:
                self._add_agent(agent)
            by_policy.setdefault(self.episode.policy_for(agent), []).append(agent)
        groups = [
            PolicyGroup(
                self.get_rows(policy_id), tuple(policy_agents), self._get_slots(policy_agents)
            )
            for policy_id, policy_agents in by_policy.items()
        ]
        return AgentGroups(self._get_slots(agents), tuple(groups))

    def _add_agent(self, agent: Hashable) -> None:
        if agent == ALL:
            raise EnvError(
                f"Environment {self.index} returned an observation of '__all__', which is not an "
                "agent id."
            )
        rows = self.get_rows(self.episode.policy_for(agent))
        slot = self._slots.assign(self.episode, agent, len(self.episode.slot_by_agent))
        if rows.connectors is not None:
            rows.connectors.add_agent(slot, self.index, agent)
        self.episode.slot_by_agent[agent] = slot
        if rows.recurrent_state.is_needed:
            if slot >= rows.recurrent_state.num_rows:
                rows.recurrent_state.grow(self._slots.capacity)
            rows.recurrent_state.reset([slot])
        self.get_slots.cache_clear()

    def _get_slots(self, agents: Sequence[Any]) -> np.ndarray:
        slot_by_agent = self.episode.slot_by_agent
        return np.array([slot_by_agent.get(agent, NO_AGENT) for agent in agents], np.int64)

    def set_pending(self, groups: AgentGroups, obs: Mapping[Any, Any]) -> None:
        """Stores the agents that act next and their observations."""
        self.pending = [
            (group, list(map(obs.__getitem__, group.agents))) for group in groups.groups
        ]

    def mark_done(self, agents: Sequence[Any]) -> None:
        if agents:
            self.done.update(agents)
            self.group_agents.cache_clear()

    def get_active_agents(self) -> list[Any]:
        return [agent for agent in self.episode.slot_by_agent if agent not in self.done]

    def uses_policies(self, policy_ids: Collection[str]) -> bool:
        episode = self.episode
        return any(episode.policy_for(agent) in policy_ids for agent in episode.get_agents())
