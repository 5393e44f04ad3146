"""Growing tables for the transitions of many agents.

Every agent of a running episode has a *slot*. Each transition is stored twice: a *record* has its
time and reward (one table for all policies), and a row in the table of the agent's policy has the
observation and the outputs of acting.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.base.finite_checks import require_real
from tfpolicies.envs.fault_tolerance import check_observation, make_obs_check
from tfpolicies.envs.vector_adapters import make_action_copier
from tfpolicies.models.ports import make_leaf_ports
from tfpolicies.models.spaces import Leaf, action_leaves, get_at_path, leaves
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.recurrent_state import RecurrentState
from tfpolicies.rollout.episode import Episode, copy_columns
from tfpolicies.rollout.rollout_rows import require_same_columns

NO_AGENT = 0
"""The slot that collects writes for agents without a slot."""

ColumnSpecs = Mapping[str, tuple[tuple[int, ...], Any]]


class ColumnTable:
    """Columns of equal length that grow together, in preallocated memory.

    Args:
        specs: the shape of one row and the dtype of each column, by name.

    Attributes:
        columns: arrays `[capacity, ...]` by name; replaced when the table grows.
        used: rows in use.

    >>> table = ColumnTable({"t": ((), np.int64)})
    >>> table.columns["t"][table.append(3)] = [4, 5, 6]
    >>> table.keep(np.array([0, 2]))
    >>> table["t"]
    array([4, 6])
    """

    def __init__(self, specs: ColumnSpecs) -> None:
        self.used = 0
        self.capacity = 256
        self.columns: dict[str, np.ndarray] = {}
        self.add_columns(specs)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name][: self.used]

    def add_columns(self, specs: ColumnSpecs) -> None:
        """Adds columns; the values of existing rows are undefined."""
        for name, (shape, dtype) in specs.items():
            self.columns[name] = np.empty((self.capacity, *shape), dtype)

    def append(self, count: int) -> slice:
        """Returns the slice of `count` new rows, to be written by the caller."""
        start, self.used = self.used, self.used + count
        if self.used > self.capacity:
            self._grow()
        return slice(start, self.used)

    def _grow(self) -> None:
        while self.capacity < self.used:
            self.capacity *= 2
        for name, column in self.columns.items():
            grown = np.empty((self.capacity, *column.shape[1:]), column.dtype)
            grown[: len(column)] = column
            self.columns[name] = grown

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only the rows at `rows`, int `[K]` in ascending order."""
        for column in self.columns.values():
            column[: len(rows)] = column[rows]
        self.used = len(rows)


class AgentSlots(ColumnTable):
    """The pending state of each agent of each running episode; a row is a slot.

    The columns are `earned` (reward since its last observation), `total` (reward in the episode),
    `record` (of its open transition, or -1), `unroll_id` (of the current part of its trajectory),
    `eps_id` and `agent_index`.

    Attributes:
        owners: the episode and the agent by unroll id.
        excluded: the unroll ids that are excluded from learning.
        free_slots: unused slots; the slots of an episode are released when it ends.
    """

    def __init__(self) -> None:
        numbers = ("record", "unroll_id", "eps_id", "agent_index")
        specs = dict.fromkeys(numbers, ((), np.int64))
        super().__init__({**specs, **dict.fromkeys(("earned", "total"), ((), np.float64))})
        self.owners: dict[int, tuple[Any, Any]] = {}
        self.excluded: set[int] = set()
        self.next_unroll = 0
        self.free_slots: list[int] = []
        self.append(1)
        for name in self.columns:
            self.columns[name][NO_AGENT] = -1 if name == "record" else 0

    def assign(self, episode: Episode, agent: Hashable, agent_index: int) -> int:
        slot = self.free_slots.pop() if self.free_slots else self.append(1).start
        columns = self.columns
        columns["earned"][slot] = columns["total"][slot] = 0.0
        columns["record"][slot] = -1
        columns["eps_id"][slot] = episode.episode_id
        columns["agent_index"][slot] = agent_index
        columns["unroll_id"][slot] = self._make_unroll(episode, agent)
        return slot

    def get_unroll_id(self, slot: int) -> int:
        return int(self.columns["unroll_id"][slot])

    def set_owner(self, slot: int, episode: Episode, agent: Hashable) -> None:
        self.owners[self.get_unroll_id(slot)] = (episode, agent)

    def start_new_unroll(self, slot: int, episode: Episode, agent: Hashable) -> None:
        unroll_ids = self.columns["unroll_id"]
        self.owners.pop(int(unroll_ids[slot]), None)
        unroll_ids[slot] = self._make_unroll(episode, agent)

    def _make_unroll(self, episode: Episode, agent: Hashable) -> int:
        unroll_id, self.next_unroll = self.next_unroll, self.next_unroll + 1
        self.owners[unroll_id] = (episode, agent)
        return unroll_id


class PolicyGroup(NamedTuple):
    """The agents of one policy among those that have an observation in a step."""

    rows: PolicyRows
    agents: tuple[Any, ...]
    slots: np.ndarray  # int64 [K]


