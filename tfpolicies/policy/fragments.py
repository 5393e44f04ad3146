"""Samples of many environments at once, as postprocessing gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfpolicies.models.ports import OBS, get_unmasked_leaf_indices
from tfpolicies.models.spaces import batch_leaves


@dataclass
class Fragments:
    """The columns of N environments, T steps each, for postprocessing in one pass.

    Attributes:
        columns: `[N, T, ...]` arrays by name: rewards, terminateds, truncateds, acting extras.
        ends: bool `[N, T]`: the step is the last of its trajectory piece (terminated, truncated, or
            the end of the fragment).
        policy: the policy whose trajectories these are.
        bootstrap_indices: the indices `(n, t)` of ends that are not terminated, where values are
            bootstrapped: two int arrays `[K]`.
        bootstrap_inputs: the inputs of acting after these steps: final observation leaves, views,
            recurrent state; `[K, ...]` each.
        new_columns: columns that postprocessing adds, `[N, T, ...]` arrays by name; may replace
            columns.
        next_obs_index: int `[N, T]`, set by postprocessing: the step whose `new_obs` each row gets;
            None if each row keeps its own.
    """

    columns: Mapping[str, np.ndarray]
    ends: np.ndarray
    policy: Any
    bootstrap_indices: tuple[np.ndarray, np.ndarray]
    bootstrap_inputs: list[np.ndarray]
    new_columns: dict[str, np.ndarray] = field(default_factory=dict)
    next_obs_index: np.ndarray | None = None

    @classmethod
    def from_trajectory(cls, policy: Any, batch: Mapping[str, Any]) -> Fragments:
        """Returns the fragments of one trajectory's batch, which ends with its last row."""
        rows = len(batch["rewards"])
        ends = np.zeros((1, rows), bool)
        ends[0, -1] = True
        columns = {
            name: np.asarray(batch[name])[None]
            for name in ("rewards", "terminateds", "truncateds", "vf_preds")
            if name in batch
        }
        ports = policy.program.ports
        next_obs = batch_leaves(ports.obs_leaves, batch["new_obs"], "new_obs")
        last_inputs = [leaf[-1:] for leaf in next_obs]
        unmasked = [last_inputs[i] for i in get_unmasked_leaf_indices(ports.space)]
        for view in ports.views:
            stored_view = view.next_step_view or view
            view_leaves = batch_leaves(
                stored_view.leaves, batch[stored_view.name], stored_view.name
            )
            source = batch[view.source]
            if view.source == OBS:
                source = source["observations"] if any(ports.is_mask) else source
            source_leaves = batch_leaves(view.source_leaves, source, view.source)
            last_inputs += view.advance(
                [x[-1:] for x in view_leaves], [x[-1:] for x in source_leaves], unmasked
            )
        last_inputs += [np.asarray(batch[f"state_out_{i}"])[-1:] for i in range(len(ports.states))]
        if batch["terminateds"][-1]:
            no_indices = np.zeros(0, int)
            return cls(
                columns, ends, policy, (no_indices, no_indices), [leaf[:0] for leaf in last_inputs]
            )
        return cls(columns, ends, policy, (np.array([0]), np.array([rows - 1])), last_inputs)

    def get_next_values(self) -> np.ndarray:
        """Returns the value of the next observation of each step, float32 `[N, T]`.

        Within a piece it is the next step's `vf_preds`. At an end that is not terminated it is the
        model's value of the final observation. It is 0 where the episode terminated.
        """
        values = self.columns["vf_preds"]
        result = np.empty_like(values)
        result[:, :-1] = values[:, 1:]
        result[self.ends] = 0.0
        if len(self.bootstrap_indices[0]):
            result[self.bootstrap_indices] = self.policy.compute_values(self.bootstrap_inputs)
        return result
