"""Preparation of batches for learning: dummy batches, postprocessing, checks and sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.base.finite_checks import all_finite
from tfpolicies.batch.rnn_sequencing import compute_sequence_lengths
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_builder import Trajectories
from tfpolicies.errors import BatchError, MissingColumnError, ObservationError, UsageError
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.ports import SEQ_LENS, make_previous_step_views
from tfpolicies.models.spaces import Leaf, batch_leaves, choices_per_cell, is_float_box, unflatten
from tfpolicies.policy.hooks import TFPolicyHooks
from tfpolicies.policy.policy import Policy

_DUMMY_ROWS = 4
_MAX_INT64 = np.iinfo(np.int64).max
_COLUMNS_BY_PORT = {
    "logp": "action_logp",
    "prob": "action_prob",
    "dist_inputs": "action_dist_inputs",
    "values": "vf_preds",
}


def make_dummy_batch(policy: TFPolicyHooks) -> SampleBatch:
    """Returns a small postprocessed batch of zeros with every column a loss may read.

    The policy's own counters and generator stay as they are.
    """
    program, rows = policy.program, _DUMMY_ROWS
    spec, layout = program.spec, program.act_layout

    def obs() -> Any:
        return unflatten(spec.observation_space, [port.zeros(rows) for port in program.ports.obs])

    def actions() -> Any:
        return unflatten(spec.action_space, [port.zeros(rows) for port in layout.actions])

    columns: dict[str, Any] = {"obs": obs(), "new_obs": obs(), "actions": actions()}
    action_ports = {*layout.actions, *layout.env_actions}
    for port in layout.get_ports():
        if port not in action_ports:
            columns[_COLUMNS_BY_PORT.get(port.name, port.name)] = port.zeros(rows)
    columns |= {port.name: port.zeros(rows) for port in program.ports.states}
    columns["rewards"] = np.zeros(rows, np.float32)
    for view in {
        any_view.name: any_view
        for any_view in (*make_previous_step_views(spec.action_space), *program.ports.views)
    }.values():
        for stored_view in filter(None, (view, view.next_step_view)):
            columns[stored_view.name] = stored_view.unflatten(
                [port.zeros(rows) for port in stored_view.ports]
            )
    columns["terminateds"] = np.arange(rows) == rows - 1  # avoids bootstrapping
    columns["truncateds"] = np.zeros(rows, bool)
    columns["weights"] = np.ones(rows, np.float32)
    for name in ("eps_id", "unroll_id", "agent_index", "t"):
        columns[name] = np.zeros(rows, np.int64)
    columns[SampleBatch.INFOS] = np.array([{} for _ in range(rows)], object)
    columns |= Trajectories(columns["terminateds"]).build_views(
        columns, policy._get_views().added_views
    )
    policy._uses_dummy_batch = True
    try:
        return run_postprocessing(policy, SampleBatch(columns), {}, None)
    except MissingColumnError as error:
        error.add(
            f"{type(policy).__name__}.postprocess_trajectory was run on a batch of zeros, to find "
            "the columns that it adds. Columns that only your compute_actions or callbacks add are "
            "not in it: read them by `sample_batch.get(name, default)`."
        )
        raise
    finally:
        policy._uses_dummy_batch = False


def run_postprocessing(
    policy: Policy, batch: SampleBatch, other_agent_batches: Mapping[Any, Any], episode: Any
) -> SampleBatch:
    """Returns the result of a policy's own `postprocess_trajectory` for one trajectory."""
    result = policy.postprocess_trajectory(batch.copy(shallow=True), other_agent_batches, episode)
    if not isinstance(result, SampleBatch):
        raise UsageError(
            f"{type(policy).__name__}.postprocess_trajectory must return a SampleBatch, got "
            f"{type(result).__name__}; return its argument sample_batch, with the columns added."
        )
    return result


def require_actions(leaves: Sequence[Leaf], batch: Mapping[str, Any]) -> None:
    """Checks that the actions of a batch are in their space, and that real numbers are finite.

    Real numbers may be outside of the bounds of their Box, as sampled ones are. Columns with other
    shapes are not checked here; the code that reads the batch does.
    """
    if SampleBatch.ACTIONS not in batch:
        return
    try:
        arrays = batch_leaves(leaves, batch[SampleBatch.ACTIONS], "actions")
    except ObservationError:
        return
    for leaf, array in zip(leaves, arrays, strict=True):
        if is_float_box(leaf.space):
            if all_finite((array,)):
                continue
            is_wrong, rule = ~np.isfinite(array), "must be finite"
        else:
            sizes = [min(size, _MAX_INT64) for size in choices_per_cell(leaf.space)]
            unsigned = array.view(f"u{array.itemsize}")  # makes negative numbers the largest
            if not array.size or unsigned.max() < min(sizes):
                continue
            is_wrong = (array < 0) | (array >= np.reshape(sizes, leaf.shape))
            rule = f"must be choices of {leaf.space}, counted from 0"
        rows = np.flatnonzero(is_wrong.reshape(len(array), -1).any(axis=1))
        if len(rows):
            raise BatchError(
                f"The column {leaf.name('actions')!r} {rule}, but row {rows[0]} is "
                f"{array[rows[0]].tolist()!r:.200}; {len(rows)} of {len(array)} rows are wrong. "
                "Correct them, or leave them out."
            )


def make_sequence_batch(batch: SampleBatch, policy: Policy) -> SampleBatch:
    """Converts a batch with the recurrent state of each row into sequences, without padding.

    A sequence ends with its unroll, and after `max_seq_len` rows. `state_in_<i>` keeps the
    recurrent state at the start of each sequence.
    """
    max_seq_len = int({**MODEL_DEFAULTS, **policy.config.get("model", {})}["max_seq_len"])
    lengths = compute_sequence_lengths([batch[SampleBatch.UNROLL_ID]], batch.count, max_seq_len)
    starts = np.cumsum(lengths) - lengths
    columns: dict[str, Any] = {}
    for name, column in batch.items():
        if not name.startswith("state_out_"):
            columns[name] = column[starts] if name.startswith("state_in_") else column
    result = SampleBatch({**columns, SEQ_LENS: lengths.astype(np.int32)})
    result.num_grad_updates = batch.num_grad_updates
    return result
