"""Episodes with several agents: as callbacks see them, and as the sampler follows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.config.multi_agent import default_policy_mapping
from tfpolicies.envs.multi_agent_env import ALL
from tfpolicies.errors import EnvError, UnknownPolicyError, near_matches
from tfpolicies.rollout.episode import SINGLE_AGENT, Episode, RolloutMetrics
from tfpolicies.rollout.multi_agent_rows import NOBODY, Part, PolicyRows, Seats

_MOST_CASTS = 256


@dataclass(eq=False)
class MultiAgentEpisode(Episode):
    """One episode of one multi-agent environment.

    Which policy acts for an agent is asked once, with the mapping function that was in force when
    the episode was created; if its policy was removed since then, with the present one.
    """

    mapping_fn: Callable[..., str] | None = None
    present_mapping_fn: Callable[..., str] | None = None
    policies: Mapping[str, Any] = field(default_factory=dict)
    seat_of: dict[Any, int] = field(default_factory=dict)
    seats: Seats | None = None
    admit: Callable[[MultiAgentEpisode, Any, str], None] | None = None
    _policy_ids: dict[Any, str] = field(default_factory=dict)
    _rewards: dict[tuple[Any, str], float] | None = None

    @property
    def agent_rewards(self) -> dict[tuple[Any, str], float]:
        """The sum of rewards by agent and policy."""
        if self._rewards is not None:
            return dict(self._rewards)
        total = self.seats.columns["total"] if self.seats is not None else ()
        return {
            (agent, self._policy_ids[agent]): float(total[seat])
            for agent, seat in self.seat_of.items()
        }

    def policy_for(self, agent_id: Any = SINGLE_AGENT) -> str:
        """Returns the id of the policy that acts for an agent in this episode.

        Raises:
            UnknownPolicyError: if the mapping function names no policy that is there.
            SpaceError: if the policy's spaces do not fit the agent's.
        """
        if agent_id not in self._policy_ids:
            policy_id = self._mapped(agent_id)
            if self.admit is not None:
                self.admit(self, agent_id, policy_id)
            self._policy_ids[agent_id] = policy_id
        return self._policy_ids[agent_id]

    def _mapped(self, agent_id: Any) -> str:
        policy_id = None
        for mapping_fn in (self.mapping_fn, self.present_mapping_fn):
            if mapping_fn is not None:
                policy_id = mapping_fn(agent_id, self, worker=self.worker)
                if isinstance(policy_id, str) and policy_id in self.policies:
                    return policy_id
        known = sorted(map(str, self.policies))
        if (self.present_mapping_fn or self.mapping_fn) is default_policy_mapping:
            raise UnknownPolicyError(
                f"Nothing says which of the policies {known} acts for agent {agent_id!r}: give "
                "multi_agent(policy_mapping_fn=...), a function (agent_id, episode, worker, "
                "**kwargs) -> policy_id."
            )
        raise UnknownPolicyError(
            f"policy_mapping_fn returned invalid policy id {policy_id!r} for agent {agent_id!r}; "
            f"there are {known}.{near_matches(str(policy_id), known)} Add the policy, or correct "
            "the function."
        )

    def get_agents(self) -> list[Any]:
        """Returns the ids of the agents seen so far, in the order of their appearance."""
        return list(self._policy_ids)

    def set_policies(self, policy_ids: Mapping[Any, str]) -> None:
        """Takes over which policy acts for which agent, as a checkpoint has it."""
        self._policy_ids.update(policy_ids)

    def close(self, rewards: Mapping[tuple[Any, str], float] | None = None) -> None:
        """Keeps the rewards of agents as they are when the episode ends, or those given."""
        self._rewards = self.agent_rewards if rewards is None else dict(rewards)

    def metrics(self, perf_stats: Mapping[str, float]) -> RolloutMetrics:
        """Returns what is reported of the episode, with the times of sampling."""
        return RolloutMetrics(
            self.length,
            self.total_reward,
            self.agent_rewards,
            self.custom_metrics,
            perf_stats,
            hist_data=self.hist_data,
            media=self.media,
        )


class Cast(NamedTuple):
    """The agents that have an observation in a step."""

    seats: np.ndarray  # int64 [K], in the order of the observations
    parts: tuple[Part, ...]  # by policy


class Copy:
    """One copy of the environment in the middle of an episode.

    Args:
        index: which copy it is.
        seats: of all agents.
        rows_of: returns the rows of a policy by its id.

    Attributes:
        episode: the running episode.
        done: the agents that act no more in it.
        pending: who acts next: parts of a cast, with their observations.
        moves: the actions for the next step, by agent id.
    """

    def __init__(self, index: int, seats: Seats, rows_of: Callable[[str], PolicyRows]) -> None:
        self.index = index
        self._seats = seats
        self.rows_of = rows_of
        self.episode = MultiAgentEpisode(0, index, None)
        self._start()

    def _start(self) -> None:
        self.done: set[Any] = set()
        self.pending: list[tuple[Part, Sequence[Any]]] = []
        self.moves: dict[Any, Any] = {}
        self._casts: dict[tuple[Any, ...], Cast] = {}
        self._known: dict[tuple[Any, ...], np.ndarray] = {}

    def begin(self, episode: MultiAgentEpisode) -> None:
        """Takes a new episode in the place of the one before, whose seats become free."""
        self._seats.free(list(self.episode.seat_of.values()))
        self.episode = episode
        self._start()

    def cast(self, agents: tuple[Any, ...]) -> Cast:
        """Returns the cast of these agents; those who are new get a seat and a policy.

        Raises:
            EnvError: if one of them was done before.
            UnknownPolicyError: if the mapping function names no policy that is there.
            ConfigError: if the connectors of a policy cannot take its agent's observations.
        """
        found = self._casts.get(agents)
        if found is None:
            if len(self._casts) >= _MOST_CASTS:
                self._casts.clear()
            found = self._casts[agents] = self._new_cast(agents)
        return found

    def _new_cast(self, agents: tuple[Any, ...]) -> Cast:
        by_policy: dict[str, list[Any]] = {}
        seat_of = self.episode.seat_of
        for agent in agents:
            if agent in self.done:
                raise EnvError(
                    f"Environment {self.index} gave an observation of agent {agent!r}, which was "
                    "done before in this episode; an agent has a single trajectory in an episode. "
                    "Leave it out, or let it come back under another id."
                )
            if agent not in seat_of:
                self._seat(agent)
            by_policy.setdefault(self.episode.policy_for(agent), []).append(agent)
        parts = [self._part(self.rows_of(p), tuple(named)) for p, named in by_policy.items()]
        return Cast(np.array([seat_of[agent] for agent in agents], np.int64), tuple(parts))

    def _seat(self, agent: Any) -> None:
        if agent == ALL:
            raise EnvError(
                f"Environment {self.index} gave an observation of '__all__', which is no agent id."
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
        self._known.clear()

    def _part(self, rows: PolicyRows, agents: tuple[Any, ...]) -> Part:
        seats = np.array([self.episode.seat_of[agent] for agent in agents], np.int64)
        picked = itemgetter(*agents) if len(agents) > 1 else _only(agents[0])
        return Part(rows, agents, seats, picked)

    def seats_of(self, agents: tuple[Any, ...]) -> np.ndarray:
        """Returns the seats of agents, `NOBODY` for those that never had an observation."""
        found = self._known.get(agents)
        if found is None:
            if len(self._known) >= _MOST_CASTS:
                self._known.clear()
            seat_of = self.episode.seat_of
            found = np.array([seat_of.get(agent, NOBODY) for agent in agents], np.int64)
            self._known[agents] = found
        return found

    def wait(self, cast: Cast, obs: Mapping[Any, Any]) -> None:
        """Remembers that a cast acts next, and on which observations."""
        self.pending = [(part, part.pick(obs)) for part in cast.parts]

    def leave(self, agents: Sequence[Any]) -> None:
        """Takes down that agents are done."""
        if agents:
            self.done.update(agents)
            self._casts.clear()

    def playing(self) -> list[Any]:
        """Returns the agents that had an observation and are not done."""
        return [agent for agent in self.episode.seat_of if agent not in self.done]

    def is_barred(self, agent: Any) -> bool:
        """Whether the agent's last info says that its trajectory is not to be learned from."""
        info = self.episode.last_infos.get(agent)
        return isinstance(info, Mapping) and not info.get("training_enabled", True)

    def is_played_by(self, policy_ids: Collection[str]) -> bool:
        """Whether one of these policies acts in the running episode."""
        episode = self.episode
        return any(episode.policy_for(agent) in policy_ids for agent in episode.get_agents())


def _only(agent: Any) -> Callable[[Mapping[Any, Any]], tuple[Any]]:
    return lambda obs: (obs[agent],)
