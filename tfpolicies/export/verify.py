"""Verification: a written artefact is run and compared with the policy it came from.

The comparison has three steps, each against the policy's own code, so that rounding in one of them
is not mistaken for an error of the next:

1. distribution inputs, values, memory and extras are those that the policy computes, step by step
   where it has a memory;
2. normalised actions and their log-probability are what the distribution makes of the artefact's
   inputs and of the noise;
3. the environment's actions are what the action pipeline makes of the artefact's normalised ones.

Two programs that compute the same in another order differ by rounding, which the comparison has to
allow for, and nothing else. A difference counts relative to `max(1, |x|)`, |x| being the largest of
its column; where x is computed from larger numbers (an action from its mean and noise, a
log-probability from logits), relative to those. Integers must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.errors import ExportError
from tfpolicies.export.serving import (
    GREEDY,
    NOISE,
    SAMPLE,
    ServingPort,
    output_ports,
    served_outputs,
    serving_explorer,
)
from tfpolicies.models.distributions import MASKED_LOGIT
from tfpolicies.models.ports import ACTIONS, OBS, SEQ_LENS, InputPorts, View
from tfpolicies.models.spaces import Leaf, cell_sizes, is_float_box
from tfpolicies.program.program import Program
from tfpolicies.state import ACTING, PolicyState

ONNX_FILES = {GREEDY: "model.onnx", SAMPLE: "model_sample.onnx"}
TOLERANCE = 1e-5
_SEED = 0
_WIDE = 1e4  # bounds further apart than this are not taken as a range to draw from
_ROWS = (1, 7, 248, 248, 248, 248)  # of the batches that other models are tried with: 1000
_SEQUENCES = ((1, 1), (3, 7), (16, 12))  # sequences and steps that a memory is tried with

Runner = Callable[[str, dict[str, np.ndarray]], Mapping[str, np.ndarray]]
Arrays = dict[str, np.ndarray]


class Difference(NamedTuple):
    """The largest difference of one output."""

    absolute: float
    relative: float  # as the tolerance counts it


class Parity(NamedTuple):
    """How well an artefact agrees with its policy on random observations."""

    observations: int  # per signature
    largest_difference: float  # over all outputs and signatures, as the tolerance counts it
    near_ties: int  # greedy choices that differ because the two best are equal up to rounding
    differences: dict[str, dict[str, Difference]]  # the largest per signature and output

    def to_json(self) -> dict[str, Any]:
        """Returns the report for `policy_spec.json`."""
        differences = {
            signature: {name: difference._asdict() for name, difference in found.items()}
            for signature, found in self.differences.items()
        }
        report = {**self._asdict(), "differences": differences}
        return {**report, "tolerance": TOLERANCE, "seed": _SEED}


def verify_saved_model(folder: Path, program: Program, state: PolicyState) -> Parity:
    """Loads the SavedModel in `folder` and compares it with a Program and a state.

    Raises:
        ExportError: if it cannot be run, lacks a name, or gives other numbers.
    """
    try:
        signatures = tf.saved_model.load(str(folder)).signatures
    except Exception as error:
        raise ExportError(f"The SavedModel cannot be loaded: {error}") from error

    def run(signature: str, inputs: Arrays) -> Arrays:
        tensors = {name: tf.constant(array) for name, array in inputs.items()}
        return {name: x.numpy() for name, x in signatures[signature](**tensors).items()}

    return verify(run, program, state)


def verify_onnx(folder: Path, program: Program, state: PolicyState) -> Parity:
    """Runs the ONNX files in `folder` and compares them with a Program and a state.

    Raises:
        ExportError: if one cannot be run, lacks a name, or gives other numbers.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    sessions = {}
    for signature, name in ONNX_FILES.items():
        try:
            sessions[signature] = onnxruntime.InferenceSession(
                (folder / name).read_bytes(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise ExportError(f"ONNX Runtime cannot load {name}: {error}") from error

    def run(signature: str, inputs: Arrays) -> Arrays:
        session = sessions[signature]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, inputs), strict=True))

    return verify(run, program, state)


