"""Rows of many agents on their way into batches: tables that grow, and who fills them.

Every agent of a running episode has a *seat*. What it does is written down twice: a *record* says
when and with what reward the transition went (one table for all policies), and a row of its
policy's own table has the observation and the columns of acting.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.envs.repairs import check_observation, sound_check
from tfpolicies.envs.vector import copier
from tfpolicies.finite import real
from tfpolicies.models.ports import leaf_ports
from tfpolicies.models.spaces import Leaf, action_leaves, leaves, pick
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.recurrent_state import RecurrentState
from tfpolicies.rollout.collected import require_same_columns
from tfpolicies.rollout.episode import Episode, own_columns

NOBODY = 0
"""The seat that takes what is meant for agents without one."""

Kinds = Mapping[str, tuple[tuple[int, ...], Any]]


class Table:
    """Columns of one length that grow together, in memory that is allocated ahead.

    Args:
        kinds: the shape of one row and the dtype of each column, by name.

    Attributes:
        columns: arrays `[capacity, ...]` by name; replaced when the table grows.
        used: rows in use.

    >>> table = Table({"t": ((), np.int64)})
    >>> table.columns["t"][table.append(3)] = [4, 5, 6]
    >>> table.keep(np.array([0, 2]))
    >>> table["t"]
    array([4, 6])
    """

    def __init__(self, kinds: Kinds) -> None:
        self.used = 0
        self.capacity = 256
        self.columns: dict[str, np.ndarray] = {}
        self.add_columns(kinds)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name][: self.used]

    def add_columns(self, kinds: Kinds) -> None:
        """Makes room for further columns; their present rows are undefined."""
        for name, (shape, dtype) in kinds.items():
            self.columns[name] = np.empty((self.capacity, *shape), dtype)

    def append(self, count: int) -> slice:
        """Returns where `count` new rows are to be written."""
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


class Seats(Table):
    """What each agent of each running episode has outstanding; a row is a seat.

    The columns are `earned` (since its last observation), `total` (in the episode), `record` (of
    its open transition, or -1), `unroll_id` (of the running piece of its trajectory), `eps_id` and
    `agent_index`.

    Attributes:
        who: by unroll id, the episode and the agent.
        barred: the unroll ids of pieces that are not to be learned from.
        free: the seats that nobody has; an episode that is over gives its own back.
    """

    def __init__(self) -> None:
        numbers = ("record", "unroll_id", "eps_id", "agent_index")
        kinds = dict.fromkeys(numbers, ((), np.int64))
        super().__init__({**kinds, **dict.fromkeys(("earned", "total"), ((), np.float64))})
        self.who: dict[int, tuple[Any, Any]] = {}
        self.barred: set[int] = set()
        self.next_unroll = 0
        self.free: list[int] = []
        self.append(1)
        for name in self.columns:
            self.columns[name][NOBODY] = -1 if name == "record" else 0

    def take(self, episode: Episode, agent: Hashable, agent_index: int) -> int:
        """Gives a seat to an agent at its first observation."""
        seat = self.free.pop() if self.free else self.append(1).start
        columns = self.columns
        columns["earned"][seat] = columns["total"][seat] = 0.0
        columns["record"][seat] = -1
        columns["eps_id"][seat] = episode.episode_id
        columns["agent_index"][seat] = agent_index
        columns["unroll_id"][seat] = self._new_unroll(episode, agent)
        return seat

    def unroll(self, seat: int) -> int:
        """Returns the unroll id of the running piece of a seat's trajectory."""
        return int(self.columns["unroll_id"][seat])

    def recognise(self, seat: int, episode: Episode, agent: Hashable) -> None:
        """Takes down who has a seat that is taken already."""
        self.who[self.unroll(seat)] = (episode, agent)

    def turn_page(self, seat: int, episode: Episode, agent: Hashable) -> None:
        """Begins a new piece of an agent's trajectory."""
        unroll = self.columns["unroll_id"]
        self.who.pop(int(unroll[seat]), None)
        unroll[seat] = self._new_unroll(episode, agent)

    def _new_unroll(self, episode: Episode, agent: Hashable) -> int:
        unroll, self.next_unroll = self.next_unroll, self.next_unroll + 1
        self.who[unroll] = (episode, agent)
        return unroll


class Part(NamedTuple):
    """The agents of one policy among those that have an observation."""

    rows: PolicyRows
    agents: tuple[Any, ...]
    seats: np.ndarray  # int64 [K]


