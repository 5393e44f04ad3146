"""Table of the transitions of many agents: written in time order, read by trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.errors import EnvError
from tfpolicies.rollout.collected import Collected
from tfpolicies.rollout.multi_agent_episode import Copy
from tfpolicies.rollout.multi_agent_rows import PolicyRows, Seats, Table

_NUMBERS = ("t", "seat", "unroll_id", "eps_id", "agent_index")
_NONE: Mapping[Any, Any] = {}
_TAKEN = ("rewards", "terminateds", "truncateds", "eps_id", "unroll_id", "agent_index", "t")


class Ledger:
    """All transitions that were not returned yet: one table of records, and each policy's rows.

    Within a step, changes are collected per sub-environment first, then committed for all together.

    Args:
        num_copies: the number of sub-environments.

    Attributes:
        records: a table; `t` is -1 until the agent's next observation completes the transition.
        slots: the slots of the agents of running episodes.
        rows: by policy id.
        keeps_infos: whether records have the infos of the steps that completed them.
    """

    keeps_infos = False

    def __init__(self, num_copies: int) -> None:
        kinds: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(_NUMBERS, ((), np.int64))
        flags = dict.fromkeys(("terminateds", "truncateds"), ((), np.bool_))
        self.records = Table({**kinds, **flags, "rewards": ((), np.float32)})
        self.seats = Seats()
        self.rows: dict[str, PolicyRows] = {}
        self._num_copies = num_copies
        self._begin_step()

    def keep_infos(self) -> None:
        """Keeps infos from now on; completed records get empty ones."""
        if not self.keeps_infos:
            self.keeps_infos = True
            self.records.add_columns({"infos": ((), object)})
            self.records["infos"][:] = [{} for _ in range(self.records.used)]

    def has_infos(self) -> bool:
        """Returns whether a record has a non-empty info."""
        return self.keeps_infos and any(self.records["infos"])

    # -- steps --------------------------------------------------------------------------------

    def open(self, seats: np.ndarray) -> int:
        """Opens a transition for each slot, int64 `[K]`; returns the number of the first record."""
        where = self.records.append(len(seats))
        columns, of_seats = self.records.columns, self.seats.columns
        columns["t"][where] = -1
        columns["seat"][where] = seats
        columns["terminateds"][where] = columns["truncateds"][where] = False
        if self.keeps_infos:
            columns["infos"][where] = None
        for name in ("unroll_id", "eps_id", "agent_index"):
            columns[name][where] = of_seats[name][seats]
        of_seats["record"][seats] = np.arange(where.start, where.stop)
        return int(where.start)

    def _begin_step(self) -> None:
        self._earning: list[np.ndarray] = []
        self._earned: list[Any] = []
        self._closing: list[tuple[np.ndarray, int, int]] = []
        self._ending: list[tuple[int, bool, bool]] = []
        self._informing: list[Any] = []

    def earn(self, seats: np.ndarray, rewards: Sequence[Any]) -> None:
        """Collects rewards of slots, int64 `[K]`."""
        self._earning.append(seats)
        self._earned += rewards

    def close(self, copy: Copy, t: int, seats: np.ndarray, infos: Mapping[Any, Any]) -> None:
        """Collects the slots of one sub-environment whose agents are observed, or done, at `t`.

        Args:
            sub_env: the sub-environment.
            t: the step.
            slots: int64 `[K]`.
            infos: by agent id.
        """
        if len(seats):
            if self.keeps_infos:
                told = {copy.episode.seat_of.get(agent): info for agent, info in infos.items()}
                self._informing += [dict(told.get(seat) or _NONE) for seat in seats.tolist()]
            self._closing.append((seats, copy.index, t))

    def end(self, seat: int, *, terminated: bool, truncated: bool) -> None:
        """Collects how the trajectory of an agent that is done ends."""
        self._ending.append((seat, terminated, truncated))

    def book_rewards(self) -> None:
        """Commits the collected rewards to the slots."""
        if self._earning:
            of_seats = self.seats.columns
            earning, earned = np.concatenate(self._earning), np.array(self._earned, np.float64)
            of_seats["earned"][earning] += earned
            of_seats["total"][earning] += earned
            self._earning, self._earned = [], []

    def book(self) -> np.ndarray:
        """Commits the collected changes: rewards, then completed transitions, then ends.

        Returns:
            The number of completed transitions per sub-environment, int64 `[num_copies]`.
        """
        self.book_rewards()
        closed = self._close_all() if self._closing else np.zeros(0, np.int64)
        self._begin_step()
        return np.bincount(closed, minlength=self._num_copies)

    def _close_all(self) -> np.ndarray:
        """Completes the open transitions of the collected slots; returns their sub-environments."""
        of_seats, columns = self.seats.columns, self.records.columns
        of_copies, *numbers = zip(*self._closing, strict=True)
        seats, counts = np.concatenate(of_copies), [*map(len, of_copies)]
        copies, t = (np.repeat(x, counts) for x in numbers)
        record = of_seats["record"][seats]
        is_open = record >= 0
        if self.keeps_infos:
            told = columns["infos"]
            for number, info in zip(record.tolist(), self._informing, strict=True):
                if number >= 0:
                    told[number] = info
        if not is_open.all():
            of_seats["earned"][seats[~is_open]] = 0.0  # earned before the agent's first action
            seats, copies, t, record = (x[is_open] for x in (seats, copies, t, record))
        rewards = of_seats["earned"][seats]
        columns["rewards"][record] = rewards
        columns["t"][record] = t
        for seat, terminated, truncated in self._ending:
            number = of_seats["record"][seat]
            if number >= 0:
                columns["terminateds"][number] = terminated
                columns["truncateds"][number] = truncated
        of_seats["earned"][seats] = 0.0
        of_seats["record"][seats] = -1
        for rows in self.rows.values():
            if rows.memory.is_needed:
                own = seats < rows.memory.num_rows
                rows.memory.rewarded(rewards[own], seats[own])
        return copies

    # -- batches ------------------------------------------------------------------------------

    def take(self, taken: np.ndarray, copies: Sequence[Copy]) -> list[Collected]:
        """Removes and returns the rows of the selected records, bool `[K]`, by policy."""
        samples = [self._sample_of(rows, taken, copies) for rows in self.rows.values()]
        self.keep(~taken)
        return [sample for sample in samples if sample is not None]

    def _sample_of(
        self, rows: PolicyRows, taken: np.ndarray, copies: Sequence[Copy]
    ) -> Collected | None:
        table, records = rows.table, self.records
        index = np.flatnonzero(taken[table["record:"]])
        if not len(index):
            return None
        unrolls = records["unroll_id"][table["record:"][index]]
        order = np.argsort(unrolls, kind="stable")
        index, unrolls = index[order], unrolls[order]
        ends = np.append(unrolls[1:] != unrolls[:-1], True)
        numbers = table["record:"][index]
        columns = {name: table[name].take(index, axis=0) for name in rows.acted}
        taken_too = (*_TAKEN, "infos") if self.keeps_infos else _TAKEN
        columns |= {name: records[name].take(numbers) for name in taken_too}
        obs = [table[name].take(index, axis=0) for name in rows.obs_names]
        last = np.flatnonzero(ends)
        new_obs = self._reached(rows, obs, last, unrolls[last], copies)
        return Collected(rows.policy_id, rows.policy, rows.actions, obs, new_obs, columns, ends)

    def _reached(
        self,
        rows: PolicyRows,
        obs: Sequence[np.ndarray],
        last: np.ndarray,
        unrolls: np.ndarray,
        copies: Sequence[Copy],
    ) -> list[np.ndarray]:
        """Returns the next observation of each row, per leaf, in new arrays.

        It is the observation that the agent acted on next, or the last one of its trajectory; for
        an agent that is done without a last observation, it is the one it acted on. `last_rows` has the
        last row of each trajectory, `unroll_ids` their unroll ids in ascending order.
        """
        reached = [np.concatenate([leaf[1:], leaf[-1:]]) for leaf in obs]
        for leaf, target in zip(obs, reached, strict=True):
            target[last] = leaf[last]
        for place, unroll in zip(last.tolist(), unrolls.tolist(), strict=True):
            for target, leaf in zip(reached, rows.finals.pop(unroll, ()), strict=False):
                target[place] = leaf[0]
        for of_unrolls, next_obs in self._next_observations(rows, copies):
            found = np.minimum(np.searchsorted(unrolls, of_unrolls), len(unrolls) - 1)
            goes_on = unrolls[found] == of_unrolls
            for target, leaf in zip(reached, next_obs, strict=True):
                target[last[found[goes_on]]] = leaf[goes_on]
        return reached

    def _next_observations(
        self, rows: PolicyRows, copies: Sequence[Copy]
    ) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """Returns the current observations of running trajectories: unroll ids, and leaves.

        They are those of open transitions, and those that agents act on next.
        """
        table, records = rows.table, self.records
        unanswered = np.flatnonzero(records["t"][table["record:"]] < 0)
        acted_on = [table[name][unanswered] for name in rows.obs_names]
        found = [(records["unroll_id"][table["record:"][unanswered]], acted_on)]
        pending = [pair for copy in copies for pair in copy.pending if pair[0].rows is rows]
        if pending:
            seats = np.concatenate([part.seats for part, _ in pending])
            observed = [x for _, values in pending for x in values]
            found.append((self.seats.columns["unroll_id"][seats], rows.stacked(observed)))
        return found

    def keep(self, kept: np.ndarray) -> None:
        """Keeps only the selected records, bool `[K]`, and the policies' rows of these."""
        number = np.cumsum(kept) - 1  # the new number of each record that stays
        for rows in self.rows.values():
            table = rows.table
            table.keep(np.flatnonzero(kept[table["record:"]]))
            table["record:"][...] = number[table["record:"]]
        record = self.seats["record"]
        open_seats = np.flatnonzero(record >= 0)
        old = record[open_seats]
        record[open_seats] = np.where(kept[old], number[old], -1)
        self.records.keep(np.flatnonzero(kept))

    def turn_pages(self, copies: Sequence[Copy]) -> None:
        """Starts new unrolls of running trajectories; only open records may be left."""
        for copy in copies:
            for agent in copy.playing():
                self.seats.turn_page(copy.episode.seat_of[agent], copy.episode, agent)
        records = self.records
        records["unroll_id"][...] = self.seats.columns["unroll_id"][records["seat"]]

    def forget_trajectories(self, copies: Sequence[Copy]) -> None:
        """Drops the owners of finished trajectories that have no rows left."""
        seats = self.seats
        unroll = seats.columns["unroll_id"]
        kept = {unroll[c.episode.seat_of[agent]] for c in copies for agent in c.playing()}
        kept.update(self.records["unroll_id"].tolist())
        seats.who = {number: who for number, who in seats.who.items() if number in kept}
        seats.barred &= kept
        for rows in self.rows.values():
            rows.finals = {n: leaves for n, leaves in rows.finals.items() if n in kept}


def not_numbers(rewards: Mapping[Any, Any]) -> EnvError:
    """Creates the error about the first reward, by agent, that is not a number."""
    wrong = [(f"that of agent {agent!r}", x) for agent, x in rewards.items() if not _is_number(x)]
    whose, reward = wrong[0] if wrong else ("one", None)
    return EnvError(
        f"Rewards must be one finite number for each agent, but {whose} is {reward!r}. "
        "Return floats."
    )


def _is_number(reward: object) -> bool:
    array = np.asarray(reward)
    return array.ndim == 0 and array.dtype.kind in "biuf" and bool(np.isfinite(array))
