"""Multi-agent episodes as callbacks see them, and their state in the sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.config.multi_agent import default_policy_mapping
from tfpolicies.envs.multi_agent_env import ALL
from tfpolicies.errors import EnvError, UnknownPolicyError, near_matches
from tfpolicies.rollout.episode import SINGLE_AGENT, Episode, RolloutMetrics, with_notes
from tfpolicies.rollout.multi_agent_rows import NOBODY, Part, PolicyRows, Seats

_MOST_CASTS = 256


@dataclass(eq=False)
class MultiAgentEpisode(Episode):
    """One episode of one multi-agent environment.

    An agent is mapped to a policy once, with the mapping function at the time the episode was
    created. If that policy was removed since then, the present mapping function is used.
    """

    mapping_fn: Any = None
    worker_policies: Any = None  # have the present mapping function
    policies: Mapping[str, Any] = field(default_factory=dict)
    seat_of: dict[Any, int] = field(default_factory=dict)
    seats: Any = None  # the slots of all agents
    admit: Any = None  # f(episode, agent, policy_id), raises if their spaces are incompatible
    _policy_ids: dict[Any, str] = field(default_factory=dict)
    _rewards: dict[tuple[Any, str], float] | None = None

    @property
    def agent_rewards(self) -> dict[tuple[Any, str], float]:
        """The sum of rewards by agent and policy."""
        if self._rewards is not None:
            return dict(self._rewards)
        total, ids = self.seats.columns["total"], self._policy_ids
        return {(agent, ids[agent]): float(total[seat]) for agent, seat in self.seat_of.items()}

    def policy_for(self, agent_id: Hashable = SINGLE_AGENT) -> str:
        """Returns the id of the policy that acts for an agent in this episode.

        Raises:
            UnknownPolicyError: if the mapping function names no policy that is there.
            SpaceError: if the policy's spaces do not fit the agent's.
        """
        if agent_id not in self._policy_ids:
            policy_id = self._mapped(agent_id)
            self.admit(self, agent_id, policy_id)
            self._policy_ids[agent_id] = policy_id
        return self._policy_ids[agent_id]

    def _mapped(self, agent_id: Hashable) -> str:
        policy_id = None
        present = self.worker_policies.policy_mapping_fn
        for mapping_fn in (self.mapping_fn, present):
            policy_id = mapping_fn(agent_id, self, worker=self.worker)
            if isinstance(policy_id, str) and policy_id in self.policies:
                return policy_id
        known = sorted(map(str, self.policies))
        if present is default_policy_mapping:
            raise UnknownPolicyError(
                f"There is no policy_mapping_fn that maps agent {agent_id!r} to one of the "
                f"policies {known}: set multi_agent(policy_mapping_fn=...), a function (agent_id, "
                "episode, worker, **kwargs) -> policy_id."
            )
        raise UnknownPolicyError(
            f"policy_mapping_fn returned invalid policy id {policy_id!r} for agent {agent_id!r}; "
            f"there are {known}.{near_matches(str(policy_id), known)} Add the policy, or correct "
            "the function."
        )

    def get_agents(self) -> list[Any]:
        """Returns the ids of the agents that have appeared so far, in order."""
        return list(self._policy_ids)

    def set_policies(self, policy_ids: Mapping[Any, str]) -> None:
        """Restores the policy of each agent from a checkpoint."""
        self._policy_ids.update(policy_ids)

    def is_barred(self, agent: Hashable) -> bool:
        """Returns whether the agent's last info excludes its trajectory from learning."""
        info = self.last_infos.get(agent)
        return isinstance(info, Mapping) and not info.get("training_enabled", True)

    def close(self, rewards: Mapping[tuple[Any, str], float] | None = None) -> None:
        """Fixes the rewards of agents at the end of the episode: the given or the present ones."""
        self._rewards = self.agent_rewards if rewards is None else dict(rewards)

    def metrics(
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
        return with_notes(metrics, self)


class Cast(NamedTuple):
    """The agents that have an observation in a step, grouped by policy."""

    seats: np.ndarray  # int64 [K], in the order of the observations
    parts: tuple[Part, ...]  # by policy


class Copy:
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
        get_slots: cached `_seats_of`.
    """

    def __init__(self, index: int, seats: Seats, rows_of: Callable[[str], PolicyRows]) -> None:
        self.index = index
        self._seats = seats
        self.rows_of = rows_of
        self.episode = MultiAgentEpisode(0, index, None)
        self.cast = lru_cache(_MOST_CASTS)(self._cast)
        self.seats_of = lru_cache(_MOST_CASTS)(self._seats_of)
        self._start()

    def _start(self) -> None:
        self.done: set[Any] = set()
        self.pending: list[tuple[Part, list[Any]]] = []
        self.moves: dict[Any, Any] = {}
        self.cast.cache_clear()
        self.seats_of.cache_clear()

    def begin(self, episode: MultiAgentEpisode) -> None:
        """Starts a new episode and frees the slots of the previous one."""
        self._seats.free.extend(self.episode.seat_of.values())
        self.episode = episode
        self._start()

    def _cast(self, agents: tuple[Any, ...]) -> Cast:
        """Groups agents by policy; new agents get a slot and a policy."""
        by_policy: dict[str, list[Any]] = {}
        seat_of = self.episode.seat_of
        for agent in agents:
            if agent in self.done:
                raise EnvError(
                    f"Environment {self.index} returned an observation of agent {agent!r}, which "
                    "was done before in this episode; an agent has a single trajectory in an "
                    "episode. Omit the observation, or let the agent return under another id."
                )
            if agent not in seat_of:
                self._seat(agent)
            by_policy.setdefault(self.episode.policy_for(agent), []).append(agent)
        parts = [
            Part(self.rows_of(policy_id), tuple(named), self._seats_of(named))
            for policy_id, named in by_policy.items()
        ]
        return Cast(self._seats_of(agents), tuple(parts))

    def _seat(self, agent: Hashable) -> None:
        if agent == ALL:
            raise EnvError(
                f"Environment {self.index} returned an observation of '__all__', which is not an "
                "agent id."
            )
        rows = self.rows_of(self.episode.policy_for(agent))
        seat = self._seats.take(self.episode, agent, len(self.episode.seat_of))
        if rows.connection is not None:
            rows.connection.admit(seat, self.index, agent)
        self.episode.seat_of[agent] = seat
        if rows.memory.is_needed:
            if seat >= rows.memory.num_rows:
                rows.memory.grow(self._seats.capacity)
            rows.memory.forget([seat])
        self.seats_of.cache_clear()

    def _seats_of(self, agents: Sequence[Any]) -> np.ndarray:
        """Returns the slots of agents, `NOBODY` for agents that never had an observation."""
        seat_of = self.episode.seat_of
        return np.array([seat_of.get(agent, NOBODY) for agent in agents], np.int64)

    def wait(self, cast: Cast, obs: Mapping[Any, Any]) -> None:
        """Stores the agents that act next and their observations."""
        self.pending = [(part, list(map(obs.__getitem__, part.agents))) for part in cast.parts]

    def leave(self, agents: Sequence[Any]) -> None:
        """Marks agents as done."""
        if agents:
            self.done.update(agents)
            self.cast.cache_clear()

    def playing(self) -> list[Any]:
        """Returns the agents that had an observation and are not done."""
        return [agent for agent in self.episode.seat_of if agent not in self.done]

    def is_played_by(self, policy_ids: Collection[str]) -> bool:
        """Returns whether one of these policies acts in the running episode."""
        episode = self.episode
        return any(episode.policy_for(agent) in policy_ids for agent in episode.get_agents())