class Stacker:
    """Puts single observations of one space together.

    Args:
        space: theirs.

    Attributes:
        leaves: of the space.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.leaves = leaves(space)
        self._is_sound = {leaf.path: sound_check(leaf.space) for leaf in self.leaves}

    def stacked(self, observed: Sequence[Any]) -> list[np.ndarray]:
        """Returns the leaves `[K, ...]` of K single observations, in memory of their own.

        Raises:
            ValueError, TypeError, KeyError, IndexError: see `write`.
        """
        return self.write(observed, self.empty(len(observed)))

    def empty(self, count: int) -> list[np.ndarray]:
        """Returns leaves `[count, ...]` to write into."""
        return [np.empty((count, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def write(self, observed: Sequence[Any], targets: list[np.ndarray]) -> list[np.ndarray]:
        """Writes single observations into leaves `[K, ...]`, and returns these.

        Raises:
            ValueError, TypeError, KeyError, IndexError: if one is not of the space, or not finite.
        """
        for leaf, target in zip(self.leaves, targets, strict=True):
            self._write_leaf(leaf, observed, target)
        return targets

    def _write_leaf(self, leaf: Leaf, observed: Sequence[Any], target: np.ndarray) -> None:
        """Writes one leaf of single observations into `target` `[K, ...]`.

        Raises:
            ValueError, TypeError, KeyError, IndexError: if one is not of the space, or not finite.
        """
        if not len(target):
            return
        values = [pick(x, leaf.path) for x in observed] if leaf.path else observed
        if not leaf.shape:
            target[...] = real(np.asarray(values))
        elif _shapes(values) != {leaf.shape}:
            raise ValueError
        else:
            flat = target.reshape(len(values) * leaf.shape[0], *leaf.shape[1:])
            try:
                np.concatenate(values, out=flat, casting="same_kind")
            except TypeError:  # floats for integers; or text, which "unsafe" would read as numbers
                flat[...] = real(np.concatenate(values))
        if not self.is_sound(leaf, target):
            raise ValueError

    def is_sound(self, leaf: Leaf, values: np.ndarray) -> bool:
        """Whether the values of a leaf, one or a batch, can be of its space; see `sound_check`."""
        return self._is_sound[leaf.path](values)


class PolicyRows:
    """The rows of one policy, in the order of time, and who acts by it next.

    Args:
        policy_id: its id.
        policy: the policy.

    Attributes:
        table: the columns `record:`, `obs:<i>` per observation leaf, and those of acting.
        finals: by unroll id, the leaves of the last observation of a trajectory that ended.
        asks_for_episodes: whether the policy is given the episodes that it acts in.
        connection: what stands between the environments and the policy; None without connectors.
        waiting: who acts next: the copy of the environment, who of it, and what they observed.
    """

    def __init__(self, policy_id: str, policy: Policy) -> None:
        self.policy_id = policy_id
        self.policy = policy
        self._whose = f"observation that policy {policy_id!r} is to act on"
        self.asks_for_episodes: bool = policy.driver.acting.reads_episodes
        self.connection: Any = None  # a Connection
        self.stacker = Stacker(policy.observation_space)
        self.leaves = self.stacker.leaves
        self.actions = leaf_ports("actions", action_leaves(policy.action_space))
        self.own_copy = copier(policy.action_space)
        self.obs_names = [f"obs:{i}" for i in range(len(self.leaves))]
        kinds = {n: (x.shape, x.dtype) for n, x in zip(self.obs_names, self.leaves, strict=True)}
        self.table = Table({"record:": ((), np.int64), **kinds})
        self.acted: tuple[str, ...] = ()  # the names of the columns of acting
        self.memory = RecurrentState(policy, 1)
        self.finals: dict[int, list[np.ndarray]] = {}
        self.waiting: list[tuple[Any, Part, Sequence[Any]]] = []

    def seats(self) -> np.ndarray:
        """Returns the seats of those who act next, int64 `[K]`."""
        parts = [part.seats for _, part, _ in self.waiting]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write_observations(self, seats: np.ndarray) -> list[np.ndarray]:
        """Appends a row for each of those who act next; returns the observation leaves."""
        where = self.table.append(len(seats))
        observed = [x for _, _, values in self.waiting for x in values]
        return self.write(observed, [self.table.columns[name][where] for name in self.obs_names])

    def write_columns(self, columns: Mapping[str, np.ndarray], first_record: int) -> None:
        """Writes the columns of acting into the rows appended last."""
        table = self.table
        if not self.acted:
            self.acted = tuple(columns)
            table.add_columns({name: (x.shape[1:], x.dtype) for name, x in columns.items()})
        require_same_columns(self.policy, self.acted, columns)
        count = len(next(iter(columns.values())))
        where = slice(table.used - count, table.used)
        for name, column in columns.items():
            table.columns[name][where] = column
        table.columns["record:"][where] = np.arange(first_record, first_record + count)

    def note_acting(self, columns: Mapping[str, np.ndarray]) -> None:
        """Tells the episodes of those who acted by which columns `[K, ...]` they did."""
        kept, first = own_columns(columns), 0
        for copy, part, _ in self.waiting if kept else ():
            copy.episode.note_acting(part.agents, kept, first)
            first += len(part.agents)

    def stacked(self, observed: Sequence[Any]) -> list[np.ndarray]:
        """Returns the leaves `[K, ...]` of K single observations, in memory of their own.

        Raises:
            EnvError: if one is not of the policy's space, or not finite.
        """
        return self.write(observed, self.stacker.empty(len(observed)))

    def write(self, observed: Sequence[Any], targets: list[np.ndarray]) -> list[np.ndarray]:
        """Writes single observations into leaves `[K, ...]`, and returns these; see `stacked`."""
        try:
            return self.stacker.write(observed, targets)
        except (ValueError, TypeError, KeyError, IndexError):
            for obs in observed:
                check_observation(self.policy.observation_space, obs, self._whose)
            raise


def _shapes(values: Sequence[Any]) -> set[tuple[int, ...]]:
    try:
        return {x.shape for x in values}
    except AttributeError:  # lists or numbers
        return {np.shape(x) for x in values}
