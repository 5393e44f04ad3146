"""The policy under test: copies of it, and inputs for them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.leaves import iterate_leaves, split_rows
from tfpolicies.export.verify import draw_random_inputs
from tfpolicies.models.ports import InputPorts
from tfpolicies.models.spaces import (
    Leaf,
    action_leaves,
    batch_leaves,
    choices_per_cell,
    get_at_path,
    is_float_box,
    unflatten,
)
from tfpolicies.policy.policy import ActionBatch, Policy
from tfpolicies.testing.report import CheckFailed, NotApplicable

DEFAULT_ROWS = 12  # of most batches that checks act on


class PolicyUnderTest:
    """The policy under test; checks act and learn only on its copies.

    Args:
        policy: the policy to check; it is never changed.
        rows: of training batches.
        seed: of all random inputs.
        exports: whether exports may be written and run.

    Attributes:
        original: the policy.
        state: a copy of `policy.get_state()`.
        ports: the inputs of acting.
        leaves: the leaves of the action space.
    """

    def __init__(self, policy: Policy, *, rows: int, seed: int, exports: bool) -> None:
        self.original = policy
        self.rows = rows
        self.seed = seed
        self.exports = exports
        self.is_tf = policy.driver.program is not None
        self.state = copy.deepcopy(policy.get_state())
        self.leaves = action_leaves(policy.action_space)
        self.ports = get_ports(policy)

    def make_copy(self) -> Any:
        """Returns a copy of the checked policy, in its initial state.

        A `TFPolicy` is made by `from_state`; a custom policy is copied, which a class can refine
        by `__deepcopy__`.
        """
        return self.original.driver.make_copy(copy.deepcopy(self.state))

    def make_rng(self) -> np.random.Generator:
        """Returns a new generator, the same for each check."""
        return np.random.default_rng(self.seed)

    def draw_inputs(self, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Draws inputs of acting, one array `[rows, ...]` per port."""
        drawn = draw_random_inputs(self.ports, rows, 1, rng)
        per_row = len(self.ports.all) - len(self.ports.states)
        arrays = [x[:, 0] for x in drawn[:per_row]] + drawn[per_row:]
        return replace_masks(self.ports, arrays, draw_masks(self.ports, self.leaves, rows, rng))

    def act_as_arrays(
        self, policy: Policy, inputs: Sequence[np.ndarray], explore: bool
    ) -> dict[str, Any]:
        """Acts on one array per port; returns all results as arrays by name."""
        return self.flatten_result(self.act(policy, inputs, explore))

    def act(self, policy: Policy, inputs: Sequence[np.ndarray], explore: bool) -> ActionBatch:
        """Calls `compute_actions` with one array per port."""
        arguments = self.make_arguments(policy, inputs)
        return ActionBatch(*policy.compute_actions(**arguments, explore=explore))

    def make_arguments(self, policy: Policy, inputs: Sequence[np.ndarray]) -> dict[str, Any]:
        """Returns one array per port as keyword arguments of `compute_actions`."""
        ports = self.ports
        obs, view_arrays, states = ports.split(inputs)
        arrays = iter(view_arrays)
        views = {
            view.name: view.unflatten([next(arrays) for _ in view.ports]) for view in ports.views
        }
        arguments = {
            "obs_batch": unflatten(policy.observation_space, obs),
            "state_batches": states or None,
            "prev_action_batch": views.pop("prev_actions", None),
            "prev_reward_batch": views.pop("prev_rewards", None),
        }
        return {**arguments, "views": views} if views else arguments

    def flatten_result(self, result: ActionBatch, *, convert: bool = True) -> dict[str, np.ndarray]:
        """Returns all results of acting as arrays by name, in the dtypes of the space."""
        if convert:
            arrays = batch_leaves(self.leaves, result.actions, "actions")
            arrays_by_name = {
                leaf.name("actions"): x for leaf, x in zip(self.leaves, arrays, strict=True)
            }
        else:
            arrays_by_name = self.flatten_actions(result.actions)
        arrays_by_name |= {f"state_out_{i}": np.asarray(x) for i, x in enumerate(result.state_outs)}
        return {**arrays_by_name, **{name: np.asarray(x) for name, x in result.extras.items()}}

    def flatten_actions(self, actions: Structure) -> dict[str, np.ndarray]:
        """Returns the leaves of nested actions by name, without converting their dtypes."""
        leaves = self.leaves
        return {
            leaf.name("actions"): np.asarray(get_at_path(actions, leaf.path)) for leaf in leaves
        }

    def require_program(self, requirement: str) -> None:
        """Ends a check that applies only to policies with a Program."""
        if not self.is_tf:
            raise NotApplicable(f"{requirement}, and a custom policy has none")

    @property
    def learns(self) -> bool:
        """True if the policy's class implements learning."""
        return self.original.driver.learning.learns

    def require_learning(self) -> None:
        """Ends a check of learning for policies that only act."""
        if not self.learns:
            raise NotApplicable("the policy does not learn")


def get_ports(policy: Policy) -> InputPorts:
    return InputPorts(
        policy.observation_space,
        tuple(policy.driver.acting.views),
        tuple(np.shape(part) for part in policy.get_initial_state()),
    )


def map_to_env_actions(policy: Policy, policy_actions: Sequence[np.ndarray]) -> Any:
    """Maps a policy's actions to a nested batch of environment actions, by `env_action`."""
    batch = unflatten(policy.action_space, policy_actions)
    rows = [flatten_arrays(policy.to_env_action(row)) for row in split_rows(batch)]
    return unflatten(policy.action_space, [np.stack(parts) for parts in zip(*rows, strict=True)])


