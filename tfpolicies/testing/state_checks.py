"""Checks of a policy's state: no aliasing, and round trips through states and checkpoints."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.base.type_aliases import Setting
from tfpolicies.models.spaces import unflatten
from tfpolicies.policy.policy import Policy
from tfpolicies.storage.json_values import iterate_parts
from tfpolicies.testing.policy_under_test import (
    DEFAULT_ROWS,
    PolicyUnderTest,
    collect_arrays,
    compare_arrays,
)
from tfpolicies.testing.random_batches import random_batch

_ALIASING = "Copy arrays where they enter and leave the policy: `np.array(x)`."


def aliasing(subject: PolicyUnderTest) -> str:
    """Overwriting arrays that were passed in or returned has no effect on the policy."""
    policy, rng = subject.make_copy(), subject.make_rng()
    inputs, other_inputs = (
        subject.draw_inputs(DEFAULT_ROWS, rng),
        subject.draw_inputs(DEFAULT_ROWS, rng),
    )
    original_inputs = copy.deepcopy(inputs)
    results = subject.act_as_arrays(policy, inputs, explore=False)
    reference = copy.deepcopy(results)
    subject.act(policy, other_inputs, explore=True)
    _check_unchanged(
        results, reference, "the results of compute_actions not to change at the next call"
    )
    inputs_by_name = dict(zip(map(str, subject.ports.all), inputs, strict=True))
    expected_arrays = dict(zip(map(str, subject.ports.all), original_inputs, strict=True))
    _check_unchanged(inputs_by_name, expected_arrays, "compute_actions not to change its arguments")

    def check_same_actions(overwritten: str) -> None:
        again = subject.act_as_arrays(policy, original_inputs, explore=False)
        expected = f"the same actions after {overwritten} overwritten with other numbers"
        compare_arrays(again, reference, expected, _ALIASING, tolerance=0.0)

    _overwrite(results)
    check_same_actions("the arrays that compute_actions returned were")
    session = policy.session(DEFAULT_ROWS)
    observations = [
        unflatten(policy.observation_space, rows[: len(subject.ports.obs)])
        for rows in (inputs, other_inputs)
    ]
    first = subject.flatten_actions(session.act(observations[0]))
    expected_arrays = copy.deepcopy(first)
    session.act(observations[1])
    _check_unchanged(
        first, expected_arrays, "the results of a session's act not to change at the next call"
    )
    for getter, setter in (("get_weights", "set_weights"), ("get_state", "set_state")):
        values = getattr(policy, getter)()
        before = copy.deepcopy(values)
        _overwrite(collect_arrays(values))
        now = collect_arrays(getattr(policy, getter)())
        _check_unchanged(now, collect_arrays(before), f"{getter} to return copies")
        passed = copy.deepcopy(before)
        getattr(policy, setter)(passed)
        _check_unchanged(
            collect_arrays(passed), collect_arrays(before), f"{setter} not to change its argument"
        )
        _overwrite(collect_arrays(passed))
        now = collect_arrays(getattr(policy, getter)())
        _check_unchanged(now, collect_arrays(before), f"{setter} to copy its argument")
        check_same_actions(f"the arrays of {getter} and {setter} were")
    if subject.learns:
        batch = random_batch(policy, subject.rows, seed=subject.seed)
        before = copy.deepcopy(collect_arrays(dict(batch)))
        policy.learn_on_batch(batch)
        now = collect_arrays(dict(batch))
        _check_unchanged(now, before, "learn_on_batch not to change the columns of its batch")
    return ""


def _check_unchanged(now: dict[str, Any], before: dict[str, Any], expected: str) -> None:
    compare_arrays(now, before, expected, _ALIASING, tolerance=0.0)


def _overwrite(arrays: dict[str, np.ndarray]) -> None:
    for array in arrays.values():
        if array.flags.writeable and array.ndim:
            array[...] = 1 if array.dtype.kind in "iub" else 77.0


def state(subject: PolicyUnderTest) -> str:
    """`get_state` and `set_state` transfer everything: a copy acts and learns like the original."""
    policy = subject.make_copy()
    _advance_state(subject, policy)
    saved_state = policy.get_state()
    restored = subject.make_copy()
    restored.set_state(copy.deepcopy(saved_state))
    advice = (
        "Let `get_state` return all that acting and learning depend on (weights, optimizer, "
        "counters, generator), and `set_state` restore all of it."
    )
    _check_equal_states(
        restored, saved_state, "set_state(get_state()) to restore the whole state", advice
    )
    weights = collect_arrays(policy.get_weights())
    restored.set_weights(policy.get_weights())
    expected = "set_weights(get_weights()) to change nothing"
    compare_arrays(collect_arrays(restored.get_weights()), weights, expected, advice, tolerance=0.0)
    restored.set_state(copy.deepcopy(saved_state))  # set_weights may have changed target networks
    _check_same_behavior(subject, policy, restored, "a policy with a copy of the state", advice)
    return f"{len(collect_arrays(saved_state))} entries"


def checkpoint(subject: PolicyUnderTest) -> str:
    """A policy that was saved and loaded acts and learns like the original."""
    policy = subject.make_copy()
    _advance_state(subject, policy)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy"
        policy.export_checkpoint(str(path))
        loaded = type(policy).from_checkpoint(
            str(path), config=_get_unstored_settings(policy.config)
        )
    advice = (
        "Let `get_state` return all that a checkpoint must hold; objects that a file cannot hold, "
        "such as a custom model class, must be importable or passed to "
        "from_checkpoint(path, config=...)."
    )
    expected = "from_checkpoint to restore what export_checkpoint saved"
    _check_equal_states(loaded, policy.get_state(), expected, advice)
    _check_same_behavior(subject, policy, loaded, "a policy from a checkpoint", advice)
    return ""


def _get_unstored_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a file may not hold: models, and those with code."""
    model_config = config.get("model") or {}
    names = ("custom_model", "custom_action_dist")
    model = {name: model_config[name] for name in names if model_config.get(name) is not None}
    settings = {name: x for name, x in config.items() if name != "model" and _has_code(x)}
    return {**settings, "model": model} if model else settings