def verify(run: Runner, program: Program, state: PolicyState) -> Parity:
    """Compares an artefact with a Program and a state on random observations.

    Args:
        run: `run(signature, inputs)` gives the artefact's outputs by name.
        program: what the artefact was made from.
        state: likewise.

    Raises:
        ExportError: naming the output that differs and by how much.
    """
    for slot in program.layout.of(*ACTING):
        if not np.isfinite(state.arrays[slot.key]).all():
            raise ExportError(
                f"The weight {slot.key!r} of the policy is not finite: the policy has diverged in "
                "training, and is not exported. Restore an earlier checkpoint."
            )
    differences: dict[str, dict[str, Difference]] = {}
    other_choices = rows = 0
    for signature in (GREEDY, SAMPLE):
        trials = [*_trials(run, program, state, signature)]
        other_choices += sum(trial.other_choices for trial in trials)
        rows = sum(trial.rows for trial in trials)
        joined: dict[str, Difference] = {}
        for trial in trials:
            for name, found in trial.differences.items():
                before = joined.get(name, Difference(0.0, 0.0))
                joined[name] = Difference(*map(max, before, found))
        differences[signature] = joined
    largest = max(x.relative for found in differences.values() for x in found.values())
    return Parity(rows, largest, other_choices, differences)


class _Trial(NamedTuple):
    """What one batch showed."""

    rows: int
    other_choices: int
    differences: dict[str, Difference]


def _trials(run: Runner, program: Program, state: PolicyState, signature: str) -> Iterator[_Trial]:
    rng = np.random.default_rng(_SEED)
    sizes = _SEQUENCES if program.ports.is_recurrent else [(n, 1) for n in _ROWS]
    for count, steps in sizes:
        inputs = random_inputs(program.ports, count, steps, rng)
        lengths = np.full(count, steps, np.int32)
        if program.ports.is_recurrent:
            lengths[1:] = rng.integers(1, steps + 1, count - 1)
            inputs[-len(program.ports.states) :] = _reached_memory(program, state, count, rng)
        yield _tried(run, signature, program, state, inputs, lengths, rng)


def _tried(
    run: Runner,
    signature: str,
    program: Program,
    state: PolicyState,
    inputs: list[np.ndarray],
    lengths: np.ndarray,
    rng: np.random.Generator,
) -> _Trial:
    recurrent, explorer = program.ports.is_recurrent, serving_explorer(program)
    count, steps = len(lengths), inputs[0].shape[1]
    valid = np.arange(steps) < lengths[:, None]
    noise = np.zeros((count, steps, explorer.noise_size), np.float32)
    params = np.zeros(explorer.num_params, np.float32)
    if signature == SAMPLE:
        drawn = explorer.draw_noise(rng, count * steps, params)
        noise = drawn.reshape(count, steps, -1)
    given = {p.name: x for p, x in zip(program.ports.all, inputs, strict=True)}
    if not recurrent:
        given = {name: x[:, 0] for name, x in given.items()}
    else:
        given[SEQ_LENS] = lengths
    if signature == SAMPLE:
        given[NOISE] = noise if recurrent else noise[:, 0]
    try:
        outputs = {name: np.asarray(x) for name, x in run(signature, given).items()}
    except Exception as error:
        raise ExportError(
            f"The exported signature {signature!r} does not run on {count} x {steps} observations: "
            f"{type(error).__name__}: {error}"
        ) from error
    ports = output_ports(program)
    _check_form(signature, outputs, ports, count, steps)
    ours = {p.name: outputs[p.name][valid] if p.axes == 2 else outputs[p.name] for p in ports}
    wanted = _reference(program, state, inputs, lengths)
    wanted = {p.name: wanted[p.name][valid] if p.axes == 2 else wanted[p.name] for p in ports}
    return _compared(signature, program, ours, wanted, noise[valid], explorer)


