"""Checks that all runtimes agree: traced functions, ONNX Runtime, graph mode and exports."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.errors import ConfigError
from tfpolicies.models.spaces import nest
from tfpolicies.policy.policy import Policy
from tfpolicies.program.inference import RUNTIMES
from tfpolicies.program.program import Program
from tfpolicies.testing.batches import random_batch
from tfpolicies.testing.report import Broken, NotApplicable
from tfpolicies.testing.subject import ROWS, Subject, all_same

_STEPS = 5


def traces(subject: Subject) -> str:
    """Other batch sizes, policies with the same program and other numbers cause no new trace."""
    subject.needs_tf("traces are counted by a Program")
    policy = subject.twin()
    if not policy.config["eager_tracing"]:
        raise NotApplicable("eager_tracing=False runs everything untraced")
    counts = policy.program.functions.traces
    _use_all(subject, policy, ROWS)
    before = dict(counts)
    for rows in (2, 2 * ROWS + 1):
        _use_all(subject, policy, rows)
    _use_all(subject, subject.twin(), ROWS)
    grown = {
        name: f"{before.get(name, 0)} -> {n}"
        for name, n in counts.items()
        if n != before.get(name, 0)
    }
    if grown:
        raise Broken(
            "every function to be traced once, whatever the batch size and the policy",
            f"more traces of {grown}",
            "Use the Program's functions as they are; keep batch sizes and numbers of one policy "
            "out of traced code.",
        )
    return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items()))


def _use_all(subject: Subject, policy: Policy, rows: int) -> None:
    inputs = subject.inputs(rows, subject.rng())
    for explore in (True, False):
        subject.act(policy, inputs, explore)
    if subject.learns:
        batch = random_batch(policy, rows, seed=subject.seed)
        policy.compute_gradients(batch)
        policy.learn_on_batch(batch)


def runtimes(subject: Subject) -> str:
    """ONNX Runtime and graph mode give the results of the traced functions, from the same noise."""
    subject.needs_tf("runtimes run a Program")
    policy, rng = subject.twin(), subject.rng()
    program, explorer = policy.program, policy.program.spec.explorer
    notes = []
    advice = (
        "Use operations that convert exactly (see docs/models.md); or set inference='tf' if "
        "the policy can act only through TensorFlow."
    )
    name = policy.config["inference"]
    if name == "tf":
        notes.append("onnx not compared: inference='tf'")
    else:
        name = "onnx" if name == "auto" else name
        what, worst, actor = RUNTIMES[name].name, 0.0, _actor(program, name)
        names = [port.name for port in program.act_layout.ports()]
        own = policy.driver.generator
        for rows in (1, ROWS):
            inputs = subject.inputs(rows, rng)
            params = policy.exploration.params(policy.global_timestep, True)
            noise = explorer.draw_noise(own, rows, params)
            found = []
            for runner in (actor, program.runtime):
                acted = runner.run(policy.driver.state, inputs, noise, params)
                arrays = [np.array(x) for x in program.act_layout.flatten(acted)]
                found.append(dict(zip(names, arrays, strict=True)))
            expected = f"{what} to act like TensorFlow on {rows} rows"
            worst = max(worst, all_same(found[0], found[1], expected, advice))
        notes.append(f"{name}: {worst:.1e}")
    graph = graph_twin(policy)
    if graph is not None:
        notes.append(f"{type(graph).__name__}: {_compare_twins(subject, policy, graph):.1e}")
    return ", ".join(notes)


def _actor(program: Program, name: str) -> Any:
    try:
        return program.inference.actor(name)
    except ConfigError as error:
        raise Broken(
            f"the policy to act in {RUNTIMES[name].name}",
            str(error),
            "Change the operations that it names, or set inference='tf' in the config.",
        ) from error


def graph_twin(policy: Policy) -> Any:
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


def _compare_twins(subject: Subject, policy: Policy, twin: Policy) -> float:
    """Lets both act and learn from the same state; returns the largest difference."""
    inputs, worst = subject.inputs(ROWS, subject.rng()), 0.0
    policy.set_state(twin.get_state())
    advice = "Give both classes one implementation; they may differ only in their runtime."
    for when in ("at once", "after an update"):
        for explore in (False, True):
            ours, wanted = (subject.acted(each, inputs, explore) for each in (twin, policy))
            expected = f"{type(twin).__name__} to act like {type(policy).__name__} {when}"
            worst = max(worst, all_same(ours, wanted, expected, advice, tolerance=1e-4))
        if when == "at once" and subject.learns:
            for each in (policy, twin):
                each.learn_on_batch(random_batch(each, subject.rows, seed=subject.seed))
    return worst


def exports(subject: Subject) -> str:
    """SavedModel and ONNX exports verify themselves, and the ONNX player acts like the policy."""
    if not subject.exports:
        raise NotApplicable("exports=False")
    subject.needs_tf("export_model needs a Keras model")
    policy = subject.twin()
    with tempfile.TemporaryDirectory() as folder:
        saved = policy.export_model(Path(folder) / "saved")
        onnx = policy.export_model(Path(folder) / "onnx", onnx=True)
        _check_player(subject, policy, onnx.path)
    worst = max(saved.parity.largest_difference, onnx.parity.largest_difference)
    return f"largest difference {worst:.1e}"


def _check_player(subject: Subject, policy: Policy, path: Path) -> None:
    """Runs an episode-like sequence with the exported player and with a `Session`."""
    from tfpolicies.export.player import OnnxPolicy

    player, session, rng = OnnxPolicy(path), policy.session(3), subject.rng()
    reward = np.zeros(3, np.float32)
    for _ in range(_STEPS):
        inputs = subject.inputs(3, rng)[: len(subject.ports.obs)]
        obs = nest(policy.observation_space, inputs)
        acted = player.act(obs, reward), session.act(obs, reward, explore=False)
        ours, wanted = (subject.by_leaf(each) for each in acted)
        expected = "the exported player to act like the policy's Session"
        all_same(ours, wanted, expected, "Report it: the export passed its own verification.")
        reward = rng.standard_normal(3).astype(np.float32)
