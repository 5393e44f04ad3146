"""The policy under test: copies of it, and inputs for them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.batch.leaves import iterate_leaves, unbatched
from tfpolicies.export.verify import random_inputs
from tfpolicies.models.ports import InputPorts
from tfpolicies.models.spaces import (
    Leaf,
    action_leaves,
    batch_leaves,
    cell_sizes,
    is_float_box,
    nest,
    pick,
)
from tfpolicies.policy.policy import ActionBatch, Policy
from tfpolicies.testing.report import Broken, NotApplicable
from tfpolicies.type_aliases import Structure

ROWS = 12  # of most batches that checks act on


class Subject:
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
        self.ports = ports_of(policy)

    def twin(self) -> Any:
        """Returns a copy of the checked policy, in its initial state.

        A `TFPolicy` is made by `from_state`; a custom policy is copied, which a class can refine
        by `__deepcopy__`.
        """
        return self.original.driver.make_copy(copy.deepcopy(self.state))

    def rng(self) -> np.random.Generator:
        """Returns a new generator, the same for each check."""
        return np.random.default_rng(self.seed)

    def inputs(self, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Draws inputs of acting, one array `[rows, ...]` per port."""
        drawn = random_inputs(self.ports, rows, 1, rng)
        per_row = len(self.ports.all) - len(self.ports.states)
        found = [x[:, 0] for x in drawn[:per_row]] + drawn[per_row:]
        return with_masks(self.ports, found, random_masks(self.ports, self.leaves, rows, rng))

    def acted(self, policy: Policy, inputs: Sequence[np.ndarray], explore: bool) -> dict[str, Any]:
        """Acts on one array per port; returns all results as arrays by name."""
        return self.flat(self.act(policy, inputs, explore))

    def act(self, policy: Policy, inputs: Sequence[np.ndarray], explore: bool) -> ActionBatch:
        """Calls `compute_actions` with one array per port."""
        given = self.arguments(policy, inputs)
        return ActionBatch(*policy.compute_actions(**given, explore=explore))

    def arguments(self, policy: Policy, inputs: Sequence[np.ndarray]) -> dict[str, Any]:
        """Returns one array per port as keyword arguments of `compute_actions`."""
        ports = self.ports
        obs, seen, states = ports.split(inputs)
        arrays = iter(seen)
        views = {view.name: view.nested([next(arrays) for _ in view.ports]) for view in ports.views}
        given = {
            "obs_batch": nest(policy.observation_space, obs),
            "state_batches": states or None,
            "prev_action_batch": views.pop("prev_actions", None),
            "prev_reward_batch": views.pop("prev_rewards", None),
        }
        return {**given, "views": views} if views else given

    def flat(self, acted: ActionBatch, *, convert: bool = True) -> dict[str, np.ndarray]:
        """Returns all results of acting as arrays by name, in the dtypes of the space."""
        if convert:
            arrays = batch_leaves(self.leaves, acted.actions, "actions")
            named = {leaf.name("actions"): x for leaf, x in zip(self.leaves, arrays, strict=True)}
        else:
            named = self.by_leaf(acted.actions)
        named |= {f"state_out_{i}": np.asarray(x) for i, x in enumerate(acted.state_outs)}
        return {**named, **{name: np.asarray(x) for name, x in acted.extras.items()}}

    def by_leaf(self, actions: Structure) -> dict[str, np.ndarray]:
        """Returns the leaves of nested actions by name, without converting their dtypes."""
        leaves = self.leaves
        return {leaf.name("actions"): np.asarray(pick(actions, leaf.path)) for leaf in leaves}

    def needs_tf(self, what: str) -> None:
        """Ends a check that applies only to policies with a Program."""
        if not self.is_tf:
            raise NotApplicable(f"{what}, and a custom policy has none")

    @property
    def learns(self) -> bool:
        """True if the policy's class implements learning."""
        return self.original.driver.learning.learns

    def needs_learning(self) -> None:
        """Ends a check of learning for policies that only act."""
        if not self.learns:
            raise NotApplicable("the policy does not learn")


def ports_of(policy: Policy) -> InputPorts:
    """Returns the inputs of acting of any policy."""
    return InputPorts(
        policy.observation_space,
        tuple(policy.driver.acting.views),
        tuple(np.shape(part) for part in policy.get_initial_state()),
    )


