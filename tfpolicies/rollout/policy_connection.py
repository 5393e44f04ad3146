"""Connects one policy's connectors to multi-agent environments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies.connectors import (
    ActionConnectorPipeline,
    ActionStep,
    AgentConnectorPipeline,
    AgentStep,
)
from tfpolicies.envs.repairs import are_sound, unsound
from tfpolicies.errors import ConfigError, ObservationError, SpaceError
from tfpolicies.models.spaces import batch_leaves, leaves, nest
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.multi_agent_rows import PolicyRows, Seats, Stacker, Table
from tfpolicies.type_aliases import Structure

Pipelines = tuple[AgentConnectorPipeline | None, ActionConnectorPipeline | None]
NO_PIPELINES: Pipelines = (None, None)


def pipelines_of(policy: Policy) -> Pipelines:
    """Returns the pipelines of a policy; `NO_PIPELINES` if both are empty."""
    agent, action = policy.agent_connectors, policy.action_connectors
    return (agent, action) if agent or action else NO_PIPELINES


def has_others(policy: Policy, held: Pipelines) -> bool:
    """Returns whether a policy has other pipelines than before."""
    return any(one is not other for one, other in zip(pipelines_of(policy), held, strict=True))


class Connection:
    """The connectors of one policy, applied to the agents of all sub-environments.

    Args:
        rows: of the policy, which has connectors.
        slots: of all agents.
        get_space: `f(env_id, agent)`, the observation space of an agent; None if unknown.

    Attributes:
        pipelines: the policy's connectors at the time it started to act.
    """

    def __init__(
        self,
        rows: PolicyRows,
        seats: Seats,
        space_of: Callable[[int, Any], spaces.Space[Any] | None],
    ) -> None:
        self.pipelines = pipelines_of(rows.policy)
        self._agent, self._action = self.pipelines
        self._stacker: Any = None  # of environments' observations; set at the first agent
        self._rows = rows
        self._seats = seats
        self._space_of = space_of
        self._admitted: spaces.Space[Any] | None = None  # the space of the agent added last
        # By slot: the environment, and the leaves of its last observation.
        self._table = Table({"env_id": ((), np.int64)})
        self._last: list[str] = []  # the names of these leaves

    # -- agents -------------------------------------------------------------------------------

    def admit(self, seat: int, env_id: int, agent: Hashable) -> None:
        """Records the environment of an agent that got a slot.

        Raises:
            ConfigError: if the connectors do not accept the agent's observations.
        """
        space = self._space_of(env_id, agent)
        if self._stacker is None or space is not self._admitted:
            self._check(agent, space)
            self._admitted = space
        if seat >= self._table.used:
            self._table.append(seat + 1 - self._table.used)
        self._table.columns["env_id"][seat] = env_id

    def _check(self, agent: Hashable, space: spaces.Space[Any] | None) -> None:
        """Checks that the pipeline takes the agent's observations and gives the policy's."""
        policy = self._rows.policy
        if self._agent is None:
            self._agent = AgentConnectorPipeline()
            self._agent.connect(policy.observation_space)
        pipeline = self._agent
        given: Any = space
        if space is None:
            given = pipeline.space if pipeline.is_connected else policy.observation_space
        try:
            if not pipeline.is_connected:
                pipeline.connect(given)
            seen = pipeline.output_space(pipeline.space)
            pairs = (given, pipeline.space), (seen, policy.observation_space)
            fits, reason = all(_form(one) == _form(other) for one, other in pairs), ""
        except SpaceError as error:
            fits, seen, reason = False, None, f" {error}"
        if not fits:
            told = pipeline.space if pipeline.is_connected else "anything"
            raise ConfigError(
                f"Policy {self._rows.policy_id!r} cannot act for agent {agent!r}: the environment "
                f"gives the agent {given}, but the policy's {pipeline} takes {told}, returns "
                f"{seen}, and the policy acts on {policy.observation_space}.{reason} Map the "
                "agent to another policy, or give this one other `agent_connectors` or the "
                "agent's observation_space in its PolicySpec."
            )
        if self._action is not None and not self._action.is_connected:
            self._action.connect(policy.action_space)
        if self._stacker is None:
            self._stacker = Stacker(pipeline.space)
            kinds = {leaf.name("obs"): (leaf.shape, leaf.dtype) for leaf in self._stacker.leaves}
            self._table.add_columns(kinds)
            self._last = list(kinds)

    def env_ids(self, seats: np.ndarray) -> np.ndarray:
        """Returns the environment of each slot, int64 `[K]`."""
        return self._table["env_id"].take(seats)

    def reset(self, env_ids: np.ndarray) -> None:
        """Resets the connectors for environments, int64 `[K]`, whose episodes ended."""
        for pipeline in self.pipelines:
            if pipeline is not None:
                pipeline.reset(env_ids)

    # -- steps --------------------------------------------------------------------------------

    def take(self, seats: np.ndarray, observed: Sequence[Any]) -> Any:
        """Returns the connectors' input: a batch nested like the environment's space.

        Args:
            slots: int64 `[K]`. The last ones, beyond `observations`, belong to agents that are done
                without a last observation: their rows repeat the previous observation.
            observations: the single observations of the first slots.

        Raises:
            ValueError, TypeError, KeyError, IndexError: if one is not of the space, or not finite.
        """
        taken = self._stacker.stacked(observed)
        for name, rows in zip(self._last, taken, strict=True):
            self._table[name][seats[: len(observed)]] = rows
        return nest(self._agent.space, [self._table[name][seats] for name in self._last])  # type: ignore[union-attr]

    def see(
        self, obs: Structure, seats: np.ndarray, rewards: np.ndarray | None
    ) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Returns the policy's input: leaves `[K, ...]`, and rewards float64 `[K]` if given.

        Args:
            obs: the result of `take`.
            slots: of the rows, int64 `[K]`.
            rewards: float64 `[K]`; None if there are none yet.

        Raises:
            ObservationError: if the connectors return values that are not of the policy's space, or
                not finite.
        """
        pipeline: Any = self._agent
        agents = self._seats.columns["agent_index"][seats]
        step = pipeline(AgentStep(obs, self.env_ids(seats), rewards, agents))
        whose = f"the connectors of policy {self._rows.policy_id!r}"
        stacker = self._rows.stacker
        arrays = batch_leaves(stacker.leaves, step.obs, f"the output of {whose}")
        for leaf, array in zip(stacker.leaves, arrays, strict=True):
            problem = None if stacker.is_sound(leaf, array) else unsound(leaf.space)
            if problem is not None:
                raise ObservationError(
                    f"{leaf.name('obs')} from {whose} {problem}. Correct {pipeline}."
                )
        if rewards is None or step.rewards is None:
            return arrays, rewards
        found = np.asarray(step.rewards, np.float64)
        if not are_sound(found):
            raise ObservationError(
                f"Rewards from {whose} must be {len(rewards)} finite numbers, but are "
                f"{step.rewards!r:.200}. Correct {pipeline}."
            )
        return arrays, found

    def act(self, actions: Structure, seats: np.ndarray) -> Any:
        """Returns the environments' actions for a policy's actions `[K, ...]`, nested alike."""
        if not self._action:
            return actions
        agents = self._seats.columns["agent_index"][seats]
        return self._action(ActionStep(actions, self.env_ids(seats), agents)).actions


def _form(space: gym.Space[Any]) -> list[tuple[Any, ...]]:
    """Returns the properties that two spaces must share to exchange observations."""
    return [(leaf.path, leaf.shape, leaf.dtype) for leaf in leaves(space)]