def _reached_memory(
    program: Program, state: PolicyState, count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Returns memories `[count, ...]` that the policy comes to itself, in none to three steps.

    Random numbers would do for most models, but a memory may be a count of steps, for example.
    """
    lengths = rng.integers(0, 4, count)
    inputs = random_inputs(program.ports, count, 3, rng)
    for memory in inputs[-len(program.ports.states) :]:
        memory.fill(0.0)
    reached = _reference(program, state, inputs, lengths)
    return [reached[port.name] for port in program.act_layout.states]


def _reference(
    program: Program, state: PolicyState, inputs: Sequence[np.ndarray], lengths: np.ndarray
) -> Arrays:
    """Returns what the policy computes greedily, `[B, T, ...]`; `[B, ...]` without a memory."""
    obs, seen, memory = program.ports.split(inputs)
    explorer = program.spec.explorer
    noise = np.zeros((len(lengths), explorer.noise_size), np.float32)
    params = np.zeros(explorer.num_params, np.float32)
    found = []
    for t in range(inputs[0].shape[1]):
        rows = [x[:, t] for x in (*obs, *seen)]
        acted = program.runtime.run(state, [*rows, *memory], noise, params)
        outputs = program.act_layout.flatten(acted)
        found.append(served_outputs(program, [np.array(x) for x in outputs]))
        going = t < lengths
        memory = [
            np.where(going.reshape(-1, *[1] * (old.ndim - 1)), new, old)
            for old, new in zip(memory, acted.states, strict=True)
        ]
    if not program.ports.is_recurrent:
        return found[0]
    stacked = {name: np.stack([each[name] for each in found], axis=1) for name in found[0]}
    return {**stacked, **{f"state_out_{i}": x for i, x in enumerate(memory)}}


def _check_form(
    signature: str, ours: Arrays, ports: Sequence[ServingPort], count: int, steps: int
) -> None:
    names = sorted(port.name for port in ports)
    if sorted(ours) != names:
        raise ExportError(
            f"The exported signature {signature!r} gives {sorted(ours)}, but should give {names}."
        )
    for port in ports:
        shape = [count, steps][: port.axes] + list(port.port.shape)
        form = f"{ours[port.name].dtype}{list(ours[port.name].shape)}"
        expected = f"{port.port.dtype}{shape}"
        if form != expected:
            raise ExportError(
                f"The exported signature {signature!r} gives {port.name} as {form}, not {expected}."
            )


def _compared(
    signature: str, program: Program, ours: Arrays, wanted: Arrays, noise: np.ndarray, explorer: Any
) -> _Trial:
    layout, spec = program.act_layout, program.spec
    found: dict[str, Difference] = {}

    def compare(name: str, given: np.ndarray, right: np.ndarray, scale: np.ndarray) -> None:
        found[name] = _difference(signature, name, given, right, scale)

    inputs = ours["action_dist_inputs"]
    derived = {port.name for port in _action_outputs(program)} | {"action_logp"}
    by_itself = _samples_by_itself(spec)
    if by_itself and signature == GREEDY:  # nothing but the class says what noise gives
        derived = set() if explorer.key == spec.explorer.key else {"action_logp"}
    for name in [name for name in ours if name not in derived]:
        compare(name, ours[name], wanted[name], _sizes(wanted[name]))
    if by_itself:
        return _Trial(len(noise), 0, found)
    distribution = spec.dist_class(tf.constant(inputs))
    params = tf.zeros([explorer.num_params], tf.float32)
    actions, logp = explorer.apply(distribution, tf.constant(noise), params)
    width = _row_sizes(inputs, noise)
    compare("action_logp", ours["action_logp"], logp.numpy(), width)
    served = _action_outputs(program)
    for_env, normalized = served[: len(layout.actions)], served[len(layout.actions) :]
    own = [ours[port.name] for port in normalized]
    other = np.zeros(len(noise), bool)
    for port, given, right in zip(normalized, own, actions, strict=True):
        scale = np.maximum(width.reshape(-1, *[1] * (given.ndim - 1)), np.abs(right.numpy()))
        compare(port.name, given, right.numpy(), scale)
        if given.dtype.kind != "f" and signature == GREEDY:
            changed = given != wanted[port.name]
            other |= changed.reshape(len(noise), -1).any(axis=1)
    mapped = spec.pipeline.to_env([tf.constant(leaf) for leaf in own])
    for port, right in zip(for_env, mapped, strict=True):
        compare(port.name, ours[port.name], right.numpy(), _sizes(right.numpy()))
    return _Trial(len(noise), int(other.sum()), found)


def _samples_by_itself(spec: Any) -> bool:
    """Whether the class says how actions are sampled, so that the distribution does not tell."""
    owner = spec.policy_class
    return owner._overrides("action_sampler_fn") or owner._overrides("action_distribution_fn")


def _action_outputs(program: Program) -> list[Any]:
    """Returns the ports of the environment's actions, then those of the normalised ones."""
    layout, ports = program.act_layout, [port.port for port in output_ports(program)]
    count = len(layout.actions)
    return [*ports[count : 2 * count], *ports[:count]]


def _difference(
    signature: str, name: str, given: np.ndarray, right: np.ndarray, scale: np.ndarray
) -> Difference:
    """Returns the largest difference of one output.

    Raises:
        ExportError: if it is larger than allowed.
    """
    if given.dtype.kind != "f":
        if not np.array_equal(given, right):
            raise ExportError(
                f"The exported signature {signature!r} gives other {name} than the policy in "
                f"{int((given != right).sum())} of {given.size} places. The export was refused."
            )
        return Difference(0.0, 0.0)
    plain = np.isfinite(right) & (right > MASKED_LOGIT / 2)
    if not np.array_equal(given[~plain], right[~plain], equal_nan=True):
        raise ExportError(
            f"The exported signature {signature!r} gives other {name} than the policy where the "
            "policy's are masked or not finite. The export was refused."
        )
    error = np.abs(given[plain].astype(np.float64) - right[plain])
    relative = float(np.max(error / scale[plain], initial=0.0))
    if not relative <= TOLERANCE:
        raise ExportError(
            f"The exported signature {signature!r} gives other {name} than the policy: the largest "
            f"relative difference is {relative:.3g}, allowed is {TOLERANCE:g}. The export was "
            "refused."
        )
    return Difference(float(np.max(error, initial=0.0)), relative)


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns |x| in double precision, 0 where x is masked or not finite."""
    plain = np.isfinite(array) & (array > MASKED_LOGIT / 2)
    return np.where(plain, np.abs(array.astype(np.float64)), 0.0)


def _sizes(array: np.ndarray) -> np.ndarray:
    """Returns max(1, |x|) `[B, ...]`, with |x| the largest of each column among all rows."""
    if array.dtype.kind != "f":
        return np.ones(array.shape)
    largest = _plain(array).max(axis=0, initial=0.0)
    return np.broadcast_to(np.maximum(1.0, largest), array.shape)


def _row_sizes(inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Returns how large the numbers are that the actions of each row are made of, `[B]`."""
    largest = _plain(inputs).max(axis=1, initial=0.0)
    drawn = np.square(_plain(noise)).sum(axis=1) if noise.size else 0.0
    return np.maximum.reduce([np.ones(len(inputs)), largest, drawn * np.ones(len(inputs))])


def random_inputs(
    ports: InputPorts, count: int, steps: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws inputs of acting: `[count, steps, ...]` per row port, `[count, ...]` of the memory.

    Masks allow about two of three choices.
    """
    rows = count * steps
    drawn = random_observations(ports.obs_leaves, rows, rng)
    for i, mask in enumerate(ports.is_mask):
        if mask:
            drawn[i] = (rng.random(drawn[i].shape) < 0.67).astype(drawn[i].dtype)
    for view in ports.views:
        drawn += _random_view(view, rows, rng)
    found = [x.reshape(count, steps, *x.shape[1:]) for x in drawn]
    memory = [0.5 * rng.standard_normal((count, *port.shape)) for port in ports.states]
    return [*found, *(x.astype(np.float32) for x in memory)]


def _random_view(view: View, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Draws a view of rows that were collected, one array per leaf."""
    count = rows * len(view.shifts) if view.is_window else rows
    if view.source == OBS:
        drawn = random_observations(view.source_leaves, count, rng)
    elif view.source == ACTIONS:
        drawn = [_random_action(leaf, count, rng) for leaf in view.source_leaves]
    else:
        drawn = [rng.standard_normal(count).astype(np.float32)]
    return [x.reshape(rows, *port.shape) for x, port in zip(drawn, view.ports, strict=True)]


def _random_action(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Draws normalised actions."""
    size = (rows, *leaf.shape)
    if is_float_box(leaf.space):
        return rng.uniform(-1.0, 1.0, size).astype(leaf.dtype)
    choices = np.reshape(cell_sizes(leaf.space), leaf.shape)
    return rng.integers(choices, size=size).astype(leaf.dtype)


def random_observations(
    obs_leaves: Sequence[Leaf], rows: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws observations that an environment might give, one array `[rows, *shape]` per leaf.

    Numbers in a Box are uniform between its bounds. Where a bound is missing or so far away that it
    is none in practice, they are normal around 0 or the nearest bound, at scales from 0.1 to 10.
    """
    return [_random_leaf(leaf, rows, rng) for leaf in obs_leaves]


def _random_leaf(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    space: Any = leaf.space
    size = (rows, *leaf.shape)
    if isinstance(space, spaces.Discrete):
        return int(space.start) + rng.integers(int(space.n), size=size, dtype=np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return (space.start + rng.integers(space.nvec, size=size)).astype(np.int64)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(2, size=size).astype(leaf.dtype)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    ranged = high / 2 - low / 2 <= _WIDE / 2
    scale = 10.0 ** rng.uniform(-1.0, 1.0, (rows, *[1] * len(leaf.shape)))
    free = np.clip(np.clip(0.0, low, high) + scale * rng.standard_normal(size), low, high)
    start, stop = np.where(ranged, low, 0.0), np.where(ranged, high, 0.0)
    drawn = np.where(ranged, start + rng.random(size) * (stop - start), free)
    if leaf.dtype.kind != "f":
        drawn = np.clip(np.rint(drawn), low, high)
    return drawn.astype(leaf.dtype)
