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
from tfpolicies.models.catalog.inspection import (
    LAST_N_VIEWS,
    get_extra_inputs,
    get_input_shapes,
    is_view_input,
)
from tfpolicies.models.ports import (
    ACTIONS,
    OBS,
    PREVIOUS_STEP_SOURCES,
    REWARD_SPACE,
    REWARDS,
    ViewInput,
    get_model_space,
)

_COLLECTED_COLUMNS = (
    *("actions", "rewards", "new_obs", "terminateds", "truncateds", "infos", "eps_id", "unroll_id"),
    *("agent_index", "t", "seq_lens", "vf_preds", "action_logp", "action_prob", "noise"),
    *("action_dist_inputs", "advantages", "value_targets"),
)
_Source: TypeAlias = tuple[str, tuple[int, ...], bool]
"""A collected column, the shifts that are read, and whether they form a window."""
_LAST_N_SOURCES = dict(zip(LAST_N_VIEWS, (OBS, ACTIONS, REWARDS), strict=True))


def get_view_inputs(
    model: keras.Model, observation_space: spaces.Space, action_space: spaces.Space
) -> tuple[ViewInput, ...]:
    """Returns the views that a model reads while it acts: the previous action and reward first.

    Raises:
        ModelError: if a view is not available; the message names it.
    """
    space_by_source = {
        OBS: get_model_space(observation_space),
        ACTIONS: action_space,
        REWARDS: REWARD_SPACE,
    }
    requirements, inputs = get_acting_requirements(model), get_input_shapes(model) or {}
    names = get_extra_inputs(model)
    sources: dict[str, _Source]
    sources = {
        name: (PREVIOUS_STEP_SOURCES[name], (-1,), False)
        for name in PREVIOUS_STEP_SOURCES
        if _is_named(name, names)
    }
    for name, source in _LAST_N_SOURCES.items():
        if name not in requirements and _is_named(name, names):
            num_steps = _get_num_steps(model, name, inputs)
            first_shift = 1 - num_steps if source == OBS else -num_steps
            sources[name] = source, tuple(range(first_shift, first_shift + num_steps)), True
    sources |= {name: _resolve_view(model, name, view) for name, view in requirements.items()}
    return tuple(
        ViewInput(name, source, space_by_source[source], shifts, is_window)
        for name, (source, shifts, is_window) in sorted(sources.items(), key=_sort_key)
    )


def _sort_key(item: tuple[str, Any]) -> int:
    """Sorts the previous action first, then the previous reward."""
    return (
        [*PREVIOUS_STEP_SOURCES].index(item[0])
        if item[0] in PREVIOUS_STEP_SOURCES
        else len(PREVIOUS_STEP_SOURCES)
    )


def _is_named(view: str, names: Sequence[str]) -> bool:
    return any(is_view_input((view,), name) for name in names)


def _get_num_steps(model: keras.Model, name: str, inputs: Mapping[str, tuple]) -> int:
    shape = next(shape for key, shape in inputs.items() if _is_named(name, [key]))
    has_memory = any(key.startswith("state_in_") for key in inputs)
    steps = shape[1 + has_memory] if len(shape) > 1 + has_memory else None
    if not isinstance(steps, int):
        raise ModelError(
            f"The input {name!r} of the model {model.name!r} must have a known number of steps, "
            f"but has the shape {tuple(shape[1:])}. Write keras.Input((4, ...), name={name!r}) for "
            "four."
        )
    return steps


class DerivedViewRequirements(dict[str, Any]):
    """View requirements derived from the views that a model reads, not declared by it."""


def get_view_requirements(model: keras.Model) -> Mapping[str, Any]:
    """Returns the view requirements that a model declares as an attribute, by name."""
    requirements: Mapping[str, Any] = getattr(model, "view_requirements", None) or {}
    return {} if isinstance(requirements, DerivedViewRequirements) else requirements


def get_acting_requirements(model: keras.Model) -> dict[str, Any]:
    """Returns the requirements of a model for acting, besides the observation and the memory."""
    return {
        name: view
        for name, view in get_view_requirements(model).items()
        if view.used_for_compute_actions and name != OBS and not name.startswith("state_")
    }


def _resolve_view(model: keras.Model, name: str, requirement: Any) -> _Source:
    """Returns source, shifts and form of a view that a model requires for acting."""
    requirement.require_causal(name)
    if name in _COLLECTED_COLUMNS or not name.isidentifier():
        raise ModelError(
            f"The model {model.name!r} requires a view {name!r}, but a collected column has that "
            "name, or an input cannot have it. Give the view another name of letters, digits "
            "and '_'."
        )
    source = requirement.data_col or name
    shifts = tuple(requirement.shift_arr.tolist())
    subject = f"view_requirements[{name!r}] of the model {model.name!r}"
    sources = (OBS, ACTIONS, REWARDS)
    if source not in sources:
        raise ModelError(
            f"{subject} has the data_col {source!r}, but only {', '.join(sources)} are available "
            "while acting. Store outputs of the model in a memory; with "
            "used_for_compute_actions=False the loss can read any column."
        )
    last_shift = 0 if source == OBS else -1
    if max(shifts) > last_shift:
        raise ModelError(
            f"{subject} has the shift {requirement.shift!r}, but {source!r} is known up to the "
            f"shift {last_shift} when the model acts. Reduce the shift, or set "
            "used_for_compute_actions=False."
        )
    if requirement.index is not None or requirement.batch_repeat_value != 1:
        raise ModelError(
            f"{subject} must have neither index nor batch_repeat_value, but got {requirement!r}: "
            "while acting, views are relative to the current step. Use a shift."
        )
    if name in PREVIOUS_STEP_SOURCES and (source, shifts) != (PREVIOUS_STEP_SOURCES[name], (-1,)):
        raise ModelError(
            f"{subject} must be {PREVIOUS_STEP_SOURCES[name]!r} with shift=-1, got {source!r} with "
            f"the shift {requirement.shift!r}. Give the view another name."
        )
    return source, shifts, len(shifts) > 1
