"""Checks that all runtimes agree: traced functions, ONNX Runtime, graph mode and exports."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.errors import ConfigError
from tfpolicies.models.spaces import unflatten
from tfpolicies.policy.policy import Policy
from tfpolicies.program.inference import RUNTIMES
from tfpolicies.program.program import Program
from tfpolicies.testing.policy_under_test import DEFAULT_ROWS, PolicyUnderTest, compare_arrays
from tfpolicies.testing.random_batches import random_batch
from tfpolicies.testing.report import CheckFailed, NotApplicable

_STEPS = 5


def traces(subject: PolicyUnderTest) -> str:
    """Other batch sizes, policies with the same program and other numbers cause no new trace."""
    subject.require_program("traces are counted by a Program")
    policy = subject.make_copy()
    if not policy.config["eager_tracing"]:
        raise NotApplicable("eager_tracing=False runs everything untraced")
    counts = policy.program.functions.traces
    _act_and_learn(subject, policy, DEFAULT_ROWS)
    before = dict(counts)
    for rows in (2, 2 * DEFAULT_ROWS + 1):
        _act_and_learn(subject, policy, rows)
    _act_and_learn(subject, subject.make_copy(), DEFAULT_ROWS)
    retraced = {
        name: f"{before.get(name, 0)} -> {n}"
        for name, n in counts.items()
        if n != before.get(name, 0)
    }
    if retraced:
        raise CheckFailed(
            "every function to be traced once, whatever the batch size and the policy",
            f"more traces of {retraced}",
            "Use the Program's functions as they are; keep batch sizes and numbers of one policy "
            "out of traced code.",
        )
    return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items()))


def _act_and_learn(subject: PolicyUnderTest, policy: Policy, rows: int) -> None:
    inputs = subject.draw_inputs(rows, subject.make_rng())
    for explore in (True, False):
        subject.act(policy, inputs, explore)
    if subject.learns:
        batch = random_batch(policy, rows, seed=subject.seed)
        policy.compute_gradients(batch)
        policy.learn_on_batch(batch)


def runtimes(subject: PolicyUnderTest) -> str:
    """ONNX Runtime and graph mode give the results of the traced functions, from the same noise."""
    subject.require_program("runtimes run a Program")
    policy, rng = subject.make_copy(), subject.make_rng()
    program, explorer = policy.program, policy.program.spec.explorer
    notes = []
    advice = (
        "Use operations that convert exactly (see docs/howto/models.md); or set inference='tf' if "
        "the policy can act only through TensorFlow."
    )
    name = policy.config["inference"]
    if name == "tf":
        notes.append("onnx not compared: inference='tf'")
    else:
        name = "onnx" if name == "auto" else name
        runtime_name, worst, runtime = RUNTIMES[name].name, 0.0, _get_runtime(program, name)
        names = [port.name for port in program.act_layout.get_ports()]
        generator = policy.driver.generator
        for rows in (1, DEFAULT_ROWS):
            inputs = subject.draw_inputs(rows, rng)
            params = policy.exploration.get_params(policy.global_timestep, True)
            noise = explorer.draw_noise(generator, rows, params)
            results = []
            for runner in (runtime, program.runtime):
                outputs = runner.run(policy.driver.state, inputs, noise, params)
                arrays = [np.array(x) for x in program.act_layout.flatten(outputs)]
                results.append(dict(zip(names, arrays, strict=True)))
            expected = f"{runtime_name} to act like TensorFlow on {rows} rows"
            worst = max(worst, compare_arrays(results[0], results[1], expected, advice))
        notes.append(f"{name}: {worst:.1e}")
    graph = make_graph_copy(policy)
    if graph is not None:
        notes.append(
            f"{type(graph).__name__}: {_compare_with_graph_copy(subject, policy, graph):.1e}"
        )
    return ", ".join(notes)


def _get_runtime(program: Program, name: str) -> Any:
    try:
        return program.inference.get_runtime(name)
    except ConfigError as error:
        raise CheckFailed(
            f"the policy to act in {RUNTIMES[name].name}",
            str(error),
            "Change the operations that it names, or set inference='tf' in the config.",
        ) from error


def make_graph_copy(policy: Policy) -> Any:
    """Returns a graph-mode policy in the same state, or None if there is no such class.

    The graph-mode version of `XTF2Policy` is the class `XTF1Policy` of the same module.
    """
    cls, state = type(policy), policy.get_state()
    name = cls.__name__.replace("TF2Policy", "TF1Policy")
    graph_class = getattr(sys.modules[cls.__module__], name, None)
    if name == cls.__name__ or graph_class is None:
        return None
    config = {k: v for k, v in state["policy_spec"]["config"].items() if k != "framework"}
    copy = graph_class(policy.observation_space, policy.action_space, config)
    copy.set_state(state)
    return copy


def _compare_with_graph_copy(subject: PolicyUnderTest, policy: Policy, graph_copy: Policy) -> float:
    """Lets both act and learn from the same state; returns the largest difference."""
    inputs, worst = subject.draw_inputs(DEFAULT_ROWS, subject.make_rng()), 0.0
    policy.set_state(graph_copy.get_state())
    advice = "Give both classes one implementation; they may differ only in their runtime."
    for when in ("at once", "after an update"):
        for explore in (False, True):
            actual, reference = (
                subject.act_as_arrays(compared, inputs, explore)
                for compared in (graph_copy, policy)
            )
            expected = f"{type(graph_copy).__name__} to act like {type(policy).__name__} {when}"
            worst = max(worst, compare_arrays(actual, reference, expected, advice, tolerance=1e-4))
        if when == "at once" and subject.learns:
            for compared in (policy, graph_copy):
                compared.learn_on_batch(random_batch(compared, subject.rows, seed=subject.seed))
    return worst


def exports(subject: PolicyUnderTest) -> str:
    """SavedModel and ONNX exports verify themselves, and the ONNX player acts like the policy."""
    if not subject.exports:
        raise NotApplicable("exports=False")
    subject.require_program("export_model needs a Keras model")
    policy = subject.make_copy()
    with tempfile.TemporaryDirectory() as folder:
        saved = policy.export_model(Path(folder) / "saved")
        onnx = policy.export_model(Path(folder) / "onnx", onnx=True)
        _check_player(subject, policy, onnx.path)
    worst = max(saved.parity.largest_difference, onnx.parity.largest_difference)
    return f"largest difference {worst:.1e}"


def _check_player(subject: PolicyUnderTest, policy: Policy, path: Path) -> None:
    """Runs an episode-like sequence with the exported player and with a `Session`."""
    from tfpolicies.export.player import OnnxPolicy

    player, session, rng = OnnxPolicy(path), policy.session(3), subject.make_rng()
    reward = np.zeros(3, np.float32)
    for _ in range(_STEPS):
        inputs = subject.draw_inputs(3, rng)[: len(subject.ports.obs)]
        obs = unflatten(policy.observation_space, inputs)
        results = player.act(obs, reward), session.act(obs, reward, explore=False)
        actual, reference = (subject.flatten_actions(result) for result in results)
        expected = "the exported player to act like the policy's Session"
        compare_arrays(
            actual, reference, expected, "Report it: the export passed its own verification."
        )
        reward = rng.standard_normal(3).astype(np.float32)
