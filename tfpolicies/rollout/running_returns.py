"""Running discounted returns of trajectories that span several fragments."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tfpolicies.batch.postprocessing import running_returns
from tfpolicies.rollout.trajectory_packing import Packing


class RunningReturns:
    """Accumulates the discounted rewards of one policy across fragments.

    Attributes:
        last_returns: R of the last row of each unfinished trajectory, by episode id and agent
            index.
    """

    def __init__(self, returns: Mapping[tuple[int, int], float] | None = None) -> None:
        self.last_returns = dict(returns or {})

    def add(
        self,
        columns: Mapping[str, np.ndarray],
        ends: np.ndarray,
        packing: Packing,
        running_ids: Collection[int],
        *,
        gamma: float,
    ) -> np.ndarray:
        """Returns R_t = gamma R_(t-1) + r_t of each row, float64 `[R]`.

        Args:
            columns: of the rows `[R]`, trajectory after trajectory.
            ends: bool `[R]`: the last row of each trajectory.
            packing: the position of each row in an array `[N, T]`.
            running_ids: the ids of episodes that have further rows.
            gamma: the discount.
        """
        last_rows = np.flatnonzero(ends)
        episodes, agents = (columns[name][last_rows].tolist() for name in ("eps_id", "agent_index"))
        keys = list(zip(episodes, agents, strict=True))
        initial = np.zeros(len(ends))
        # A second trajectory of one agent begins where a life was lost.
        is_continuation = [
            False,
            *(key == previous_key for previous_key, key in itertools.pairwise(keys)),
        ]
        initial[[0, *(last_rows[:-1] + 1)]] = [
            0.0 if begins else self.last_returns.get(key, 0.0)
            for key, begins in zip(keys, is_continuation, strict=True)
        ]
        packed = map(packing.pack, (columns["rewards"], ends, initial))
        result = packing.unpack(running_returns(*packed, gamma=gamma))
        carried = np.where(columns["terminateds"], 0.0, result)[last_rows]
        self.last_returns.update(zip(keys, carried.tolist(), strict=True))
        self.last_returns = {
            key: value for key, value in self.last_returns.items() if key[0] in running_ids
        }
        return result

    def get_state(self) -> dict[str, np.ndarray]:
        keys = np.array(list(self.last_returns), np.int64).reshape(-1, 2)
        return {"keys": keys, "returns": np.array(list(self.last_returns.values()), np.float64)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunningReturns:
        keys = [tuple(key) for key in np.asarray(state["keys"]).tolist()]
        return cls(dict(zip(keys, np.asarray(state["returns"]).tolist(), strict=True)))
