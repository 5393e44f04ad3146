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

from tfpolicies.envs.multi_agent_env import ALL
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.repairs import check_observation
from tfpolicies.envs.vector import single_rows
from tfpolicies.errors import EnvError
from tfpolicies.models.spaces import nest
from tfpolicies.rollout.fitting_spaces import space_of
from tfpolicies.rollout.multi_agent_episode import Copy, MultiAgentEpisode
from tfpolicies.rollout.multi_agent_ledger import Ledger
from tfpolicies.rollout.multi_agent_rows import PolicyRows
from tfpolicies.rollout.policy_connection import (
    NO_PIPELINES,
    Connection,
    has_others,
    pipelines_of,
)


class _Group(NamedTuple):
    """Agents of one sub-environment and policy with an observation, or one that is done."""

    copy: Copy
    agents: Sequence[Any]
    seats: np.ndarray  # int64 [K]
    observed: list[Any]  # K observations, which connectors replace in place; or none
    ended: int | None = None  # the unroll id of an agent that is done


class Connections:
    """The connectors of all policies in a sampler.

    Args:
        envs: the environments.
        transitions: the transition table, with the slots and the policies' rows.
        has_env_spaces: whether agents get the environment's own observations.

    Attributes:
        connected_rows: the rows of policies with connectors; if there are none, `see` need not be
            called.
    """

    def __init__(
        self, envs: MultiAgentEnvironments, ledger: Ledger, *, space_is_known: bool
    ) -> None:
        self.connected: list[PolicyRows] = []
        self._envs = envs
        self._ledger = ledger
        self._space_is_known = space_is_known
        self._done: list[tuple[PolicyRows, _Group]] = []  # in the current step

    def connect(self, rows: PolicyRows) -> None:
        """Adds the connectors of a policy, if it has any, to its rows."""
        if pipelines_of(rows.policy) is NO_PIPELINES:
            return
        rows.connection = Connection(rows, self._ledger.seats, self._space_of)
        rows.connection.reset(np.arange(self._envs.num_envs))
        self.connected.append(rows)

    def is_outdated(self, rows: PolicyRows) -> bool:
        """Returns whether a policy has other connectors now than when it started to act."""
        held = NO_PIPELINES if rows.connection is None else rows.connection.pipelines
        return has_others(rows.policy, held)

    def disconnect(self, rows: PolicyRows) -> None:
        """Removes the rows of a policy that no longer exists."""
        self.connected = [each for each in self.connected if each is not rows]

    def _space_of(self, env_id: int, agent: Hashable) -> spaces.Space[Any] | None:
        env = self._envs.envs[env_id]
        return space_of(env, "observation_space", agent) if self._space_is_known else None

    # -- a step -------------------------------------------------------------------------------

    def end(
        self, copy: Copy, rows: PolicyRows, agent: Hashable, unroll: int, observed: tuple[Any, ...]
    ) -> None:
        """Records that an agent is done; `observations` has its last observation, if it has one."""
        seats = np.array([copy.episode.seat_of[agent]])
        self._done.append((rows, _Group(copy, (agent,), seats, list(observed), unroll)))

    def begin(self, copies: Sequence[Copy]) -> None:
        """Resets connectors for new episodes and sends their first observations through.

        Raises:
            EnvError: if an observation is not of the space, or not finite; it names the agent.
            ObservationError: if connectors return values that their policy does not accept.
        """
        if not (self.connected and copies):
            return
        env_ids = np.array([copy.index for copy in copies])
        for rows in self.connected:
            rows.connection.reset(env_ids)
        for rows, groups in self._groups(copies).items():
            self._send(rows, groups)

    def see(self, copies: Sequence[Copy]) -> None:
        """Sends the observations and rewards of a step through the connectors.

        Raises:
            EnvError, ObservationError: see `begin`.
        """
        columns = self._ledger.seats.columns
        for rows, groups in self._groups(copies).items():
            seats, rewards = self._send(rows, groups, columns["earned"])
            more = rewards - columns["earned"][seats]
            if more.any():
                columns["earned"][seats] = rewards
                columns["total"][seats] += more
                by_env = np.bincount(rows.connection.env_ids(seats), more, self._envs.num_envs)
                for copy in copies:
                    copy.episode.total_reward += float(by_env[copy.index])

    def _groups(self, copies: Sequence[Copy]) -> dict[PolicyRows, list[_Group]]:
        """Returns the agents with observations by policy, then those that are done without one."""
        found: dict[PolicyRows, list[_Group]] = {}
        for copy in copies:
            for part, observed in copy.pending:
                if part.rows.connection is not None:
                    group = _Group(copy, part.agents, part.seats, observed)
                    found.setdefault(part.rows, []).append(group)
        done, self._done = self._done, []
        for rows, group in sorted(done, key=lambda pair: not pair[1].observed):
            if group.copy in copies:  # the others failed
                found.setdefault(rows, []).append(group)
        return found

    def _send(
        self, rows: PolicyRows, groups: Sequence[_Group], earned: np.ndarray | None = None
    ) -> tuple[np.ndarray, Any]:
        """Sends observations through the connectors, and replaces them by the result.

        Args:
            rows: of the agents' policy.
            groups: the agents.
            rewards_by_slot: rewards by slot; None if there are none yet.

        Returns:
            The slots of all agents, int64 `[K]`, and their rewards, float64 `[K]` or None.
        """
        seats = np.concatenate([group.seats for group in groups])
        connection: Connection = rows.connection
        try:
            obs = connection.take(seats, [x for group in groups for x in group.observed])
        except (ValueError, TypeError, KeyError, IndexError):
            waiting = [(group.copy, group.agents, group.observed) for group in groups]
            explain_observations(self._envs, waiting)
            raise
        rewards = None if earned is None else earned[seats]
        arrays, rewards = connection.see(obs, seats, rewards)
        seen = single_rows(nest(rows.policy.observation_space, arrays))
        start = 0
        for group in groups:
            stop = start + len(group.observed)
            if group.ended is not None and group.observed:
                rows.finals[group.ended] = [leaf[start:stop].copy() for leaf in arrays]
            group.observed[:] = seen[start:stop]
            start = stop
        return seats, rewards

    def metrics(self, episode: MultiAgentEpisode) -> dict[str, Any]:
        """Returns the connector times of the policies that act in an episode, by id."""
        if not self.connected:
            return {}
        ids = {episode.policy_for(agent) for agent in episode.seat_of}
        playing = [rows for rows in self.connected if rows.policy_id in ids]
        return {rows.policy_id: rows.policy.get_connector_metrics() for rows in playing}


