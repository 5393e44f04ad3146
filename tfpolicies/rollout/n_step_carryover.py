"""Carries rows over to the next fragment, so that n-step sums can use the rows after them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from tfpolicies.batch.layout import INFOS
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.rollout_rows import RolloutRows, Trajectory


class NStepCarryover:
    """The last rows of one policy's unfinished trajectories, before postprocessing.

    Attributes:
        rows: trajectory after trajectory; None if there are none.
    """

    def __init__(self) -> None:
        self.rows: RolloutRows | None = None

    @property
    def has_infos(self) -> bool:
        """True if one of the rows has a non-empty info."""
        return self.rows is not None and any(self.rows.columns.get(INFOS, ()))

    def prepend_to(self, sample: RolloutRows) -> RolloutRows:
        """Prepends the rows that were carried over to their trajectories in a sample."""
        carried = self._match_columns(sample)
        if carried is None:
            return sample
        combined, count = carried.concatenate(sample), len(carried.ends)
        unused, order = dict(carried.iter_trajectories()), []
        unrolls = combined.columns["unroll_id"]
        for trajectory, rows in sample.iter_trajectories():
            if trajectory in unused:
                carried_slice = unused.pop(trajectory)
                unrolls[carried_slice] = unrolls[count + rows.start]
                order.append(np.arange(carried_slice.start, carried_slice.stop))
            order.append(np.arange(rows.start, rows.stop) + count)
        self.rows = _select_trajectories(carried, lambda trajectory: trajectory in unused)
        return combined.take(np.concatenate(order))

    def hold_last_rows(
        self, sample: RolloutRows, count: int, running_ids: Collection[int]
    ) -> np.ndarray:
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
        for (episode, _), rows in sample.iter_trajectories():
            if not done[rows.stop - 1] and episode in running_ids:
                ready[max(rows.start, rows.stop - count) : rows.stop] = False
        new_rows = sample.take(np.flatnonzero(~ready)) if not ready.all() else None
        old_rows = _select_trajectories(self.rows, lambda trajectory: trajectory[0] in running_ids)
        self.rows = (
            new_rows
            if old_rows is None
            else old_rows
            if new_rows is None
            else old_rows.concatenate(new_rows)
        )
        return ready

    def drop(self, trajectories: Collection[Trajectory]) -> None:
        self.rows = _select_trajectories(
            self.rows, lambda trajectory: trajectory not in trajectories
        )

    def get_state(self) -> dict[str, Any] | None:
        """Returns the rows without their infos, as plain values and arrays."""
        rows = self.rows
        if rows is None:
            return None
        columns = {name: column for name, column in rows.columns.items() if name != INFOS}
        parts = {"obs": rows.obs, "new_obs": rows.new_obs, "earned": rows.env_rewards}
        return {**parts, "columns": columns, "views": dict(rows.views)}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any] | None, policy_id: str, policy: Policy
    ) -> NStepCarryover:
        """Restores what `get_state` returned.

        Args:
            state: the result of `get_state`.
            policy_id: of the rows.
            policy: the policy of that id.
        """
        carryover = cls()
        if state is None:
            return carryover
        columns = dict(state["columns"])
        ends = np.ones(len(state["earned"]), bool)
        leaves = list(state["obs"]), list(state["new_obs"])
        all_rows = RolloutRows(policy_id, policy, (), *leaves, columns, ends, views=state["views"])
        all_rows.env_rewards = np.asarray(state["earned"])
        carryover.rows = all_rows.take(np.arange(len(ends)))
        return carryover

    def _match_columns(self, sample: RolloutRows) -> RolloutRows | None:
        """Returns the rows with the columns of a sample; None, and drops them, if they lack one."""
        rows = self.rows
        if rows is None:
            return None
        if INFOS in sample.columns and INFOS not in rows.columns:
            rows.columns[INFOS] = np.array([{} for _ in rows.ends], object)
        has_columns = sample.columns.keys() <= rows.columns.keys()
        if not has_columns or sample.views.keys() != rows.views.keys():
            self.rows = None
        return self.rows


def _select_trajectories(
    rows: RolloutRows | None, predicate: Callable[[Trajectory], bool]
) -> RolloutRows | None:
    """Returns the rows of the trajectories that satisfy the predicate; None if there are none."""
    if rows is None:
        return None
    selected = [
        np.arange(x.start, x.stop)
        for trajectory, x in rows.iter_trajectories()
        if predicate(trajectory)
    ]
    return rows.take(np.concatenate(selected)) if selected else None
