"""The connectors of policies, where environments have several agents.

Each policy has its own. In every step what its agents of all environments observed goes through
them in one call, and so do the actions of its agents. What stands where:

* An environment's observations pass `observation_fn`, then the policy's agent connectors. What
  comes out is what the policy acts on and what batches hold, last observations of trajectories
  included. Filters and action masks belong to the policy, so they come after connectors.
* Rewards add up until the agent's next observation and go through the agent connectors with it; if
  there is none before the agent is done, its last one stands in. Metrics, previous rewards that a
  model reads, and batches have what comes out; `clip_rewards` and `reward_filter` come later, and
  change batches alone. Rewards of who never observed anything are counted as they are.
* Actions are mapped to the environment's bounds by the policy (`normalize_actions`,
  `clip_actions`), then pass its action connectors. Batches have them as they were before both.

Connectors know an agent by its environment and its number in the episode. They are reset when an
episode of an environment ends, in whatever way; an agent that left does not come back under its
number before. An agent whose observations its policy's connectors cannot take is refused when it is
mapped to the policy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from tfpolicies.envs.multi_agent_env import ALL
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.repairs import check_observation
from tfpolicies.envs.vector import single_rows
from tfpolicies.errors import EnvError
from tfpolicies.models.spaces import nest
from tfpolicies.rollout.multi_agent_episode import Copy, MultiAgentEpisode
from tfpolicies.rollout.multi_agent_ledger import Ledger
from tfpolicies.rollout.multi_agent_rows import PolicyRows
from tfpolicies.rollout.policy_connection import (
    NO_PIPELINES,
    Connection,
    has_others,
    pipelines_of,
)


class _Ending(NamedTuple):
    """An agent that is done, and its last observation, if it has one."""

    copy: Copy
    rows: PolicyRows
    agent: Any
    seat: int
    unroll: int
    observed: tuple[Any, ...]  # one, or none


@dataclass(eq=False)
class _Crowd:
    """The agents of one policy that observed something, or are done."""

    pending: list[tuple[Copy, int]] = field(default_factory=list)  # places in `copy.pending`
    seen: list[_Ending] = field(default_factory=list)
    unseen: list[_Ending] = field(default_factory=list)

    def seats(self) -> np.ndarray:
        """Returns the seats of who observed something, int64 `[K]`."""
        parts = [copy.pending[place][0].seats for copy, place in self.pending]
        return np.concatenate([*parts, _seats(self.seen)])

    def observations(self) -> list[Any]:
        """Returns what they observed."""
        waiting = [x for copy, place in self.pending for x in copy.pending[place][1]]
        return waiting + [ending.observed[0] for ending in self.seen]


class Connections:
    """The connectors of all policies that act in a sampler.

    Args:
        envs: the environments.
        ledger: with the seats and the policies' rows.
        space_is_known: whether agents observe what the environment's spaces say.

    Attributes:
        connected: the rows of policies with connectors; nothing else here is to be called where
            there are none.
    """

    def __init__(
        self, envs: MultiAgentEnvironments, ledger: Ledger, *, space_is_known: bool
    ) -> None:
        self.connected: list[PolicyRows] = []
        self._envs = envs
        self._ledger = ledger
        self._space_is_known = space_is_known
        self._endings: list[_Ending] = []  # of the present step

    def connect(self, rows: PolicyRows) -> None:
        """Gives a policy's rows their connection, if it has connectors."""
        if pipelines_of(rows.policy) is NO_PIPELINES:
            return
        rows.connection = Connection(rows, self._ledger.seats, self._space_of)
        rows.connection.reset(np.arange(self._envs.num_envs))
        self.connected.append(rows)

    def is_outdated(self, rows: PolicyRows) -> bool:
        """Whether a policy has other connectors now than when it began to act."""
        held = NO_PIPELINES if rows.connection is None else rows.connection.pipelines
        return has_others(rows.policy, held)

    def disconnect(self, rows: PolicyRows) -> None:
        """Forgets the rows of a policy that is gone."""
        self.connected = [each for each in self.connected if each is not rows]

    def _space_of(self, env_id: int, agent: Any) -> spaces.Space | None:
        if not self._space_is_known:
            return None
        try:
            return self._envs.envs[env_id].observation_space_of(agent)
        except EnvError:
            return None

    # -- a step -------------------------------------------------------------------------------

    def end(
        self, copy: Copy, rows: PolicyRows, agent: Any, unroll: int, observed: tuple[Any, ...]
    ) -> None:
        """Takes down that an agent is done; `observed` is its last observation, if it has one."""
        seat = copy.episode.seat_of[agent]
        self._endings.append(_Ending(copy, rows, agent, seat, unroll, observed))

    def begin(self, copies: Sequence[Copy]) -> None:
        """Sends the first observations of new episodes through; connectors forget those before.

        Raises:
            EnvError: if an observation is not of the space, or not finite; it names the agent.
            ObservationError: if connectors give what their policy cannot take.
        """
        env_ids = np.array([copy.index for copy in copies])
        for rows in self.connected:
            rows.connection.reset(env_ids)
        for rows, crowd in self._crowds(copies).items():
            self._send(rows, crowd)

    def see(self, copies: Sequence[Copy]) -> None:
        """Sends what copies gave in a step through: observations, and what agents earned by then.

        Raises:
            EnvError, ObservationError: see `begin`.
        """
        columns = self._ledger.seats.columns
        for rows, crowd in self._crowds(copies).items():
            seats, rewards = self._send(rows, crowd, columns["earned"])
            more = rewards - columns["earned"][seats]
            if more.any():
                columns["earned"][seats] = rewards
                columns["total"][seats] += more
                by_env = np.bincount(rows.connection.env_ids(seats), more, self._envs.num_envs)
                for copy in copies:
                    copy.episode.total_reward += float(by_env[copy.index])

    def _crowds(self, copies: Sequence[Copy]) -> dict[PolicyRows, _Crowd]:
        """Returns by policy who observed something in copies, or is done; endings are taken."""
        found: dict[PolicyRows, _Crowd] = {}
        for copy in copies:
            for place, (part, _) in enumerate(copy.pending):
                if part.rows.connection is not None:
                    found.setdefault(part.rows, _Crowd()).pending.append((copy, place))
        endings, self._endings = self._endings, []
        for ending in endings:
            if ending.copy in copies:  # others broke
                crowd = found.setdefault(ending.rows, _Crowd())
                (crowd.seen if ending.observed else crowd.unseen).append(ending)
        return found

    def _send(
        self, rows: PolicyRows, crowd: _Crowd, earned: np.ndarray | None = None
    ) -> tuple[np.ndarray, Any]:
        """Sends what a crowd observed through, to where it waits.

        Args:
            rows: of the crowd's policy.
            crowd: who observed something, or is done.
            earned: by seat, what goes along as rewards; None where there are none yet.

        Returns:
            The seats of all, int64 `[K]`, and their rewards, float64 `[K]` or None.
        """
        seats, unseen = crowd.seats(), _seats(crowd.unseen)
        connection: Connection = rows.connection
        try:
            obs = connection.take(seats, crowd.observations(), unseen)
        except (ValueError, TypeError, KeyError, IndexError):
            self._explain(crowd)
            raise
        everybody = np.concatenate([seats, unseen]) if len(unseen) else seats
        rewards = None if earned is None else earned[everybody]
        arrays, rewards = connection.see(obs, everybody, rewards)
        single = single_rows(nest(rows.policy.observation_space, arrays))
        start = 0
        for copy, place in crowd.pending:
            part, _ = copy.pending[place]
            stop = start + len(part.agents)
            copy.pending[place] = (part, single[start:stop])
            start = stop
        for i, ending in enumerate(crowd.seen, start):
            rows.finals[ending.unroll] = [leaf[i : i + 1].copy() for leaf in arrays]
        return everybody, rewards

    def _explain(self, crowd: _Crowd) -> None:
        """Raises an `EnvError` about the first observation that is not of its space."""
        told = [
            (copy, dict(zip(copy.pending[place][0].agents, copy.pending[place][1], strict=True)))
            for copy, place in crowd.pending
        ]
        told += [(ending.copy, {ending.agent: ending.observed[0]}) for ending in crowd.seen]
        for copy, obs in told:
            what = f"`reset` or `step` of {self._envs.repairs.name(copy.index).lower()}"
            check_observations(obs, copy.episode, (), what)

    def metrics(self, episode: MultiAgentEpisode) -> dict[str, Any]:
        """Returns the times of the connectors of the policies that play in an episode, by id."""
        ids = dict.fromkeys(episode.policy_for(agent) for agent in episode.seat_of)
        return {
            rows.policy_id: rows.policy.get_connector_metrics()
            for rows in self.connected
            if rows.policy_id in ids
        }


def check_observations(
    obs: Mapping[Any, Any], episode: MultiAgentEpisode, done: Collection[Any], what: str
) -> None:
    """Checks the observations of one copy one by one, as they are before connectors.

    Args:
        obs: by agent id.
        episode: says which policy acts for an agent.
        done: agents that act no more.
        what: gave them, for messages.

    Raises:
        EnvError: if one is of an agent that is done, or is not of the space that its policy is
            given, or is not finite.
    """
    for agent, each in obs.items():
        if agent in done or agent == ALL:
            raise EnvError(f"{what} gave an observation of agent {agent!r}, which does not act.")
        policy_id = episode.policy_for(agent)
        policy = episode.policies[policy_id]
        pipeline = policy.agent_connectors
        if pipeline is None or pipeline.is_connected:  # else its first agent tells the space
            space = policy.observation_space if pipeline is None else pipeline.space
            whose = f"observation of agent {agent!r} that {what} gave policy {policy_id!r}"
            check_observation(space, each, whose)


def _seats(endings: Sequence[_Ending]) -> np.ndarray:
    return np.array([ending.seat for ending in endings], np.int64)
