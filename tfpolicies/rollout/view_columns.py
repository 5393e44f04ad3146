"""The columns that view requirements add to samples, across fragments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.view_builder import Trajectories, TrajectoryHistory, get_history_lengths
from tfpolicies.batch.view_requirement import ViewRequirement

_Key = tuple[int, int]  # episode id and agent index


class Lookback:
    """Creates the view columns of one policy's samples, and keeps the rows that later views need.

    Attributes:
        keys: the trajectories that are remembered.
        past: their last rows.
    """

    def __init__(self) -> None:
        self.keys: list[_Key] = []
        self.past = TrajectoryHistory(np.zeros(0, np.int64))

    def make_views(
        self,
        columns: Mapping[str, Any],
        ends: np.ndarray,
        requirements: Mapping[str, ViewRequirement],
        running_ids: Collection[int],
    ) -> dict[str, Any]:
        """Returns the view columns of a sample by name.

        Args:
            columns: of the sample, `[R, ...]` each, trajectory after trajectory.
            ends: bool `[R]`: the last row of each trajectory.
            requirements: by the name of the resulting column.
            running_ids: the ids of episodes that have further rows.
        """
        firsts = np.flatnonzero(np.concatenate([[True], ends[:-1]]))
        ids = zip(columns["eps_id"][firsts], columns["agent_index"][firsts], strict=True)
        keys = [(int(episode), int(agent)) for episode, agent in ids]
        trajectories = Trajectories(ends, self._get_past(keys))
        result = trajectories.build_views(columns, requirements)
        num_steps_back = {
            name: n for name, n in get_history_lengths(requirements).items() if name in columns
        }
        if num_steps_back:
            self._remember(
                keys,
                trajectories.get_history(
                    columns, list(num_steps_back), max(num_steps_back.values())
                ),
                running_ids,
            )
        return result

    def _get_past(self, keys: Sequence[_Key]) -> TrajectoryHistory | None:
        """Returns the remembered rows of trajectories, in their order; None if there are none."""
        index_by_key = {key: i for i, key in enumerate(self.keys)}
        rows = np.array([index_by_key.get(key, -1) for key in keys])
        if (rows < 0).all():
            return None
        past = self.past.select(rows)
        return TrajectoryHistory(np.where(rows < 0, 0, past.num_rows), past.leaves)

    def _remember(
        self, keys: Sequence[_Key], tails: TrajectoryHistory, running_ids: Collection[int]
    ) -> None:
        """Remembers the unfinished ones of these and of earlier trajectories."""
        last_index = {key: i for i, key in enumerate(keys) if key[0] in running_ids}
        old_indices = [
            i for i, key in enumerate(self.keys) if key[0] in running_ids and key not in last_index
        ]
        self.keys = [*last_index, *(self.keys[i] for i in old_indices)]
        new_past = tails.select(list(last_index.values()))
        if old_indices:
            old_past = self.past.select(old_indices)
            leaves = {
                name: [np.concatenate(pair) for pair in zip(xs, old_past.leaves[name], strict=True)]
                for name, xs in new_past.leaves.items()
            }
            new_past = TrajectoryHistory(
                np.concatenate([new_past.num_rows, old_past.num_rows]), leaves
            )
        self.past = new_past

    def get_state(self) -> dict[str, Any]:
        """Returns the remembered rows as plain values and arrays."""
        leaves = {name: list(parts) for name, parts in self.past.leaves.items()}
        return {
            "keys": np.array(self.keys, np.int64),
            "known": self.past.num_rows,
            "leaves": leaves,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Lookback:
        """Restores what `get_state` returned."""
        lookback = cls()
        lookback.keys = [(int(episode), int(agent)) for episode, agent in state["keys"]]
        leaves = {name: [np.asarray(x) for x in parts] for name, parts in state["leaves"].items()}
        lookback.past = TrajectoryHistory(np.asarray(state["known"]), leaves)
        return lookback
