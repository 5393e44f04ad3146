"""Batches on their way to a learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.sequences import chop_into_sequences, sequence_lengths
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.models.spaces import nest
from tfpolicies.program.functions import is_per_sequence
from tfpolicies.program.program import Program
from tfpolicies.program.view import nested_rows

_DUMMY_ROWS = 4
_IDS = {"episode_ids": "eps_id", "unroll_ids": "unroll_id", "agent_indices": "agent_index"}
_RENAMED = {
    "logp": "action_logp",
    "prob": "action_prob",
    "dist_inputs": "action_dist_inputs",
    "values": "vf_preds",
}


def dummy_batch(policy: Any) -> SampleBatch:
    """Returns a small postprocessed batch of zeros with every column a loss may read.

    The policy's own counters and generator stay as they are.
    """
    program, rows = policy.program, _DUMMY_ROWS
    spec, layout = program.spec, program.act_layout

    def obs() -> Any:
        return nest(spec.observation_space, [port.zeros(rows) for port in program.ports.obs])

    def actions() -> Any:
        return nest(spec.action_space, [port.zeros(rows) for port in layout.actions])

    columns: dict[str, Any] = {"obs": obs(), "new_obs": obs(), "actions": actions()}
    acted = {*layout.actions, *layout.env_actions}
    for port in layout.ports():
        if port not in acted:
            columns[_RENAMED.get(port.name, port.name)] = port.zeros(rows)
    columns |= {port.name: port.zeros(rows) for port in program.ports.states}
    columns["rewards"] = np.zeros(rows, np.float32)
    columns["prev_actions"] = actions()
    columns["prev_rewards"] = columns["rewards"]
    columns["terminateds"] = np.arange(rows) == rows - 1  # so that nothing is bootstrapped
    columns["truncateds"] = np.zeros(rows, bool)
    columns["weights"] = np.ones(rows, np.float32)
    for name in ("eps_id", "unroll_id", "agent_index", "t"):
        columns[name] = np.zeros(rows, np.int64)
    columns[SampleBatch.INFOS] = np.array([{} for _ in range(rows)], object)
    policy._sees_zeros = True
    try:
        return policy.postprocess_trajectory(SampleBatch(columns), {}, None)
    finally:
        policy._sees_zeros = False


def learning_columns(program: Program, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a batch as the Program learns from them, in travelling dtypes.

    For models with a memory they are sequences: `[S, T, ...]`, padded with zeros behind the
    `seq_lens` `[S]`, and the memory `[S, ...]` at the beginning of each.
    """
    columns = {name: _travelling(program, name, column) for name, column in batch.items()}
    columns = {name: column for name, column in columns.items() if column is not None}
    return _sequences(program, columns) if program.ports.is_recurrent else columns


def in_sequences(batch: SampleBatch, policy: Any) -> SampleBatch:
    """Returns a batch of rows with the memory of each as one of sequences, without padding.

    A sequence ends with its unroll, and after `max_seq_len` rows. `state_in_<i>` keeps the memory
    at the beginning of each.
    """
    steps = int({**MODEL_DEFAULTS, **policy.config.get("model", {})}["max_seq_len"])
    lengths = sequence_lengths([batch[SampleBatch.UNROLL_ID]], batch.count, steps)
    starts = np.cumsum(lengths) - lengths
    columns: dict[str, Any] = {}
    for name, column in batch.items():
        if not name.startswith("state_out_"):
            columns[name] = column[starts] if name.startswith("state_in_") else column
    made = SampleBatch({**columns, SEQ_LENS: lengths.astype(np.int32)})
    made.num_grad_updates = batch.num_grad_updates
    return made


def _travelling(program: Program, name: str, column: Any) -> Any:
    spec = program.spec
    if name in ("obs", "new_obs"):
        return nested_rows(spec.obs_leaves, column, name)
    if name in ("actions", "prev_actions"):
        return nested_rows(spec.action_leaves, column, name)
    if name == "infos" or (name == SEQ_LENS and not program.ports.is_recurrent):
        return None
    array = np.asarray(column)
    if array.dtype == object:
        return None
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _sequences(program: Program, columns: dict[str, Any]) -> dict[str, Any]:
    states = [port.name for port in program.ports.states]
    lengths = columns.get(SEQ_LENS)
    features = {name: x for name, x in columns.items() if not is_per_sequence(name)}
    steps = program.spec.time_steps
    padded, reduced, lengths = chop_into_sequences(
        feature_columns=list(features.values()),
        state_columns=[columns[name] for name in states if name in columns],
        max_seq_len=steps,
        dynamic_max=False,
        seq_lens=lengths,
        states_already_reduced_to_init=lengths is not None,
        **{argument: columns[name] for argument, name in _IDS.items() if name in columns},
    )
    count = len(lengths)

    def folded(column: Any) -> Any:
        if isinstance(column, Mapping):
            return {key: folded(part) for key, part in column.items()}
        return np.asarray(column).reshape(count, steps, *np.shape(column)[1:])

    found = {name: folded(x) for name, x in zip(features, padded, strict=True)}
    found |= dict(zip([name for name in states if name in columns], reduced, strict=True))
    return {**found, SEQ_LENS: lengths}
