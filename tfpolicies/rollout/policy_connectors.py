"""Connects one policy's connectors to multi-agent environments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies.base.type_aliases import Structure
from tfpolicies.connectors import (
    ActionConnectorPipeline,
    ActionStep,
    AgentConnectorPipeline,
    AgentStep,
)
from tfpolicies.envs.fault_tolerance import are_finite_numbers, describe_invalid_obs
from tfpolicies.errors import ConfigError, ObservationError, SpaceError
from tfpolicies.models.spaces import batch_leaves, leaves, unflatten
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.multi_agent_tables import (
    AgentSlots,
    ColumnTable,
    ObservationStacker,
    PolicyRows,
)

Pipelines = tuple[AgentConnectorPipeline | None, ActionConnectorPipeline | None]
NO_PIPELINES: Pipelines = (None, None)


def get_pipelines(policy: Policy) -> Pipelines:
    agent, action = policy.agent_connectors, policy.action_connectors
    return (agent, action) if agent or action else NO_PIPELINES


def has_new_pipelines(policy: Policy, previous: Pipelines) -> bool:
    return any(
        current is not old for current, old in zip(get_pipelines(policy), previous, strict=True)
    )


class PolicyConnectors:
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
        slots: AgentSlots,
        get_space: Callable[[int, Any], spaces.Space[Any] | None],
    ) -> None:
        self.pipelines = get_pipelines(rows.policy)
        self._agent_pipeline, self._action_pipeline = self.pipelines
        self._stacker: Any = None  # of environments' observations; set at the first agent
        self._rows = rows
        self._slots = slots
        self._get_space = get_space
        self._last_space: spaces.Space[Any] | None = None  # the space of the agent added last
        # By slot: the environment, and the leaves of its last observation.
        self._table = ColumnTable({"env_id": ((), np.int64)})
        self._leaf_names: list[str] = []  # the names of these leaves

    # -- agents -------------------------------------------------------------------------------

    def add_agent(self, slot: int, env_id: int, agent: Hashable) -> None:
        """Records the environment of an agent that got a slot.

        Raises:
            ConfigError: if the connectors do not accept the agent's observations.
        """
        space = self._get_space(env_id, agent)
        if self._stacker is None or space is not self._last_space:
            self._check(agent, space)
            self._last_space = space
        if slot >= self._table.used:
            self._table.append(slot + 1 - self._table.used)
        self._table.columns["env_id"][slot] = env_id

    def _check(self, agent: Hashable, space: spaces.Space[Any] | None) -> None:
        """Checks that the pipeline takes the agent's observations and gives the policy's."""
        policy = self._rows.policy
        if self._agent_pipeline is None:
            self._agent_pipeline = AgentConnectorPipeline()
            self._agent_pipeline.connect(policy.observation_space)
        pipeline = self._agent_pipeline
        env_space: Any = space
        if space is None:
            env_space = pipeline.space if pipeline.is_connected else policy.observation_space
        try:
            if not pipeline.is_connected:
                pipeline.connect(env_space)
            output_space = pipeline.output_space(pipeline.space)
            space_pairs = (env_space, pipeline.space), (output_space, policy.observation_space)
            fits, reason = (
                all(_get_layout(first) == _get_layout(second) for first, second in space_pairs),
                "",
            )
        except SpaceError as error:
            fits, output_space, reason = False, None, f" {error}"
        if not fits:
            input_space = pipeline.space if pipeline.is_connected else "anything"
            raise ConfigError(
                f"Policy {self._rows.policy_id!r} cannot act for agent {agent!r}: the environment "
                f"gives the agent {env_space}, but the policy's {pipeline} takes {input_space}, "
                f"returns {output_space}, and the policy acts on "
                f"{policy.observation_space}.{reason} Map the agent to another policy, or give "
                "this one other `agent_connectors` or the agent's observation_space in its "
                "PolicySpec."
            )
        if self._action_pipeline is not None and not self._action_pipeline.is_connected:
            self._action_pipeline.connect(policy.action_space)
        if self._stacker is None:
            self._stacker = ObservationStacker(pipeline.space)
            column_specs = {
                leaf.name("obs"): (leaf.shape, leaf.dtype) for leaf in self._stacker.leaves
            }
            self._table.add_columns(column_specs)
            self._leaf_names = list(column_specs)

    def get_env_ids(self, slots: np.ndarray) -> np.ndarray:
        """Returns the environment of each slot, int64 `[K]`."""
        return self._table["env_id"].take(slots)

    def reset(self, env_ids: np.ndarray) -> None:
        """Resets the connectors for environments, int64 `[K]`, whose episodes ended."""
        for pipeline in self.pipelines:
            if pipeline is not None:
                pipeline.reset(env_ids)

    # -- steps --------------------------------------------------------------------------------

    def prepare_observations(self, slots: np.ndarray, observations: Sequence[Any]) -> Any:
        """Returns the connectors' input: a batch nested like the environment's space.

        Args:
            slots: int64 `[K]`. The last ones, beyond `observations`, belong to agents that are done
                without a last observation: their rows repeat the previous observation.
            observations: the single observations of the first slots.

        Raises:
            ValueError, TypeError, KeyError, IndexError: if one is not of the space, or not finite.
        """
        arrays = self._stacker.stack(observations)
        for name, rows in zip(self._leaf_names, arrays, strict=True):
            self._table[name][slots[: len(observations)]] = rows
        leaves = [self._table[name][slots] for name in self._leaf_names]
        return unflatten(self._agent_pipeline.space, leaves)  # type: ignore[union-attr]

    def transform_observations(
        self, obs: Structure, slots: np.ndarray, rewards: np.ndarray | None
    ) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Returns the policy's input: leaves `[K, ...]`, and rewards float64 `[K]` if given.

        Args:
            obs: the result of `take`.
            slots: of the rows, int64 `[K]`.
            rewards: float64 `[K]`; None if there are none yet.
        """
        pipeline: Any = self._agent_pipeline
        agents = self._slots.columns["agent_index"][slots]
        step = pipeline(AgentStep(obs, self.get_env_ids(slots), rewards, agents))
        source = f"the connectors of policy {self._rows.policy_id!r}"
        stacker = self._rows.stacker
        arrays = batch_leaves(stacker.leaves, step.obs, f"the output of {source}")
        for leaf, array in zip(stacker.leaves, arrays, strict=True):
            problem = None if stacker.is_valid(leaf, array) else describe_invalid_obs(leaf.space)
            if problem is not None:
                raise ObservationError(
                    f"{leaf.name('obs')} from {source} {problem}. Correct {pipeline}."
                )
        if rewards is None or step.rewards is None:
            return arrays, rewards
        new_rewards = np.asarray(step.rewards, np.float64)
        if not are_finite_numbers(new_rewards):
            raise ObservationError(
                f"Rewards from {source} must be {len(rewards)} finite numbers, but are "
                f"{step.rewards!r:.200}. Correct {pipeline}."
            )
        return arrays, new_rewards

    def transform_actions(self, actions: Structure, slots: np.ndarray) -> Any:
        """Returns the environments' actions for a policy's actions `[K, ...]`, nested alike."""
        if not self._action_pipeline:
            return actions
        agents = self._slots.columns["agent_index"][slots]
        return self._action_pipeline(ActionStep(actions, self.get_env_ids(slots), agents)).actions


def _get_layout(space: gym.Space[Any]) -> list[tuple[Any, ...]]:
    """Returns the properties that two spaces must share to exchange observations."""
    return [(leaf.path, leaf.shape, leaf.dtype) for leaf in leaves(space)]
