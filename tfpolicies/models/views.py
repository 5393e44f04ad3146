"""The views that a model reads while it acts.

A model declares them by the names of its inputs (`prev_actions`, `prev_rewards`; `prev_n_obs`,
`prev_n_actions`, `prev_n_rewards` for the number of steps of their first axis), or by its
attribute `view_requirements`, a dict of view requirements by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras
from gymnasium import spaces

from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.inspection import PREV_N, extra_inputs, is_one_of, named_inputs
from tfpolicies.models.ports import ACTIONS, NUMBER, OBS, PREVIOUS, REWARDS, View, model_space

_COLLECTED = (
    *("actions", "rewards", "new_obs", "terminateds", "truncateds", "infos", "eps_id", "unroll_id"),
    *("agent_index", "t", "seq_lens", "vf_preds", "action_logp", "action_prob", "noise"),
    *("action_dist_inputs", "advantages", "value_targets"),
)
_Source: TypeAlias = tuple[str, tuple[int, ...], bool]
"""A collected column, the shifts that are read, and whether they form a window."""
_LAST_N = dict(zip(PREV_N, (OBS, ACTIONS, REWARDS), strict=True))


def views_of(
    model: keras.Model, observation_space: spaces.Space, action_space: spaces.Space
) -> tuple[View, ...]:
    """Returns the views that a model reads while it acts: the previous action and reward first.

    Raises:
        ModelError: if a view is not available; the message names it.
    """
    of_source = {OBS: model_space(observation_space), ACTIONS: action_space, REWARDS: NUMBER}
    required, inputs = acting_requirements(model), named_inputs(model) or {}
    names = extra_inputs(model)
    found: dict[str, _Source]
    found = {name: (PREVIOUS[name], (-1,), False) for name in PREVIOUS if _is_named(name, names)}
    for name, source in _LAST_N.items():
        if name not in required and _is_named(name, names):
            count = _steps_of(model, name, inputs)
            first = 1 - count if source == OBS else -count
            found[name] = source, tuple(range(first, first + count)), True
    found |= {name: _requested(model, name, view) for name, view in required.items()}
    return tuple(
        View(name, source, of_source[source], shifts, is_window)
        for name, (source, shifts, is_window) in sorted(found.items(), key=_order)
    )


def _order(item: tuple[str, Any]) -> int:
    """Sorts the previous action first, then the previous reward."""
    return [*PREVIOUS].index(item[0]) if item[0] in PREVIOUS else len(PREVIOUS)


def _is_named(view: str, names: Sequence[str]) -> bool:
    return any(is_one_of((view,), name) for name in names)


def _steps_of(model: keras.Model, name: str, inputs: Mapping[str, tuple]) -> int:
    shape = next(shape for key, shape in inputs.items() if _is_named(name, [key]))
    memory = any(key.startswith("state_in_") for key in inputs)
    steps = shape[1 + memory] if len(shape) > 1 + memory else None
    if not isinstance(steps, int):
        raise ModelError(
            f"The input {name!r} of the model {model.name!r} must have a known number of steps, "
            f"but has the shape {tuple(shape[1:])}. Write keras.Input((4, ...), name={name!r}) for "
            "four."
        )
    return steps


class ViewsRead(dict[str, Any]):
    """View requirements derived from the views that a model reads, not declared by it."""


def declared(model: keras.Model) -> Mapping[str, Any]:
    """Returns the view requirements that a model declares as an attribute, by name."""
    found: Mapping[str, Any] = getattr(model, "view_requirements", None) or {}
    return {} if isinstance(found, ViewsRead) else found


def acting_requirements(model: keras.Model) -> dict[str, Any]:
    """Returns the requirements of a model for acting, besides the observation and the memory."""
    return {
        name: view
        for name, view in declared(model).items()
        if view.used_for_compute_actions and name != OBS and not name.startswith("state_")
    }


def _requested(model: keras.Model, name: str, requirement: Any) -> _Source:
    """Returns source, shifts and form of a view that a model requires for acting.

    Raises:
        ModelError: if it is not available.
    """
    requirement.require_causal(name)
    if name in _COLLECTED or not name.isidentifier():
        raise ModelError(
            f"The model {model.name!r} requires a view {name!r}, but a collected column has that "
            "name, or an input cannot have it. Give the view another name of letters, digits "
            "and '_'."
        )
    source = requirement.data_col or name
    shifts = tuple(requirement.shift_arr.tolist())
    here = f"view_requirements[{name!r}] of the model {model.name!r}"
    known = (OBS, ACTIONS, REWARDS)
    if source not in known:
        raise ModelError(
            f"{here} has the data_col {source!r}, but only {', '.join(known)} are available while "
            "acting. Store outputs of the model in a memory; with used_for_compute_actions=False "
            "the loss can read any column."
        )
    last = 0 if source == OBS else -1
    if max(shifts) > last:
        raise ModelError(
            f"{here} has the shift {requirement.shift!r}, but {source!r} is known up to the shift "
            f"{last} when the model acts. Reduce the shift, or set used_for_compute_actions=False."
        )
    if requirement.index is not None or requirement.batch_repeat_value != 1:
        raise ModelError(
            f"{here} must have neither index nor batch_repeat_value, but got {requirement!r}: "
            "while acting, views are relative to the current step. Use a shift."
        )
    if name in PREVIOUS and (source, shifts) != (PREVIOUS[name], (-1,)):
        raise ModelError(
            f"{here} must be {PREVIOUS[name]!r} with shift=-1, got {source!r} with the shift "
            f"{requirement.shift!r}. Give the view another name."
        )
    return source, shifts, len(shifts) > 1