def explain_observations(
    envs: MultiAgentEnvironments, waiting: Iterable[tuple[Copy, Sequence[Any], Sequence[Any]]]
) -> None:
    """Raises an `EnvError` about the first observation that is not of its space, if there is one.

    Args:
        envs: the environments.
        observed_agents: sub-environments, with their agents and these agents' observations.
    """
    for copy, agents, observed in waiting:
        what = f"`reset` or `step` of {envs.repairs.name(copy.index).lower()}"
        check_observations(dict(zip(agents, observed, strict=False)), copy.episode, what)


def check_observations(obs: Mapping[Any, Any], episode: MultiAgentEpisode, what: str) -> None:
    """Checks the observations of one sub-environment, as they are before connectors.

    Args:
        obs: by agent id.
        episode: maps agents to policies.
        source: names the source of the observations in messages.

    Raises:
        EnvError: if one is of "__all__", not of the space of its policy's input, or not finite.
    """
    for agent, each in obs.items():
        if agent == ALL:
            raise EnvError(f"{what} gave an observation of agent {agent!r}, which does not act.")
        policy_id = episode.policy_for(agent)
        policy = episode.policies[policy_id]
        pipeline = policy.agent_connectors
        if pipeline is None or pipeline.is_connected:  # else the first agent sets its space
            space = policy.observation_space if pipeline is None else pipeline.space
            whose = f"observation of agent {agent!r} that {what} gave policy {policy_id!r}"
            check_observation(space, each, whose)