class ObservationStacker:
    """Stacks single observations of one space.

    Args:
        space: of the observations.

    Attributes:
        leaves: of the space.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.leaves = leaves(space)
        self._checks = {leaf.path: make_obs_check(leaf.space) for leaf in self.leaves}

    def stack(self, observations: Sequence[Any]) -> list[np.ndarray]:
        """Returns the leaves `[K, ...]` of K single observations, in new arrays.

        Raises:
            ValueError, TypeError, KeyError, IndexError: see `write`.
        """
        return self.write(observations, self.empty(len(observations)))

    def empty(self, count: int) -> list[np.ndarray]:
        """Returns uninitialized leaves `[count, ...]`."""
        return [np.empty((count, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def write(self, observations: Sequence[Any], targets: list[np.ndarray]) -> list[np.ndarray]:
        """Writes single observations into leaves `[K, ...]`, and returns the leaves.

        Raises:
            ValueError, TypeError, KeyError, IndexError: if one is not of the space, or not finite.
        """
        for leaf, target in zip(self.leaves, targets, strict=True):
            self._write_leaf(leaf, observations, target)
        return targets

    def _write_leaf(self, leaf: Leaf, observations: Sequence[Any], target: np.ndarray) -> None:
        if not len(target):
            return
        values = [get_at_path(x, leaf.path) for x in observations] if leaf.path else observations
        if not leaf.shape:
            target[...] = require_real(np.asarray(values))
        elif _get_shapes(values) != {leaf.shape}:
            raise ValueError
        else:
            flat = target.reshape(len(values) * leaf.shape[0], *leaf.shape[1:])
            try:
                np.concatenate(values, out=flat, casting="same_kind")
            except TypeError:  # floats for integers; or strings, which "unsafe" would convert
                flat[...] = require_real(np.concatenate(values))
        if not self.is_valid(leaf, target):
            raise ValueError

    def is_valid(self, leaf: Leaf, values: np.ndarray) -> bool:
        """Returns whether values of a leaf, one or a batch, can be of its space."""
        return self._checks[leaf.path](values)


class PolicyRows:
    """The rows of one policy in time order, and the agents that act with it next.

    Args:
        policy_id: its id.
        policy: the policy.

    Attributes:
        table: the columns `record:`, `obs:<i>` per observation leaf, and the outputs of acting.
        final_observations: the leaves of the last observation of each finished trajectory, by
            unroll id.
        reads_episodes: whether the policy reads the episodes that it acts in.
        connectors: the policy's connectors, a `Connection`; None without connectors.
        pending: what acts next: sub-environments, their agents, and these agents' observations.
    """

    def __init__(self, policy_id: str, policy: Policy) -> None:
        self.policy_id = policy_id
        self.policy = policy
        self._description = f"observation for policy {policy_id!r}"
        self.reads_episodes: bool = policy.driver.acting.reads_episodes
        self.connectors: Any = None  # a Connection
        self.stacker = ObservationStacker(policy.observation_space)
        self.leaves = self.stacker.leaves
        self.actions = make_leaf_ports("actions", action_leaves(policy.action_space))
        self.copy_actions = make_action_copier(policy.action_space)
        self.obs_names = [f"obs:{i}" for i in range(len(self.leaves))]
        specs = {n: (x.shape, x.dtype) for n, x in zip(self.obs_names, self.leaves, strict=True)}
        self.table = ColumnTable({"record:": ((), np.int64), **specs})
        self.action_columns: tuple[str, ...] = ()  # names of the outputs of acting
        self.recurrent_state = RecurrentState(policy, 1)
        self.final_observations: dict[int, list[np.ndarray]] = {}
        self.pending: list[tuple[Any, PolicyGroup, Sequence[Any]]] = []

    def get_slots(self) -> np.ndarray:
        """Returns the slots of the agents that act next, int64 `[K]`."""
        slots = [group.slots for _, group, _ in self.pending]
        return slots[0] if len(slots) == 1 else np.concatenate(slots)

    def write_observations(self, slots: np.ndarray) -> list[np.ndarray]:
        """Appends a row for each agent that acts next; returns the observation leaves."""
        new_rows = self.table.append(len(slots))
        observations = [x for _, _, values in self.pending for x in values]
        return self.write(
            observations, [self.table.columns[name][new_rows] for name in self.obs_names]
        )

    def write_columns(self, columns: Mapping[str, np.ndarray], first_record: int) -> None:
        """Writes the outputs of acting into the rows that were appended last."""
        table = self.table
        if not self.action_columns:
            self.action_columns = tuple(columns)
            table.add_columns({name: (x.shape[1:], x.dtype) for name, x in columns.items()})
        require_same_columns(self.policy, self.action_columns, columns)
        count = len(next(iter(columns.values())))
        new_rows = slice(table.used - count, table.used)
        for name, column in columns.items():
            table.columns[name][new_rows] = column
        table.columns["record:"][new_rows] = np.arange(first_record, first_record + count)

    def record_acting(self, columns: Mapping[str, np.ndarray]) -> None:
        """Records the outputs of acting `[K, ...]` in the episodes of the agents that acted."""
        copied_columns, first_row = copy_columns(columns), 0
        for sub_env, group, _ in self.pending if copied_columns else ():
            sub_env.episode.record_acting(group.agents, copied_columns, first_row)
            first_row += len(group.agents)

    def stack(self, observations: Sequence[Any]) -> list[np.ndarray]:
        """Returns the leaves `[K, ...]` of K single observations, in new arrays.

        Raises:
            EnvError: if one is not of the policy's space, or not finite.
        """
        return self.write(observations, self.stacker.empty(len(observations)))

    def write(self, observations: Sequence[Any], targets: list[np.ndarray]) -> list[np.ndarray]:
        """Writes single observations into leaves `[K, ...]` and returns these; see `stacked`."""
        try:
            return self.stacker.write(observations, targets)
        except (ValueError, TypeError, KeyError, IndexError):
            for obs in observations:
                check_observation(self.policy.observation_space, obs, self._description)
            raise


def _get_shapes(values: Sequence[Any]) -> set[tuple[int, ...]]:
    try:
        return {x.shape for x in values}
    except AttributeError:  # lists or numbers
        return {np.shape(x) for x in values}
