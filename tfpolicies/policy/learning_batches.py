"""Batches on their way to a learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.models.spaces import nest
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.view import nested_rows

_DUMMY_ROWS = 4


def dummy_batch(policy: Any) -> SampleBatch:
    """Returns a small postprocessed batch of zeros with every column a loss may read.

    The policy's own counters and generator stay as they are.
    """
    spec = policy.program.spec
    rows = _DUMMY_ROWS

    def obs() -> Any:
        leaves = [np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in spec.obs_leaves]
        return nest(spec.observation_space, leaves)

    columns: dict[str, Any] = {"obs": obs(), "new_obs": obs()}
    renamed = {"logp": "action_logp", "prob": "action_prob", "values": "vf_preds"}
    renamed |= {"dist_inputs": "action_dist_inputs"}
    for name, shape, dtype in policy.program.output_shapes():
        if name != "env_actions":
            columns[renamed.get(name, name)] = np.zeros((rows, *shape), dtype)
    columns["rewards"] = np.zeros(rows, np.float32)
    columns["prev_actions"] = columns["actions"]
    columns["prev_rewards"] = columns["rewards"]
    columns["terminateds"] = np.arange(rows) == rows - 1  # so that nothing is bootstrapped
    columns["truncateds"] = np.zeros(rows, bool)
    columns["weights"] = np.ones(rows, np.float32)
    for name in ("eps_id", "unroll_id", "agent_index", "t"):
        columns[name] = np.zeros(rows, np.int64)
    return policy.postprocess_trajectory(SampleBatch(columns), {}, None)


def with_travel_dtypes(spec: ProgramSpec, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a batch with observations and floats in the dtypes that travel."""
    columns: dict[str, Any] = {}
    for name, column in batch.items():
        if name in ("obs", "new_obs"):
            columns[name] = nested_rows(spec.obs_leaves, column, name)
        elif name not in ("infos", "seq_lens"):
            array = np.asarray(column)
            columns[name] = array.astype(np.float32) if array.dtype == np.float64 else array
    return columns
