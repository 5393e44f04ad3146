"""Compares the actions of artefacts with rounded weights to those of their policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.errors import ExportError
from tfpolicies.export.verify import Comparison, Runner
from tfpolicies.models.spaces import Leaf, get_at_path
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.program import Program

DEFAULT_ROWS = 1000
MAX_RELATIVE_ERROR = 0.01


class Agreement(NamedTuple):
    """The share of greedy actions that are equal to the policy's.

    Real-valued actions count as equal if no number differs by more than 1 % of the largest absolute
    value of its column, or of 1 if that is smaller. Choices must be the same.
    """

    observations: int
    given: bool  # whether the caller gave the observations; otherwise they are random
    equal_actions: float  # the share of all observations
    largest_difference: float  # of real-valued actions, relative to the largest of the column


def measure_agreement(
    run: Runner, program: Program, state: PolicyState, observations: Sequence[np.ndarray] | None
) -> Agreement:
    """Compares greedy actions of an artefact to those of its policy.

    Other inputs of the policy are random: earlier steps, and recurrent states that the policy
    reaches within three steps. `run(signature, inputs)` returns the artefact's outputs by name.
    `observations` are one array `[N, *shape]` per leaf; None for 1000 random ones.
    """
    rows = DEFAULT_ROWS if observations is None else len(observations[0])
    comparison = Comparison(run, program, state)
    inputs = comparison.draw_inputs(rows, 1)
    if observations is not None:
        inputs[: len(observations)] = [x[:, None] for x in observations]
    noise = np.zeros((rows, 1, program.ports.noise_size), np.float32)
    outputs, reference = comparison.run_both(inputs, np.ones(rows, np.int32), noise)
    equal, largest = np.ones(rows, bool), 0.0
    for port in program.act_layout.env_actions:
        name = port.name.replace("env_actions", "actions", 1)
        actual, expected = (
            x[name].reshape(rows, -1).astype(np.float64) for x in (outputs, reference)
        )
        scale = np.maximum(1.0, np.abs(expected).max(axis=0, initial=0.0))  # of each column
        error = np.abs(actual - expected) / scale
        equal &= (error <= (MAX_RELATIVE_ERROR if reference[name].dtype.kind == "f" else 0.0)).all(
            axis=1
        )
        if reference[name].dtype.kind == "f":
            largest = max(largest, float(error.max(initial=0.0)))
    return Agreement(rows, observations is not None, float(equal.mean()), largest)


def check_observations(program: Program, observations: Structure) -> list[np.ndarray]:
    """Returns the caller's observations as one array `[N, *shape]` per leaf."""
    arrays = [_get_leaf(observations, leaf) for leaf in program.ports.obs_leaves]
    if not len(arrays[0]) or len({len(array) for array in arrays}) > 1:
        raise ExportError(
            f"observations must have the same number of rows in each part, at least one, got "
            f"{[len(array) for array in arrays]}. Give a batch of observations."
        )
    return arrays


def _get_leaf(observations: Structure, leaf: Leaf) -> np.ndarray:
    shape = f"[N, {', '.join(map(str, leaf.shape))}]" if leaf.shape else "[N]"
    name = f"observations{'/'.join(('', *leaf.path))}"
    try:
        array = np.asarray(get_at_path(observations, leaf.path), leaf.dtype)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ExportError(
            f"{name} must be an array {shape} of {leaf.dtype}, but cannot be read: "
            f"{type(error).__name__}: {error}. Give observations nested as the space is."
        ) from error
    if array.ndim < 1 or array.shape[1:] != leaf.shape:
        raise ExportError(
            f"{name} must have the shape {shape}, got {list(array.shape)}. Give a batch of "
            "observations, nested as the observation space is."
        )
    return array
