"""Carries rows over to the next fragment, so that n-step sums can use the rows after them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from tfpolicies.batch.layout import INFOS
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.collected import Collected, Trajectory


class Waiting:
    """The last rows of one policy's unfinished trajectories, before postprocessing.

    Attributes:
        rows: trajectory after trajectory; None if there are none.
    """

    def __init__(self) -> None:
        self.rows: Collected | None = None

    @property
    def holds_infos(self) -> bool:
        """True if one of the rows has a non-empty info."""
        return self.rows is not None and any(self.rows.columns.get(INFOS, ()))

    def join(self, sample: Collected) -> Collected:
        """Prepends the rows that were carried over to their trajectories in a sample."""
        waited = self._as_in(sample)
        if waited is None:
            return sample
        both, count = waited.followed_by(sample), len(waited.ends)
        before, order = dict(waited.trajectories()), []
        unrolls = both.columns["unroll_id"]
        for trajectory, rows in sample.trajectories():
            if trajectory in before:
                own = before.pop(trajectory)
                unrolls[own] = unrolls[count + rows.start]
                order.append(np.arange(own.start, own.stop))
            order.append(np.arange(rows.start, rows.stop) + count)
        self.rows = _those(waited, lambda trajectory: trajectory in before)
        return both.taking(np.concatenate(order))

    def hold_back(self, sample: Collected, count: int, running: Collection[int]) -> np.ndarray:
        """Keeps the last rows of unfinished trajectories; returns a mask of the other rows.

        Args:
            sample: before postprocessing.
            count: the number of rows to keep per trajectory.
            running_ids: the ids of unfinished episodes.

        Returns:
            Bool `[R]`: the rows that can be learned from now.
        """
        done = sample.columns["terminateds"] | sample.columns["truncateds"]
        ready = np.ones(len(done), bool)
        for (episode, _), rows in sample.trajectories():
            if not done[rows.stop - 1] and episode in running:
                ready[max(rows.start, rows.stop - count) : rows.stop] = False
        new = sample.taking(np.flatnonzero(~ready)) if not ready.all() else None
        old = _those(self.rows, lambda trajectory: trajectory[0] in running)
        self.rows = new if old is None else old if new is None else old.followed_by(new)
        return ready

    def forget(self, trajectories: Collection[Trajectory]) -> None:
        """Drops the rows of some trajectories."""
        self.rows = _those(self.rows, lambda trajectory: trajectory not in trajectories)

    def get_state(self) -> dict[str, Any] | None:
        """Returns the rows without their infos, as plain values and arrays."""
        rows = self.rows
        if rows is None:
            return None
        columns = {name: column for name, column in rows.columns.items() if name != INFOS}
        parts = {"obs": rows.obs, "new_obs": rows.new_obs, "earned": rows.earned}
        return {**parts, "columns": columns, "views": dict(rows.views)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None, policy_id: str, policy: Policy) -> Waiting:
        """Restores what `get_state` returned.

        Args:
            state: the result of `get_state`.
            policy_id: of the rows.
            policy: the policy of that id.
        """
        waiting = cls()
        if state is None:
            return waiting
        columns = dict(state["columns"])
        ends = np.ones(len(state["earned"]), bool)
        leaves = list(state["obs"]), list(state["new_obs"])
        whole = Collected(policy_id, policy, (), *leaves, columns, ends, views=state["views"])
        whole.earned = np.asarray(state["earned"])
        waiting.rows = whole.taking(np.arange(len(ends)))
        return waiting

    def _as_in(self, sample: Collected) -> Collected | None:
        """Returns the rows with the columns of a sample; None, and drops them, if they lack one."""
        rows = self.rows
        if rows is None:
            return None
        if INFOS in sample.columns and INFOS not in rows.columns:
            rows.columns[INFOS] = np.array([{} for _ in rows.ends], object)
        alike = sample.columns.keys() <= rows.columns.keys()
        if not alike or sample.views.keys() != rows.views.keys():
            self.rows = None
        return self.rows


def _those(rows: Collected | None, wanted: Callable[[Trajectory], bool]) -> Collected | None:
    """Returns the rows of the trajectories that satisfy the predicate; None if there are none."""
    if rows is None:
        return None
    found = [
        np.arange(x.start, x.stop) for trajectory, x in rows.trajectories() if wanted(trajectory)
    ]
    return rows.taking(np.concatenate(found)) if found else None
