"""What a policy with a Program keeps of itself: weights, states, and how they are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.errors import WeightsError
from tfpolicies.program.program import Program
from tfpolicies.state import PolicyState, StateLayout


def matched(layout: StateLayout, values: Any, part: str, argument: str) -> dict[str, np.ndarray]:
    """Returns the arrays of one part of a state by key, in the layout's dtypes.

    Args:
        layout: the layout of the state.
        values: a dict with the layout's keys; or, if its keys are others, and for a list, arrays in
            the layout's order.
        part: "model", "filter", "target" or "learner".
        argument: what `values` is called in messages.

    Raises:
        WeightsError: if number, types or shapes differ.
    """
    slots = layout.of(part)
    if isinstance(values, Mapping):
        if set(values) == {slot.key for slot in slots}:
            values = [values[slot.key] for slot in slots]
        else:
            values = list(values.values())
    elif not isinstance(values, Sequence):
        raise WeightsError(
            f"{argument} must be a dict or a list of arrays, got {type(values).__name__}."
        )
    if len(values) != len(slots):
        raise WeightsError(
            f"{argument} has {len(values)} arrays, but this policy has {len(slots)}: "
            f"{', '.join(slot.key for slot in slots)}."
        )
    found = {}
    for slot, value in zip(slots, values, strict=True):
        name = f"{argument}[{slot.key!r}]"
        try:
            array = np.asarray(value, slot.dtype)
        except (TypeError, ValueError) as error:
            raise WeightsError(f"{name} must be an array of {slot.dtype}: {error}") from error
        if array.shape != slot.shape:
            raise WeightsError(f"{name} must have shape {slot.shape}, got {array.shape}.")
        found[slot.key] = array
    return found


def state_of(program: Program, state: PolicyState) -> dict[str, Any]:
    """Returns what a policy owns, as copies; see `TFPolicy.get_state` for the keys."""
    names = program.spec.hyperparameters
    return {
        "weights": state.copy_of("model"),
        "target_weights": state.copy_of("target"),
        "_optimizer_variables": state.copy_of("learner"),
        "global_timestep": state.global_timestep,
        "num_grad_updates": state.num_grad_updates,
        "hyperparameters": {name: float(x) for name, x in zip(names, state.hyper, strict=True)},
        "rng": state.rng.bit_generator.state,
    }


def checked_state(
    program: Program, state: PolicyState, given: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Checks that a given state fits; returns its arrays by key and its hyper-parameters.

    Raises:
        KeyError: if `weights` or `global_timestep` is missing.
        WeightsError: if an array does not fit.
    """
    _ = given["global_timestep"]
    layout, names = program.layout, program.spec.hyperparameters
    arrays = matched(layout, given["weights"], "model", "state['weights']")
    if layout.of("target"):
        target = given.get("target_weights") or list(arrays.values())
        arrays.update(matched(layout, target, "target", "state['target_weights']"))
    slots = given.get("_optimizer_variables")
    if slots is not None:
        arrays.update(matched(layout, slots, "learner", "state['_optimizer_variables']"))
    hyper = state.hyper.copy()
    for name, value in given.get("hyperparameters", {}).items():
        if name not in names:
            raise WeightsError(
                f"state['hyperparameters'] has {name!r}, unknown to a "
                f"{program.spec.policy_class.__name__}."
            )
        hyper[names.index(name)] = value
    return arrays, hyper


def restore_state(program: Program, state: PolicyState, given: Mapping[str, Any]) -> None:
    """Overwrites what a policy owns; everything is checked before anything changes."""
    arrays, hyper = checked_state(program, state, given)
    timestep = int(given["global_timestep"])
    updates = int(given.get("num_grad_updates", state.num_grad_updates))
    if "rng" in given:
        state.rng.bit_generator.state = given["rng"]
    state.write(arrays)
    state.hyper[...] = hyper
    state.global_timestep = timestep
    state.num_grad_updates = updates
