"""Checks of a policy's state: no aliasing, and round trips through states and checkpoints."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.models.spaces import nest
from tfpolicies.policy.policy import Policy
from tfpolicies.storage.json_values import parts_in
from tfpolicies.testing.batches import random_batch
from tfpolicies.testing.subject import ROWS, Subject, all_same, arrays_in
from tfpolicies.type_aliases import Setting

_ALIASING = "Copy arrays where they enter and leave the policy: `np.array(x)`."


def aliasing(subject: Subject) -> str:
    """Overwriting arrays that were passed in or returned has no effect on the policy."""
    policy, rng = subject.twin(), subject.rng()
    inputs, others = subject.inputs(ROWS, rng), subject.inputs(ROWS, rng)
    given = copy.deepcopy(inputs)
    named = subject.acted(policy, inputs, explore=False)
    wanted = copy.deepcopy(named)
    subject.act(policy, others, explore=True)
    _unchanged(named, wanted, "the results of compute_actions not to change at the next call")
    shown = dict(zip(map(str, subject.ports.all), inputs, strict=True))
    kept = dict(zip(map(str, subject.ports.all), given, strict=True))
    _unchanged(shown, kept, "compute_actions not to change its arguments")

    def acts_as_before(what: str) -> None:
        again = subject.acted(policy, given, explore=False)
        expected = f"the same actions after {what} overwritten with other numbers"
        all_same(again, wanted, expected, _ALIASING, tolerance=0.0)

    _scribble(named)
    acts_as_before("the arrays that compute_actions returned were")
    session = policy.session(ROWS)
    seen = [
        nest(policy.observation_space, rows[: len(subject.ports.obs)]) for rows in (inputs, others)
    ]
    first = subject.by_leaf(session.act(seen[0]))
    kept = copy.deepcopy(first)
    session.act(seen[1])
    _unchanged(first, kept, "the results of a session's act not to change at the next call")
    for getter, setter in (("get_weights", "set_weights"), ("get_state", "set_state")):
        taken = getattr(policy, getter)()
        before = copy.deepcopy(taken)
        _scribble(arrays_in(taken))
        now = arrays_in(getattr(policy, getter)())
        _unchanged(now, arrays_in(before), f"{getter} to return copies")
        passed = copy.deepcopy(before)
        getattr(policy, setter)(passed)
        _unchanged(arrays_in(passed), arrays_in(before), f"{setter} not to change its argument")
        _scribble(arrays_in(passed))
        now = arrays_in(getattr(policy, getter)())
        _unchanged(now, arrays_in(before), f"{setter} to copy its argument")
        acts_as_before(f"the arrays of {getter} and {setter} were")
    if subject.learns:
        batch = random_batch(policy, subject.rows, seed=subject.seed)
        before = copy.deepcopy(arrays_in(dict(batch)))
        policy.learn_on_batch(batch)
        now = arrays_in(dict(batch))
        _unchanged(now, before, "learn_on_batch not to change the columns of its batch")
    return ""


def _unchanged(now: dict[str, Any], before: dict[str, Any], expected: str) -> None:
    all_same(now, before, expected, _ALIASING, tolerance=0.0)


def _scribble(arrays: dict[str, np.ndarray]) -> None:
    """Overwrites all arrays that can be written to."""
    for array in arrays.values():
        if array.flags.writeable and array.ndim:
            array[...] = 1 if array.dtype.kind in "iub" else 77.0


def state(subject: Subject) -> str:
    """`get_state` and `set_state` transfer everything: a copy acts and learns like the original."""
    policy = subject.twin()
    _move_on(subject, policy)
    taken = policy.get_state()
    twin = subject.twin()
    twin.set_state(copy.deepcopy(taken))
    advice = (
        "Let `get_state` return all that acting and learning depend on (weights, optimizer, "
        "counters, generator), and `set_state` restore all of it."
    )
    _equal_states(twin, taken, "set_state(get_state()) to restore the whole state", advice)
    weights = arrays_in(policy.get_weights())
    twin.set_weights(policy.get_weights())
    expected = "set_weights(get_weights()) to change nothing"
    all_same(arrays_in(twin.get_weights()), weights, expected, advice, tolerance=0.0)
    twin.set_state(copy.deepcopy(taken))  # set_weights may have changed target networks
    _go_on_alike(subject, policy, twin, "a policy with a copy of the state", advice)
    return f"{len(arrays_in(taken))} entries"


def checkpoint(subject: Subject) -> str:
    """A policy that was saved and loaded acts and learns like the original."""
    policy = subject.twin()
    _move_on(subject, policy)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy"
        policy.export_checkpoint(str(path))
        loaded = type(policy).from_checkpoint(str(path), config=_not_stored(policy.config))
    advice = (
        "Let `get_state` return all that a checkpoint must hold; objects that a file cannot hold, "
        "such as a custom model class, must be importable or passed to "
        "from_checkpoint(path, config=...)."
    )
    expected = "from_checkpoint to restore what export_checkpoint saved"
    _equal_states(loaded, policy.get_state(), expected, advice)
    _go_on_alike(subject, policy, loaded, "a policy from a checkpoint", advice)
    return ""


def _not_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a file may not hold: models, and those with code."""
    given = config.get("model") or {}
    names = ("custom_model", "custom_action_dist")
    model = {name: given[name] for name in names if given.get(name) is not None}
    found = {name: x for name, x in config.items() if name != "model" and _has_code(x)}
    return {**found, "model": model} if model else found


def _has_code(value: Setting) -> bool:
    return any(callable(part) for _, part in parts_in(value, ""))


def _move_on(subject: Subject, policy: Policy) -> None:
    """Brings a policy into a state that differs from that of any new policy."""
    subject.act(policy, subject.inputs(ROWS, subject.rng()), explore=True)
    if subject.learns:
        policy.learn_on_batch(random_batch(policy, subject.rows, seed=subject.seed))


def _equal_states(policy: Policy, wanted: Mapping[str, Any], expected: str, advice: str) -> None:
    ours = arrays_in(policy.get_state())
    all_same(ours, arrays_in(wanted), expected, advice, tolerance=0.0)


def _go_on_alike(subject: Subject, policy: Policy, twin: Policy, who: str, advice: str) -> None:
    inputs = subject.inputs(ROWS, subject.rng())

    def compare(when: str) -> None:
        wanted, ours = (subject.acted(each, inputs, explore=True) for each in (policy, twin))
        all_same(ours, wanted, f"{who} to explore like the original {when}", advice)

    compare("at once")
    if subject.learns:
        batches = [random_batch(each, subject.rows, seed=subject.seed) for each in (policy, twin)]
        for each, batch in zip((policy, twin), batches, strict=True):
            each.learn_on_batch(batch)
        compare("after one more update")


def untouched(subject: Subject) -> str:
    """No check changed the policy: weights, optimizer, generator and counters are the same."""
    now = arrays_in(subject.original.get_state())
    expected = "a policy to change only when it acts or learns itself"
    advice = (
        "This policy shares something with its copies: keep nothing mutable on the class or "
        "in a module."
    )
    all_same(now, arrays_in(subject.state), expected, advice, tolerance=0.0)
    return ""
