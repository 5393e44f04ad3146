"""Methods of batches and view requirements for ported code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tfpolicies.batch.leaves import count_rows, iterate_leaves, map_leaves
from tfpolicies.batch.sample_batch import DEFAULT_POLICY_ID, SampleBatch
from tfpolicies.batch.view_builder import Trajectories, TrajectoryHistory, get_history_lengths
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import BatchError, BatchUsageError, MissingColumnError
from tfpolicies.storage.spaces_json import decode_space, encode_space

_STORED_FIELDS = (
    *("data_col", "space", "shift", "index", "batch_repeat_value"),
    *("used_for_training", "used_for_compute_actions"),
)


def policy_batches(batch: SampleBatch) -> dict[str, SampleBatch]:
    """Returns the batch by policy id, in the form of `MultiAgentBatch.policy_batches`."""
    return {DEFAULT_POLICY_ID: batch}


def get_single_step_input(
    batch: SampleBatch,
    view_requirements: Mapping[str, ViewRequirement],
    index: int | Literal["last"] = "last",
) -> SampleBatch:
    """Returns the inputs of acting at one step of a trajectory, as a batch of one row.

    Steps before the batch are taken from the views of its first row, and are zero if it has none.

    Args:
        batch: one trajectory.
        view_requirements: those of a policy or model; those that acting does not read are ignored.
        index: the row; "last" is the step after the last row, which observes its `new_obs`.
    """
    if batch.layout.is_rectangular:
        raise BatchError(
            f"A single step needs rows without padding, but the batch has {batch.layout}. Get it "
            "before padding."
        )
    views = {n: v for n, v in view_requirements.items() if v.used_for_compute_actions}
    column_names = ["new_obs", *views, *_get_sources(views)]
    columns, at_end = {name: batch[name] for name in column_names if name in batch}, index == "last"
    if at_end and "obs" in columns and "new_obs" not in columns:
        raise MissingColumnError(
            f"The step after the last row observes 'new_obs', but the batch has {list(batch)}. "
            "Keep that column, or give the `index` of a row."
        )
    count = _count_rows([columns[source] for source in _get_sources(views) if source in columns])
    row_index = -1 if at_end else index
    if row_index not in range(-count, count):
        raise BatchError(f'`index` must be "last" or one of {count} rows, but got {index!r}.')
    row = int(row_index) % count
    step_views = (
        {name: _shift_to_next_step(name, view) for name, view in views.items()} if at_end else views
    )
    trajectories = Trajectories(np.arange(count) == count - 1, _make_past(columns, views))
    result = trajectories.build_views(columns, step_views)
    step = {n: map_leaves(lambda leaf: leaf[row : row + 1], x) for n, x in result.items()}
    return SampleBatch(step, seq_lens=[1])


def _get_sources(views: Mapping[str, ViewRequirement]) -> list[str]:
    return [view.data_col or name for name, view in views.items()]


def _count_rows(columns: Sequence[Any]) -> int:
    return max((count_rows(leaf) or 0 for leaf in iterate_leaves(tuple(columns))), default=0)


def _shift_to_next_step(name: str, view: ViewRequirement) -> ViewRequirement:
    """Returns a view of the next step, expressed in rows up to this one, if they suffice."""
    shifts = view.shift_arr + 1
    is_known = shifts.max() <= 0 or (view.data_col or name) == "obs"
    if view.index is not None or not is_known:
        return view
    return dataclasses.replace(view, shift=shifts.tolist())


def _make_past(
    columns: Mapping[str, Any], views: Mapping[str, ViewRequirement]
) -> TrajectoryHistory:
    """Returns the rows before the first one, as far as the views of the first row contain them."""
    depths = {name: n for name, n in get_history_lengths(views).items() if name in columns}
    past = {
        name: [np.zeros((1, n, *x.shape[1:]), x.dtype) for x in iterate_leaves(columns[name])]
        for name, n in depths.items()
    }
    for (name, view), source in zip(views.items(), _get_sources(views), strict=True):
        if name in columns and source in past and view.index is None:
            is_past = view.shift_arr < 0
            for leaf, target in zip(iterate_leaves(columns[name]), past[source], strict=True):
                first_values = np.reshape(leaf[0], (len(is_past), *target.shape[2:]))
                target[0, depths[source] + view.shift_arr[is_past]] = first_values[is_past]
    return TrajectoryHistory(np.array([max(depths.values(), default=0)]), past)


# -- view requirements as JSON ----------------------------------------------------------------


def view_to_dict(view: ViewRequirement) -> dict[str, Any]:
    """Returns a view requirement as JSON values; `"space"` describes its space."""
    space = encode_space(view.space)  # type: ignore[arg-type]  # None became a Box
    shift = view.shift if isinstance(view.shift, str) else np.asarray(view.shift).tolist()
    converted = {"space": {"space": space["type"].lower(), **space}, "shift": shift}
    return {name: getattr(view, name) for name in _STORED_FIELDS} | converted


def view_from_dict(d: Mapping[str, Any]) -> ViewRequirement:
    """Returns the view requirement from a dict made by `to_dict`.

    Raises:
        BatchUsageError: if `d` lacks one of its entries, or has others.
        CheckpointError: if its space is malformed.
    """
    if sorted(d) != sorted(_STORED_FIELDS):
        raise BatchUsageError(
            f"`d` must have {sorted(_STORED_FIELDS)}, as to_dict() returns them, got {sorted(d)}."
        )
    return ViewRequirement(**{**d, "space": decode_space(d["space"])})