def flatten_arrays(value: Structure) -> list[np.ndarray]:
    """Returns the arrays of nested dicts and tuples, in order."""
    return [np.asarray(x) for x in iterate_leaves(value)]


def draw_masks(
    ports: InputPorts, leaves: Sequence[Leaf], rows: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws masks `[rows, choices]` that allow at least one choice in each cell.

    About a third of the choices are forbidden; in every fourth row only one is allowed in each
    cell, and in the next row every one.
    """
    if not any(ports.is_mask):
        return np.ones((rows, 0), bool)
    parts = []
    for size in iterate_choice_counts(leaves):
        allowed = rng.random((rows, size)) < 0.67
        allowed[0::4] = False
        allowed[1::4] = True
        allowed[np.arange(rows), rng.integers(size, size=rows)] = True
        parts.append(allowed)
    return np.concatenate(parts, axis=1)


def replace_masks(
    ports: InputPorts, inputs: Sequence[np.ndarray], mask: np.ndarray
) -> list[np.ndarray]:
    """Returns inputs `[..., *shape]` with masks replaced by those in `mask`, `[rows, choices]`."""
    result, start = list(inputs), 0
    for i, (port, is_mask) in enumerate(zip(ports.obs, ports.is_mask, strict=True)):
        if is_mask:
            stop = start + math.prod(port.shape)
            part = mask[:, start:stop].reshape(result[i].shape)
            result[i], start = part.astype(result[i].dtype), stop
    return result


def iterate_choice_counts(leaves: Sequence[Leaf]) -> Iterator[int]:
    """Yields the number of a mask's choices for each cell of an action space; 1 for a bit."""
    for leaf in leaves:
        if isinstance(leaf.space, spaces.MultiBinary):
            yield from [1] * int(np.prod(leaf.shape))
        elif not is_float_box(leaf.space):
            yield from choices_per_cell(leaf.space)


def check_finite(arrays: Mapping[str, np.ndarray], expected: str, advice: str) -> None:
    """Checks that arrays of real numbers have neither NaN nor infinity.

    Args:
        arrays: by name.
        expected: the requirement, with "{name}" for the name.
        advice: the next step.

    Raises:
        Broken: naming the first number that is not finite.
    """
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            actual = f"{array[~np.isfinite(array)][0]}"
            raise CheckFailed(expected.format(name=name), actual, advice)


def compare_arrays(
    actual: Mapping[str, np.ndarray],
    reference: Mapping[str, np.ndarray],
    expected: str,
    advice: str,
    *,
    tolerance: float = 1e-5,
) -> float:
    """Compares arrays by name, relative to `max(1, |x|)` of each column.

    Args:
        actual: the policy's results.
        reference: the correct results.
        expected: the requirement, for the message.
        advice: the next step.
        tolerance: the largest difference of real numbers.

    Returns:
        The largest difference.

    Raises:
        Broken: if names or arrays differ, naming the location.
    """

    def make_failure(description: str) -> CheckFailed:
        return CheckFailed(expected, description, advice)

    if set(actual) != set(reference):
        raise make_failure(f"the names {sorted(actual)} and {sorted(reference)}")
    pairs = {name: (np.asarray(x), np.asarray(reference[name])) for name, x in actual.items()}
    errors = (
        _compute_difference(name, *pair, tolerance, make_failure) for name, pair in pairs.items()
    )
    return max(errors, default=0.0)


def _compute_difference(
    name: str,
    actual: np.ndarray,
    reference: np.ndarray,
    allowed: float,
    make_failure: Callable[[str], CheckFailed],
) -> float:
    """Returns the largest difference of two arrays, if it is allowed."""
    if actual.shape != reference.shape or actual.dtype != reference.dtype:
        description = (
            f"{actual.dtype}{list(actual.shape)} and {reference.dtype}{list(reference.shape)}"
        )
        raise make_failure(f"{name} as {description}")
    if not actual.size:
        return 0.0
    if actual.dtype.kind not in "fc":
        error, allowed = (actual != reference).astype(float), 0.0
    else:
        equal = actual == reference  # also infinities, and masked logits
        with np.errstate(invalid="ignore", over="ignore"):
            size = np.where(
                np.isfinite(reference) & (np.abs(reference) < 1e30), np.abs(reference), 0.0
            )
            scale = np.maximum(1.0, size.max(axis=0, initial=0.0))
            error = np.abs(actual.astype(np.float64) - reference) / scale
        error = np.where(equal, 0.0, np.where(np.isnan(error), np.inf, error))
    worst = float(error.max())
    if worst > allowed:
        index = np.unravel_index(int(error.argmax()), error.shape)
        at = ", ".join(map(str, map(int, index)))
        values = f"{actual[index]!s} and {reference[index]!s}"
        raise make_failure(f"{name}[{at}] is {values}")
    return worst


def collect_arrays(value: Structure, path: str = "") -> dict[str, np.ndarray]:
    """Returns all numbers and arrays in nested dicts and sequences, by path.

    >>> collect_arrays({"weights": {"a": np.ones(2)}, "steps": 3})
    {'weights/a': array([1., 1.]), 'steps': array(3)}
    """
    if isinstance(value, dict):
        parts = [(str(key), part) for key, part in value.items() if key != "policy_spec"]
    elif isinstance(value, list | tuple):
        parts = [(str(i), part) for i, part in enumerate(value)]
    else:
        is_number = isinstance(value, int | float | np.ndarray | np.generic)
        fits = is_number and not (isinstance(value, int) and abs(value) >= 2**63)
        return {path: np.asarray(value if fits else str(value))}
    arrays: dict[str, np.ndarray] = {}
    for key, part in parts:
        arrays |= collect_arrays(part, f"{path}/{key}" if path else key)
    return arrays
