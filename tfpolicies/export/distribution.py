"""Describes the action distribution in a spec, to interpret `action_dist_inputs`."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.models.action_mapping import ActionMapping
from tfpolicies.models.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    MultiCategorical,
    SquashedGaussian,
)
from tfpolicies.models.distributions.base import is_distribution
from tfpolicies.models.distributions.gaussian import LOG_STD_RANGE
from tfpolicies.models.spaces import Leaf, choices_per_cell, get_scale_and_center, is_float_box
from tfpolicies.program.program import Program
from tfpolicies.program.spec import ProgramSpec

_KINDS: dict[Any, str] = {
    Categorical: "choices",
    MultiCategorical: "choices",
    Bernoulli: "bits",
    DiagGaussian: "normal",
    SquashedGaussian: "squashed_normal",
}
_VALUES = "q_values"  # the output of policies whose distribution inputs are values of actions


def describe_distribution(program: Program) -> list[dict[str, Any]]:
    """Returns the distribution of the actions of each leaf, as JSON values, one record per leaf.

    Each has the leaf's `path`, a `kind` and its `columns` of `action_dist_inputs`, as start and end
    (exclusive). The kinds are:

    * `choices`: logits, cell by cell, with the `sizes` of the cells;
    * `bits`: a logit for each bit;
    * `values`: the value of each action; the action with the largest value is chosen;
    * `normal`: means, then logarithms of standard deviations, of normalised actions;
      `squashed_normal`: the same, clipped to `log_std_range` and put through tanh;
    * `other`: unknown.

    Leaves of integers also have `first`, the environment's number for choice 0 of each cell. Boxes
    of floats have `low` and `high` (None where there is no bound), `half_width` and `middle`, which
    convert normalised actions to the environment's units, and whether these are `clipped`.
    """
    leaves, kinds = program.spec.action_mapping.leaves, program.spec.dist_class.leaf_classes
    is_supported = len(kinds) == len(leaves) and all(map(is_distribution, kinds))
    if not is_supported or has_custom_sampling(program.spec):
        return [_make_record(program, leaf, "other", [0, 0]) for leaf in leaves]
    has_values = any(port.name == _VALUES for port in program.act_layout.get_ports())
    records, start = [], 0
    for leaf, kind in zip(leaves, kinds, strict=True):
        stop = start + kind.num_inputs(leaf.space)
        name = "values" if has_values else _KINDS.get(kind, "other")
        records.append(_make_record(program, leaf, name, [start, stop]))
        start = stop
    return records


def has_custom_sampling(spec: ProgramSpec) -> bool:
    """Returns whether the class defines sampling itself, so that the distribution is unknown."""
    owner = spec.policy_class
    return owner._overrides("action_sampler_fn") or owner._overrides("action_distribution_fn")


def _make_record(program: Program, leaf: Leaf, kind: str, columns: list[int]) -> dict[str, Any]:
    record: dict[str, Any] = {"path": list(leaf.path), "kind": kind, "columns": columns}
    space: Any = leaf.space
    if is_float_box(space):
        if kind == "squashed_normal":
            record["log_std_range"] = list(LOG_STD_RANGE)
        return {**record, **_describe_range(program.spec.action_mapping, space)}
    lowest = getattr(space, "start", getattr(space, "low", 0))  # a MultiBinary has neither
    first = np.broadcast_to(lowest, leaf.shape).reshape(-1)
    return {**record, "sizes": list(choices_per_cell(space)), "first": first.tolist()}


def _describe_range(mapping: ActionMapping, space: spaces.Box) -> dict[str, Any]:
    low, high = (x.astype(np.float64).reshape(-1) for x in (space.low, space.high))
    half_width, middle = np.ones_like(low), np.zeros_like(low)
    if mapping.normalize:
        half_width, middle = get_scale_and_center(low, high)
    return {
        "low": _to_json_bounds(low),
        "high": _to_json_bounds(high),
        "half_width": half_width.tolist(),
        "middle": middle.tolist(),
        "clipped": mapping.normalize or mapping.clip,
    }


def _to_json_bounds(bounds: np.ndarray) -> list[float | None]:
    return [x if np.isfinite(x) else None for x in bounds.tolist()]