def env_actions(policy: Policy, own: Sequence[np.ndarray]) -> Any:
    """Maps a policy's actions to a nested batch of environment actions, by `env_action`."""
    batch = nest(policy.action_space, own)
    rows = [leaves_of(policy.env_action(row)) for row in unbatched(batch)]
    return nest(policy.action_space, [np.stack(parts) for parts in zip(*rows, strict=True)])


def leaves_of(value: Structure) -> list[np.ndarray]:
    """Returns the arrays of nested dicts and tuples, in order."""
    return [np.asarray(x) for x in iterate_leaves(value)]


def random_masks(
    ports: InputPorts, leaves: Sequence[Leaf], rows: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws masks `[rows, choices]` that allow at least one choice in each cell.

    About a third of the choices are forbidden; in every fourth row only one is allowed in each
    cell, and in the next row every one.
    """
    if not any(ports.is_mask):
        return np.ones((rows, 0), bool)
    parts = []
    for size in choices(leaves):
        allowed = rng.random((rows, size)) < 0.67
        allowed[0::4] = False
        allowed[1::4] = True
        allowed[np.arange(rows), rng.integers(size, size=rows)] = True
        parts.append(allowed)
    return np.concatenate(parts, axis=1)


def with_masks(
    ports: InputPorts, inputs: Sequence[np.ndarray], mask: np.ndarray
) -> list[np.ndarray]:
    """Returns inputs `[..., *shape]` with masks replaced by those in `mask`, `[rows, choices]`."""
    found, start = list(inputs), 0
    for i, (port, is_mask) in enumerate(zip(ports.obs, ports.is_mask, strict=True)):
        if is_mask:
            stop = start + math.prod(port.shape)
            part = mask[:, start:stop].reshape(found[i].shape)
            found[i], start = part.astype(found[i].dtype), stop
    return found


def choices(leaves: Sequence[Leaf]) -> Iterator[int]:
    """Yields the number of a mask's choices for each cell of an action space; 1 for a bit."""
    for leaf in leaves:
        if isinstance(leaf.space, spaces.MultiBinary):
            yield from [1] * int(np.prod(leaf.shape))
        elif not is_float_box(leaf.space):
            yield from cell_sizes(leaf.space)


def require_finite(arrays: Mapping[str, np.ndarray], expected: str, advice: str) -> None:
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
            got = f"{array[~np.isfinite(array)][0]}"
            raise Broken(expected.format(name=name), got, advice)


def all_same(
    ours: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
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

    def refuse(got: str) -> Broken:
        return Broken(expected, got, advice)

    if set(ours) != set(wanted):
        raise refuse(f"the names {sorted(ours)} and {sorted(wanted)}")
    pairs = {name: (np.asarray(x), np.asarray(wanted[name])) for name, x in ours.items()}
    errors = (_difference(name, *pair, tolerance, refuse) for name, pair in pairs.items())
    return max(errors, default=0.0)


def _difference(
    name: str, ours: np.ndarray, wanted: np.ndarray, allowed: float, refuse: Callable[[str], Broken]
) -> float:
    """Returns the largest difference of two arrays, if it is allowed."""
    if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
        got = f"{ours.dtype}{list(ours.shape)} and {wanted.dtype}{list(wanted.shape)}"
        raise refuse(f"{name} as {got}")
    if not ours.size:
        return 0.0
    if ours.dtype.kind not in "fc":
        error, allowed = (ours != wanted).astype(float), 0.0
    else:
        equal = ours == wanted  # also infinities, and masked logits
        with np.errstate(invalid="ignore", over="ignore"):
            size = np.where(np.isfinite(wanted) & (np.abs(wanted) < 1e30), np.abs(wanted), 0.0)
            scale = np.maximum(1.0, size.max(axis=0, initial=0.0))
            error = np.abs(ours.astype(np.float64) - wanted) / scale
        error = np.where(equal, 0.0, np.where(np.isnan(error), np.inf, error))
    worst = float(error.max())
    if worst > allowed:
        place = np.unravel_index(int(error.argmax()), error.shape)
        at = ", ".join(map(str, map(int, place)))
        values = f"{ours[place]!s} and {wanted[place]!s}"
        raise refuse(f"{name}[{at}] is {values}")
    return worst


def arrays_in(value: Structure, path: str = "") -> dict[str, np.ndarray]:
    """Returns all numbers and arrays in nested dicts and sequences, by path.

    >>> arrays_in({"weights": {"a": np.ones(2)}, "steps": 3})
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
    found: dict[str, np.ndarray] = {}
    for key, part in parts:
        found |= arrays_in(part, f"{path}/{key}" if path else key)
    return found
