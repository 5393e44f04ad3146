"""The newest sampled actions of each policy, for histograms."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpolicies.batch.leaves import iterate_named_leaves
from tfpolicies.batch.sample_batch import SampleBatch

_MAX_BATCHES = 64  # of one policy; algorithms with replay sample small ones
_MAX_ROWS = 1024
_MAX_COMPONENTS = 16  # of one leaf of the action space


class RecentActions:
    """Keeps references to the actions of the newest batches; they are never written again."""

    def __init__(self) -> None:
        self._columns: dict[str, deque[Any]] = {}

    def add(self, policy_id: str, batch: Mapping[str, Any]) -> None:
        actions = batch.get(SampleBatch.ACTIONS)
        if actions is not None:
            self._columns.setdefault(policy_id, deque(maxlen=_MAX_BATCHES)).append(actions)

    def get_components(self) -> dict[str, np.ndarray]:
        """Returns at most 1,024 values of each component of the actions, `[n]`.

        Keys are `actions/<policy id>`, followed by the path in a nested action space and the number
        of the component, if there are several. Actions are as policies give them: normalised.
        """
        components: dict[str, np.ndarray] = {}
        for policy_id, columns in self._columns.items():
            leaves: dict[str, list[np.ndarray]] = {}
            num_rows = 0
            for column in reversed(columns):
                if num_rows >= _MAX_ROWS:
                    break
                named_leaves = dict(iterate_named_leaves({f"actions/{policy_id}": column}))
                num_rows += len(next(iter(named_leaves.values())))
                for name, leaf in named_leaves.items():
                    leaves.setdefault(name, []).append(np.asarray(leaf))
            for name, arrays in leaves.items():
                components |= _split_components(name, np.concatenate(arrays))
        return components


def _split_components(name: str, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the components of actions `[n, ...]` by name."""
    if actions.dtype.kind not in "iuf":
        return {}
    rows = actions[:: max(1, -(-len(actions) // _MAX_ROWS))]
    rows = rows.reshape(len(rows), -1)
    if rows.shape[1] == 1:
        return {name: rows[:, 0]}
    return {f"{name}/{i}": rows[:, i] for i in range(min(rows.shape[1], _MAX_COMPONENTS))}
