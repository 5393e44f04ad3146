"""Checks of recurrent policies: manual state, a `Session` and whole sequences agree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfpolicies.models.ports import ACTIONS, OBS, REWARDS, ViewInput
from tfpolicies.models.spaces import unflatten
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.policy_session import PolicySession
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.program.functions import ActInputs
from tfpolicies.testing.policy_under_test import PolicyUnderTest, compare_arrays, map_to_env_actions
from tfpolicies.testing.report import CheckFailed, NotApplicable

_STEPS = 6


def memory(subject: PolicyUnderTest) -> str:
    """State passed manually, a `PolicySession` and whole sequences agree; reset clears it."""
    if not subject.ports.is_recurrent:
        raise NotApplicable("the policy has no memory")
    policy, rng = subject.make_copy(), subject.make_rng()
    count, ports = 3, subject.ports
    steps = [subject.draw_inputs(count, rng)[: len(ports.obs)] for _ in range(_STEPS)]
    manual_results, views_by_step = _act_with_manual_state(subject, policy, steps, count)
    advice = (
        "Let `compute_actions` read `state_batches` and no other stored state, return the "
        "memory after the step, and start from `get_initial_state()`."
    )
    session = policy.session(count)
    for attempt in ("a Session", "a Session after reset()"):
        for t, obs in enumerate(steps):
            actions = session.act(unflatten(policy.observation_space, obs), explore=False)
            actual = {**subject.flatten_actions(actions), **_get_states(session)}
            policy_actions = [manual_results[t][leaf.name("actions")] for leaf in subject.leaves]
            reference = subject.flatten_actions(map_to_env_actions(policy, policy_actions))
            reference |= {
                name: x for name, x in manual_results[t].items() if name.startswith("state_out_")
            }
            expected = f"{attempt} to act like manually passed state, at step {t}"
            compare_arrays(actual, reference, expected, advice)
        session.reset()
    _check_reset(policy, session, steps[0])
    names = [f"state_out_{i}" for i in range(len(ports.states))]
    if all(np.array_equal(manual_results[-1][name], manual_results[0][name]) for name in names):
        raise CheckFailed(
            f"the memory to change within {_STEPS} random observations",
            "the same memory after every step",
            "Return the new memory as `state_outs`, not the input.",
        )
    worst = (
        _check_sequence(subject, policy, steps, views_by_step, manual_results)
        if subject.is_tf
        else 0.0
    )
    return f"largest difference {worst:.1e}"


def _get_states(session: PolicySession) -> dict[str, np.ndarray]:
    state = session.recurrent_state.get_state()
    return {name.replace("_", "_out_"): x for name, x in state.items() if name.startswith("state_")}


def _check_reset(policy: Policy, session: PolicySession, obs: list[np.ndarray]) -> None:
    session.act(unflatten(policy.observation_space, obs), explore=False)
    before = _get_states(session)
    session.reset([1])
    reference = {name: x.copy() for name, x in before.items()}
    for i, start in enumerate(policy.get_initial_state()):
        reference[f"state_out_{i}"][1] = start
    expected = "Session.reset([1]) to reset the memory of environment 1, and no other"
    compare_arrays(
        _get_states(session), reference, expected, "Override `session` only to add to it."
    )


def _act_with_manual_state(
    subject: PolicyUnderTest, policy: Policy, steps: list[list[np.ndarray]], count: int
) -> tuple[list[dict[str, np.ndarray]], list[list[np.ndarray]]]:
    """Acts greedily with manually passed state, without rewards; returns results and views read."""
    ports = subject.ports
    results: list[dict[str, np.ndarray]] = []
    views_by_step: list[list[np.ndarray]] = []
    states = [np.stack([np.asarray(part)] * count) for part in policy.get_initial_state()]
    unmasked = [i for i, mask in enumerate(ports.is_mask) if not mask]
    history: dict[str, list[list[np.ndarray]]] = {OBS: [], ACTIONS: [], REWARDS: []}
    for t, obs in enumerate(steps):
        history[OBS].append([obs[i] for i in unmasked])
        views_by_step.append(
            [
                x
                for view in ports.views
                for x in _iterate_view_leaves(view, history[view.source], t, count)
            ]
        )
        results.append(
            subject.act_as_arrays(policy, [*obs, *views_by_step[-1], *states], explore=False)
        )
        states = [results[-1][f"state_out_{i}"] for i in range(len(states))]
        history[ACTIONS].append([results[-1][leaf.name("actions")] for leaf in subject.leaves])
        history[REWARDS].append([np.zeros(count, np.float32)])
    return results, views_by_step


def _iterate_view_leaves(
    view: ViewInput, history: list[list[np.ndarray]], t: int, count: int
) -> Iterator[np.ndarray]:
    """Yields the leaves of a view at step `t`, given those of its source at each step so far."""
    for i, leaf in enumerate(view.source_leaves):
        zeros = np.zeros((count, *leaf.shape), leaf.dtype)
        steps = [history[t + s][i] if t + s >= 0 else zeros for s in view.shifts]
        yield np.stack(steps, axis=1) if view.is_window else steps[0]


def _check_sequence(
    subject: PolicyUnderTest,
    policy: TFPolicy,
    steps: list[list[np.ndarray]],
    views_by_step: list[list[np.ndarray]],
    manual_results: list[dict[str, np.ndarray]],
) -> float:
    program, ports, count = policy.program, subject.ports, len(steps[0][0])
    rows = [[*obs, *views] for obs, views in zip(steps, views_by_step, strict=True)]
    stacked = [np.stack(parts, axis=1) for parts in zip(*rows, strict=True)]
    inputs = [x.reshape(-1, *x.shape[2:]) for x in stacked]
    inputs += [port.zeros(count) for port in ports.states]
    explorer = program.spec.explorer
    act_inputs = ActInputs(
        [tf.constant(x) for x in inputs],
        tf.zeros([count * len(steps), explorer.noise_size]),
        tf.zeros([explorer.num_params]),
    )
    with program.lock:
        _ = policy.model  # loads the weights
        weights = [tf.convert_to_tensor(x) for x in program.functions.network.variables]
        out = program.functions.act(weights, act_inputs, time_steps=len(steps))
    reference = np.stack([result["action_dist_inputs"] for result in manual_results], axis=1)
    actual = {"action_dist_inputs": out.dist_inputs.numpy().reshape(reference.shape)}
    actual |= {f"state_out_{i}": x.numpy() for i, x in enumerate(out.states)}
    last = {f"state_out_{i}": manual_results[-1][f"state_out_{i}"] for i in range(len(out.states))}
    expected = f"{len(steps)} single steps to give the same as one sequence of them"
    advice = "Let the model start a sequence from `state_in_*`, and step through it in order."
    return compare_arrays(actual, {"action_dist_inputs": reference, **last}, expected, advice)
