"""Finds the cause of NaN or infinity in an update: the first minibatch, and its first such term."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfpolicies.base.finite_checks import find_first_non_finite
from tfpolicies.program.functions import ProgramFunctions
from tfpolicies.program.minibatches import StepInputs
from tfpolicies.program.optimizers import strip_variables
from tfpolicies.program.policy_state import PolicyState


class NaNCause(NamedTuple):
    """The cause of an update that is not finite."""

    term: str  # the first one that was not finite, with its value
    where: str = ""  # the minibatch; "" if there is only one

    @classmethod
    def from_term(cls, term: tuple[str, float] | None) -> NaNCause:
        """Returns the cause from the first non-finite number; None: it occurs only traced."""
        return cls("the loss, but only traced" if term is None else "{} ({})".format(*term))


_TOTAL_NAMES = ("total_loss", "loss")
"""Statistics that are sums of others, which are more specific."""


def bisect_last_finite(
    state: PolicyState, steps: int, run_steps: Callable[[int], tuple[PolicyState, bool]]
) -> tuple[PolicyState, int]:
    """Returns the state before the first step of an update that is not finite, by bisection.

    Args:
        state: before the update.
        steps: of the update.
        run_steps: repeats that many steps; returns the resulting state, and whether all is finite.

    Returns:
        The state, and the number of steps before it.
    """
    finite, failed = 0, steps
    while failed - finite > 1:
        middle = (finite + failed) // 2
        candidate, is_finite = run_steps(middle)
        if is_finite:
            state, finite = candidate, middle
        else:
            failed = middle
    return state, finite


def find_first_non_finite_term(
    functions: ProgramFunctions,
    state: PolicyState,
    columns: Mapping[str, Any],
    inputs: StepInputs,
) -> tuple[str, float] | None:
    """Runs the loss of one minibatch untraced; returns the first term that is not finite.

    The resident variables of `functions` must hold the state, and are changed. Returns None if all
    terms are finite.
    """
    return next(
        filter(None, map(find_first_non_finite, _iter_terms(functions, state, columns, inputs))),
        None,
    )


def _iter_terms(
    functions: ProgramFunctions,
    state: PolicyState,
    columns: Mapping[str, Any],
    inputs: StepInputs,
) -> Iterator[dict[str, Any]]:
    """Yields the terms of an update, by name, in the order in which they are computed."""
    for name, column in columns.items():
        yield from ({f"train_batch[{name!r}]": leaf} for leaf in tf.nest.flatten(column))
    names = functions.spec.hyperparameters
    yield {name: state.hyperparameters[names.index(name)] for name in functions.spec.learning_rates}
    weights = {
        slot.key: state.arrays[slot.key]
        for slot in state.layout.get_slots(*state.layout.updated_parts)
    }
    yield {f"weights[{key!r}]": x for key, x in weights.items()}
    tensors = tf.nest.map_structure(tf.constant, dict(columns))
    loss = functions.differentiate_minibatch(
        tf.constant(state.hyperparameters), tensors, inputs, in_turn=True
    )
    totals = {name: x for name, x in loss.stats.items() if name in _TOTAL_NAMES}
    yield {name: x for name, x in loss.stats.items() if name not in totals}
    yield totals
    yield {"the loss": loss.loss}
    gradients = [x for x in tf.nest.flatten(strip_variables(loss.pairs)) if x is not None]
    yield {f"gradients[{i}]": tf.convert_to_tensor(x) for i, x in enumerate(gradients)}