def _has_code(value: Setting) -> bool:
    return any(callable(part) for _, part in iterate_parts(value, ""))


def _advance_state(subject: PolicyUnderTest, policy: Policy) -> None:
    """Brings a policy into a state that differs from that of any new policy."""
    subject.act(policy, subject.draw_inputs(DEFAULT_ROWS, subject.make_rng()), explore=True)
    if subject.learns:
        policy.learn_on_batch(random_batch(policy, subject.rows, seed=subject.seed))


def _check_equal_states(
    policy: Policy, reference: Mapping[str, Any], expected: str, advice: str
) -> None:
    actual = collect_arrays(policy.get_state())
    compare_arrays(actual, collect_arrays(reference), expected, advice, tolerance=0.0)


def _check_same_behavior(
    subject: PolicyUnderTest, policy: Policy, restored: Policy, description: str, advice: str
) -> None:
    inputs = subject.draw_inputs(DEFAULT_ROWS, subject.make_rng())

    def compare(when: str) -> None:
        reference, actual = (
            subject.act_as_arrays(compared, inputs, explore=True) for compared in (policy, restored)
        )
        compare_arrays(
            actual, reference, f"{description} to explore like the original {when}", advice
        )

    compare("at once")
    if subject.learns:
        batches = [
            random_batch(compared, subject.rows, seed=subject.seed)
            for compared in (policy, restored)
        ]
        for compared, batch in zip((policy, restored), batches, strict=True):
            compared.learn_on_batch(batch)
        compare("after one more update")


def untouched(subject: PolicyUnderTest) -> str:
    """No check changed the policy: weights, optimizer, generator and counters are the same."""
    now = collect_arrays(subject.original.get_state())
    expected = "a policy to change only when it acts or learns itself"
    advice = (
        "This policy shares something with its copies: keep nothing mutable on the class or "
        "in a module."
    )
    compare_arrays(now, collect_arrays(subject.state), expected, advice, tolerance=0.0)
    return ""
