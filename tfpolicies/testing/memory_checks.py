"""Checks of recurrent policies: manual state, a `Session` and whole sequences agree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfpolicies.models.ports import ACTIONS, OBS, REWARDS, View
from tfpolicies.models.spaces import nest
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.session import PolicySession
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.program.functions import ActInputs
from tfpolicies.testing.report import Broken, NotApplicable
from tfpolicies.testing.subject import Subject, all_same, env_actions

_STEPS = 6


def memory(subject: Subject) -> str:
    """State passed manually, a `PolicySession` and whole sequences agree; reset clears it."""
    if not subject.ports.is_recurrent:
        raise NotApplicable("the policy has no memory")
    policy, rng = subject.twin(), subject.rng()
    count, ports = 3, subject.ports
    steps = [subject.inputs(count, rng)[: len(ports.obs)] for _ in range(_STEPS)]
    by_hand, seen = _carried(subject, policy, steps, count)
    advice = (
        "Let `compute_actions` read `state_batches` and no other stored state, return the "
        "memory after the step, and start from `get_initial_state()`."
    )
    session = policy.session(count)
    for attempt in ("a Session", "a Session after reset()"):
        for t, obs in enumerate(steps):
            shown = session.act(nest(policy.observation_space, obs), explore=False)
            ours = {**subject.by_leaf(shown), **_states_of(session)}
            own = [by_hand[t][leaf.name("actions")] for leaf in subject.leaves]
            wanted = subject.by_leaf(env_actions(policy, own))
            wanted |= {name: x for name, x in by_hand[t].items() if name.startswith("state_out_")}
            expected = f"{attempt} to act like manually passed state, at step {t}"
            all_same(ours, wanted, expected, advice)
        session.reset()
    _check_reset(policy, session, steps[0])
    names = [f"state_out_{i}" for i in range(len(ports.states))]
    if all(np.array_equal(by_hand[-1][name], by_hand[0][name]) for name in names):
        raise Broken(
            f"the memory to change within {_STEPS} random observations",
            "the same memory after every step",
            "Return the new memory as `state_outs`, not the input.",
        )
    worst = _check_sequence(subject, policy, steps, seen, by_hand) if subject.is_tf else 0.0
    return f"largest difference {worst:.1e}"


def _states_of(session: PolicySession) -> dict[str, np.ndarray]:
    kept = session.memory.get_state()
    return {name.replace("_", "_out_"): x for name, x in kept.items() if name.startswith("state_")}


def _check_reset(policy: Policy, session: PolicySession, obs: list[np.ndarray]) -> None:
    session.act(nest(policy.observation_space, obs), explore=False)
    before = _states_of(session)
    session.reset([1])
    wanted = {name: x.copy() for name, x in before.items()}
    for i, start in enumerate(policy.get_initial_state()):
        wanted[f"state_out_{i}"][1] = start
    expected = "Session.reset([1]) to reset the memory of environment 1, and no other"
    all_same(_states_of(session), wanted, expected, "Override `session` only to add to it.")


def _carried(
    subject: Subject, policy: Policy, steps: list[list[np.ndarray]], count: int
) -> tuple[list[dict[str, np.ndarray]], list[list[np.ndarray]]]:
    """Acts greedily with manually passed state, without rewards; returns results and views read."""
    ports = subject.ports
    found: list[dict[str, np.ndarray]] = []
    read: list[list[np.ndarray]] = []
    states = [np.stack([np.asarray(part)] * count) for part in policy.get_initial_state()]
    plain = [i for i, mask in enumerate(ports.is_mask) if not mask]
    known: dict[str, list[list[np.ndarray]]] = {OBS: [], ACTIONS: [], REWARDS: []}
    for t, obs in enumerate(steps):
        known[OBS].append([obs[i] for i in plain])
        read.append(
            [x for view in ports.views for x in _viewed(view, known[view.source], t, count)]
        )
        found.append(subject.acted(policy, [*obs, *read[-1], *states], explore=False))
        states = [found[-1][f"state_out_{i}"] for i in range(len(states))]
        known[ACTIONS].append([found[-1][leaf.name("actions")] for leaf in subject.leaves])
        known[REWARDS].append([np.zeros(count, np.float32)])
    return found, read


def _viewed(view: View, known: list[list[np.ndarray]], t: int, count: int) -> Iterator[np.ndarray]:
    """Yields the leaves of a view at step `t`, given those of its source at each step so far."""
    for i, leaf in enumerate(view.source_leaves):
        nothing = np.zeros((count, *leaf.shape), leaf.dtype)
        steps = [known[t + s][i] if t + s >= 0 else nothing for s in view.shifts]
        yield np.stack(steps, axis=1) if view.is_window else steps[0]


def _check_sequence(
    subject: Subject,
    policy: TFPolicy,
    steps: list[list[np.ndarray]],
    seen: list[list[np.ndarray]],
    by_hand: list[dict[str, np.ndarray]],
) -> float:
    program, ports, count = policy.program, subject.ports, len(steps[0][0])
    rows = [[*obs, *views] for obs, views in zip(steps, seen, strict=True)]
    stacked = [np.stack(parts, axis=1) for parts in zip(*rows, strict=True)]
    inputs = [x.reshape(-1, *x.shape[2:]) for x in stacked]
    inputs += [port.zeros(count) for port in ports.states]
    explorer = program.spec.explorer
    given = ActInputs(
        [tf.constant(x) for x in inputs],
        tf.zeros([count * len(steps), explorer.noise_size]),
        tf.zeros([explorer.num_params]),
    )
    with program.lock:
        _ = policy.model  # loads the weights
        weights = [tf.convert_to_tensor(x) for x in program.functions.network.variables]
        out = program.functions.act(weights, given, time_steps=len(steps))
    wanted = np.stack([found["action_dist_inputs"] for found in by_hand], axis=1)
    ours = {"action_dist_inputs": out.dist_inputs.numpy().reshape(wanted.shape)}
    ours |= {f"state_out_{i}": x.numpy() for i, x in enumerate(out.states)}
    last = {f"state_out_{i}": by_hand[-1][f"state_out_{i}"] for i in range(len(out.states))}
    expected = f"{len(steps)} single steps to give the same as one sequence of them"
    advice = "Let the model start a sequence from `state_in_*`, and step through it in order."
    return all_same(ours, {"action_dist_inputs": wanted, **last}, expected, advice)
