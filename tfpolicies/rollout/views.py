"""The columns that view requirements add to samples, across fragments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.view_builder import Past, Trajectories, steps_back
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
        self.past = Past(np.zeros(0, np.int64))

    def views(
        self,
        columns: Mapping[str, Any],
        ends: np.ndarray,
        requirements: Mapping[str, ViewRequirement],
        running: Collection[int],
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
        trajectories = Trajectories(ends, self._before(keys))
        found = trajectories.views(columns, requirements)
        back = {name: n for name, n in steps_back(requirements).items() if name in columns}
        if back:
            self._keep(keys, trajectories.tails(columns, list(back), max(back.values())), running)
        return found

    def _before(self, keys: Sequence[_Key]) -> Past | None:
        """Returns the remembered rows of trajectories, in their order; None if there are none."""
        place = {key: i for i, key in enumerate(self.keys)}
        rows = np.array([place.get(key, -1) for key in keys])
        if (rows < 0).all():
            return None
        found = self.past.of(rows)
        return Past(np.where(rows < 0, 0, found.known), found.leaves)

    def _keep(self, keys: Sequence[_Key], tails: Past, running: Collection[int]) -> None:
        """Remembers the unfinished ones of these and of earlier trajectories."""
        last = {key: i for i, key in enumerate(keys) if key[0] in running}
        old = [i for i, key in enumerate(self.keys) if key[0] in running and key not in last]
        self.keys = [*last, *(self.keys[i] for i in old)]
        new = tails.of(list(last.values()))
        if old:
            kept = self.past.of(old)
            leaves = {
                name: [np.concatenate(pair) for pair in zip(xs, kept.leaves[name], strict=True)]
                for name, xs in new.leaves.items()
            }
            new = Past(np.concatenate([new.known, kept.known]), leaves)
        self.past = new

    def get_state(self) -> dict[str, Any]:
        """Returns the remembered rows as plain values and arrays."""
        leaves = {name: list(parts) for name, parts in self.past.leaves.items()}
        return {"keys": np.array(self.keys, np.int64), "known": self.past.known, "leaves": leaves}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Lookback:
        """Restores what `get_state` returned."""
        lookback = cls()
        lookback.keys = [(int(episode), int(agent)) for episode, agent in state["keys"]]
        leaves = {name: [np.asarray(x) for x in parts] for name, parts in state["leaves"].items()}
        lookback.past = Past(np.asarray(state["known"]), leaves)
        return lookback
