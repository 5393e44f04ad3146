"""Verification: runs a written artefact and compares it to its policy.

The comparison has three steps, each against the policy's own code, so that rounding in one step is
not counted as an error of the next:

1. distribution inputs, values, recurrent states and extras are compared to the policy's, step by
   step if it is recurrent;
2. normalised actions and their log-probability are compared to those of the distribution for the
   artefact's inputs and the noise;
3. the environment's actions are compared to the results of `ActionMapping` for the artefact's
   normalised ones.

Two programs that compute the same in another order differ by rounding, which must be allowed, and
nothing else. A difference is relative to `max(1, |x|)`, |x| being the largest of its column; if x
is computed from larger numbers (an action from its mean and noise, a log-probability from logits),
relative to those. Integers must be equal.

The amount of rounding depends on the network: a deep recurrent one that was trained for long may
multiply it by a hundred, and in a small one a wrong weight may change less than `TOLERANCE`. So if
outputs of the network differ by more than `ERROR_SLACK`, and by at most `MAX_ERROR`, both sides are
compared to the policy in double precision: the artefact's error may be `ERROR_FACTOR` times the
error of the policy's float32 numbers, plus `ERROR_SLACK`. A network with an operation that does not
exist in double precision may differ by `TOLERANCE`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.errors import ExportError
from tfpolicies.export.distribution import has_custom_sampling
from tfpolicies.export.reference_runtime import ReferenceRuntime
from tfpolicies.export.serving_functions import (
    GREEDY,
    SAMPLE,
    make_output_ports,
    make_serving_explorer,
    name_outputs,
)
from tfpolicies.models.distributions import MASKED_LOGIT
from tfpolicies.models.ports import ACTIONS, NOISE, OBS, SEQ_LENS, InputPorts, ViewInput
from tfpolicies.models.spaces import Leaf, choices_per_cell, is_float_box
from tfpolicies.program.devices import CPU
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.program import Program
from tfpolicies.program.runtimes.onnx import make_cpu_session
from tfpolicies.system.paths import link_without_wildcards

ONNX_FILES = {GREEDY: "model.onnx", SAMPLE: "model_sample.onnx"}
TOLERANCE = 1e-5
MAX_ERROR = 1e-3
ERROR_FACTOR, ERROR_SLACK = 4.0, 1e-6
_SEED = 0
_LOWEST_FLOAT16 = np.finfo(np.float16).min  # the value of a masked logit in float16
_MAX_RANGE = 1e4  # wider bounds are not used as a range to draw from
_BATCH_SIZES = (1, 7, 248, 248, 248, 248)  # batch sizes for other models: 1000 in total
_SEQUENCE_SHAPES = ((1, 1), (3, 7), (16, 12), (248, 1))  # sequences and steps, for recurrent models

Arrays = dict[str, np.ndarray]
Runner = Callable[[str, Arrays], Mapping[str, np.ndarray]]
Step = Callable[[Arrays], Mapping[str, np.ndarray]]


class Difference(NamedTuple):
    """The largest difference of one output, and its errors against double precision."""

    absolute: float
    relative: float  # compared to the tolerance
    error: float = 0.0  # of the artefact, relative; 0 if double precision was not run
    own_error: float = 0.0  # of the policy


class Parity(NamedTuple):
    """The agreement of an artefact with its policy on random observations."""

    observations: int  # per signature
    largest_difference: float  # over all outputs and signatures, relative
    near_ties: int  # greedy choices that differ because the two best are equal up to rounding
    differences: dict[str, dict[str, Difference]]  # the largest per signature and output
    tolerance: float | None = TOLERANCE  # None if weights were rounded on purpose

    def to_json(self) -> dict[str, Any]:
        """Returns the report for `policy_spec.json`."""
        differences = {
            signature: {name: difference._asdict() for name, difference in by_output.items()}
            for signature, by_output in self.differences.items()
        }
        extra = {"differences": differences, "seed": _SEED}
        return {**self._asdict(), **extra}


def verify_saved_model(folder: Path, program: Program, state: PolicyState) -> Parity:
    """Loads the SavedModel in `folder` and compares it to a Program and a state; see `verify`."""
    try:
        with link_without_wildcards(folder) as readable, tf.device(CPU):
            signatures = tf.saved_model.load(str(readable)).signatures
    except Exception as error:
        raise ExportError(f"The SavedModel cannot be loaded: {error}") from error

    def run(signature: str, inputs: Arrays) -> Arrays:
        with tf.device(CPU):
            tensors = {name: tf.constant(array) for name, array in inputs.items()}
            return {name: x.numpy() for name, x in signatures[signature](**tensors).items()}

    return verify(run, program, state)


def verify_onnx(folder: Path, program: Program, state: PolicyState) -> Parity:
    """Runs the ONNX files in `folder` and compares them to a Program and a state; see `verify`."""
    steps = {signature: make_onnx_step(folder / name) for signature, name in ONNX_FILES.items()}
    return verify(lambda signature, inputs: steps[signature](inputs), program, state)


def make_onnx_step(path: Path) -> Step:
    """Returns a function that runs an ONNX file, from inputs to outputs by name."""
    try:
        session = make_cpu_session(path.read_bytes(), threads=0)
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot load {path.name}: {error}") from error
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def verify(
    run: Runner,
    program: Program,
    state: PolicyState,
    signatures: Sequence[str] = (GREEDY, SAMPLE),
    tolerance: float = TOLERANCE,
) -> Parity:
    """Compares an artefact to a Program and a state on random observations.

    Args:
        run: `run(signature, inputs)` returns the artefact's outputs by name.
        program: the Program of the exported policy.
        state: the state of the exported policy.
        signatures: those of the artefact.
        tolerance: the largest allowed difference; infinity if numbers were rounded on purpose, so
            that the difference is only reported.
    """
    for slot in program.layout.acting_slots:
        if not np.isfinite(state.arrays[slot.key]).all():
            raise ExportError(
                f"The weight {slot.key!r} of the policy is not finite: the policy has diverged in "
                "training, so it is not exported. Restore an earlier checkpoint."
            )
    get_double_runtime = functools.cache(lambda: ReferenceRuntime(program, double_precision=True))
    comparisons = [
        Comparison(run, program, state, name, tolerance, get_double_runtime) for name in signatures
    ]
    for comparison in comparisons:
        comparison.compare_all_batches()
    differences = {item.signature: item.differences for item in comparisons}
    largest = max(x.relative for item in comparisons for x in item.differences.values())
    other_choices = sum(x.other_choices for x in comparisons)
    reported_tolerance = tolerance if tolerance < np.inf else None
    return Parity(comparisons[0].rows, largest, other_choices, differences, reported_tolerance)


def make_sequence_runner(step: Step, program: Program) -> Runner:
    """Returns a `run` function for sequences, from a `step` function for inputs `[B, ...]`."""
    if not program.ports.is_recurrent:
        return lambda signature, inputs: step(inputs)
    names = {port.name: port.name.replace("_in_", "_out_") for port in program.ports.states}

    def run(signature: str, inputs: Arrays) -> Arrays:
        rows = {name: x for name, x in inputs.items() if name not in {*names, SEQ_LENS}}
        recurrent_state = {name: inputs[name] for name in names}
        outputs_by_step: list[Arrays] = []
        for t in range(next(iter(rows.values())).shape[1]):
            outputs = dict(step({name: x[:, t] for name, x in rows.items()} | recurrent_state))
            is_active = t < inputs[SEQ_LENS]
            recurrent_state = {
                name: _select(is_active, outputs.pop(names[name]), old)
                for name, old in recurrent_state.items()
            }
            outputs_by_step.append(outputs)
        return _stack_steps(outputs_by_step) | {
            names[name]: x for name, x in recurrent_state.items()
        }

    return run


def _select(use_new: np.ndarray, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns the rows of `make` where flags `[B]` are set, and those of `old` elsewhere."""
    return np.where(use_new.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def _stack_steps(steps: Sequence[Arrays]) -> Arrays:
    return {name: np.stack([outputs[name] for outputs in steps], axis=1) for name in steps[0]}


class Comparison:
    """Compares one signature of an artefact to the policy; see `verify`.

    `get_double_runtime` returns the policy in double precision; it is called if a difference may be
    rounding.

    Attributes:
        signature: its name.
        rows: the number of compared observations.
        other_choices: the number of greedy choices that differ.
        differences: the largest by output.
    """

    def __init__(
        self,
        run: Runner,
        program: Program,
        state: PolicyState,
        signature: str = GREEDY,
        tolerance: float = TOLERANCE,
        get_double_runtime: Callable[[], ReferenceRuntime] | None = None,
    ) -> None:
        self._run = run
        self._program = program
        self._state = state
        self._tolerance = tolerance
        self.signature = signature
        self._explorer = make_serving_explorer(program)
        self._outputs = make_output_ports(program)
        self._rng = np.random.default_rng(_SEED)
        self._act: Callable[..., Any] = program.runtime.run
        if program.functions.acting_device != CPU:
            self._act = ReferenceRuntime(program, double_precision=False).run
        self._get_double_runtime = get_double_runtime or (
            lambda: ReferenceRuntime(program, double_precision=True)
        )
        self._batches: list[tuple[Arrays, Arrays, Callable[[], Arrays]]] = []
        self._doubtful: set[str] = set()  # outputs that have to be compared to double precision
        self.rows = self.other_choices = 0
        self.differences: dict[str, Difference] = {}

    def compare_all_batches(self) -> None:
        """Compares all batches; raises an `ExportError` that names the output that differs."""
        is_recurrent = self._program.ports.is_recurrent
        for count, steps in _SEQUENCE_SHAPES if is_recurrent else [(n, 1) for n in _BATCH_SIZES]:
            inputs = self.draw_inputs(count, steps)
            lengths = np.full(count, steps, np.int32)
            if is_recurrent:
                self._add_noise(inputs[-len(self._program.ports.states) :])
                lengths[1:] = self._rng.integers(1, steps + 1, count - 1)
            self._compare_batch(inputs, lengths)
        for name in sorted(self._doubtful):
            self._compare_to_double(name)

    def draw_inputs(self, count: int, steps: int) -> list[np.ndarray]:
        """Draws inputs by `draw_random_inputs`, but recurrent states that the policy can reach."""
        ports = self._program.ports
        inputs = draw_random_inputs(ports, count, steps, self._rng)
        if ports.is_recurrent:
            inputs[-len(ports.states) :] = self._draw_reachable_states(count)
        return inputs

    def _compare_batch(self, inputs: list[np.ndarray], lengths: np.ndarray) -> None:
        explorer, (count, steps) = self._explorer, inputs[0].shape[:2]
        noise = np.zeros((count, steps, explorer.noise_size), np.float32)
        if self.signature == SAMPLE:
            params = np.zeros(explorer.num_params, np.float32)
            noise = explorer.draw_noise(self._rng, count * steps, params).reshape(count, steps, -1)
        valid = np.arange(steps) < lengths[:, None]
        outputs, reference_outputs = self.run_both(inputs, lengths, noise)

        @functools.cache
        def compute_exact() -> Arrays:
            reference = self._run_policy(inputs, lengths, noise, self._get_double_runtime().run)
            return self._select_rows(reference, valid)

        self._batches.append((outputs, reference_outputs, compute_exact))
        self._compare_outputs(outputs, reference_outputs, noise[valid])

    def run_both(
        self, inputs: list[np.ndarray], lengths: np.ndarray, noise: np.ndarray
    ) -> tuple[Arrays, Arrays]:
        """Returns the outputs of artefact and policy by name, with only the valid steps, as rows.

        `lengths` `[B]` are the valid steps of each sequence; only the signature that samples uses
        the noise `[B, T, k]`.
        """
        ports, (count, steps) = self._program.ports, inputs[0].shape[:2]
        valid = np.arange(steps) < lengths[:, None]
        named_inputs = {p.name: x for p, x in zip(ports.all, inputs, strict=True)}
        if self.signature == SAMPLE:
            named_inputs[NOISE] = noise
        if ports.is_recurrent:
            named_inputs[SEQ_LENS] = lengths
        else:
            named_inputs = {name: x[:, 0] for name, x in named_inputs.items()}
        reference = self._run_policy(inputs, lengths, noise, self._act)
        outputs = self._run_artefact(named_inputs, count, steps)
        return self._select_rows(outputs, valid), self._select_rows(reference, valid)

    def _select_rows(self, outputs: Arrays, valid: np.ndarray) -> Arrays:
        """Returns the outputs of valid steps, bool `[B, T]`, as rows."""
        ports = self._outputs
        return {p.name: outputs[p.name][valid] if p.axes == 2 else outputs[p.name] for p in ports}

    def _run_artefact(self, inputs: Arrays, count: int, steps: int) -> Arrays:
        """Runs the artefact, and checks names, dtypes and shapes of its outputs."""
        try:
            outputs = {name: np.asarray(x) for name, x in self._run(self.signature, inputs).items()}
        except Exception as error:
            raise self._make_error(
                f"does not run on {count} x {steps} observations: {type(error).__name__}: {error}"
            ) from error
        names = sorted(port.name for port in self._outputs)
        if sorted(outputs) != names:
            raise self._make_error(f"returns {sorted(outputs)}, but should return {names}.")
        for port in self._outputs:
            shape = [count, steps][: port.axes] + list(port.port.shape)
            actual = f"{outputs[port.name].dtype}{list(outputs[port.name].shape)}"
            expected = f"{port.port.dtype}{shape}"
            if actual != expected:
                raise self._make_error(f"returns {port.name} as {actual}, not {expected}.")
        return outputs

    def _make_error(self, problem: str) -> ExportError:
        return ExportError(f"The exported signature {self.signature!r} {problem}")

    def _draw_reachable_states(self, count: int) -> list[np.ndarray]:
        """Returns recurrent states `[count, ...]` that the policy reaches in 0 to 3 steps.

        Random numbers would be fine for most models, but a state may be a count of steps, for
        example.
        """
        program = self._program
        lengths = self._rng.integers(0, 4, count)
        inputs = draw_random_inputs(program.ports, count, 3, self._rng)
        for initial in inputs[-len(program.ports.states) :]:
            initial.fill(0.0)
        noise = np.zeros((count, 3, 0), np.float32)
        outputs = self._run_policy(inputs, lengths, noise, self._act)
        return [outputs[port.name] for port in program.act_layout.states]

    def _add_noise(self, states: Sequence[np.ndarray]) -> None:
        """Adds noise to every second recurrent state `[count, ...]`, to reveal wrong weights.

        Numbers that are integers in all rows are unchanged: they may be a count of steps or an
        index.
        """
        for state in states:
            is_real = (state % 1.0 != 0.0).any(axis=0)
            noise = 0.5 * self._rng.standard_normal(state[1::2].shape)
            state[1::2] += np.where(is_real, noise, 0.0).astype(state.dtype)

    def _run_policy(
        self,
        inputs: Sequence[np.ndarray],
        lengths: np.ndarray,
        noise: np.ndarray,
        run: Callable[..., Any],
    ) -> Arrays:
        """Returns the greedy outputs of the policy, `[B, T, ...]`; `[B, ...]` if not recurrent.

        Of the noise `[B, T, k]` it uses the columns of its network. `run` acts one step.
        """
        program, explorer = self._program, self._program.spec.explorer
        obs, views, recurrent_state = program.ports.split(inputs)
        step_noise = np.zeros((len(lengths), explorer.noise_size), np.float32)
        network_noise_size = program.ports.noise_size
        params = np.zeros(explorer.num_params, np.float32)
        outputs_by_step = []
        for t in range(inputs[0].shape[1]):
            rows = [x[:, t] for x in (*obs, *views)]
            step_noise[:, :network_noise_size] = noise[:, t, :network_noise_size]
            act_outputs = run(self._state, [*rows, *recurrent_state], step_noise, params)
            outputs = program.act_layout.flatten(act_outputs)
            outputs_by_step.append(name_outputs(program, [np.array(x) for x in outputs]))
            is_active = t < lengths
            recurrent_state = [
                _select(is_active, *pair)
                for pair in zip(act_outputs.states, recurrent_state, strict=True)
            ]
        if not program.ports.is_recurrent:
            return outputs_by_step[0]
        return {
            **_stack_steps(outputs_by_step),
            **{f"state_out_{i}": x for i, x in enumerate(recurrent_state)},
        }

    def _compare_outputs(self, outputs: Arrays, reference: Arrays, noise: np.ndarray) -> None:
        spec, explorer = self._program.spec, self._explorer
        count, inputs = len(self._program.act_layout.actions), outputs["action_dist_inputs"]
        normalized, for_env = [*outputs][:count], [*outputs][count : 2 * count]
        derived = {*normalized, *for_env, "action_logp"}
        has_custom_sampling_code = has_custom_sampling(spec)
        if (
            has_custom_sampling_code and self.signature == GREEDY
        ):  # only the class knows the effect of noise
            derived = set() if explorer.key == spec.explorer.key else {"action_logp"}
        for name in [name for name in outputs if name not in derived]:
            self._compare_output(
                name,
                outputs[name],
                reference[name],
                _get_column_scales(reference[name]),
                is_computed=True,
            )
        self.rows += len(noise)
        if has_custom_sampling_code:
            return
        params = tf.zeros([explorer.num_params], tf.float32)
        model = self._program.load_model(self._state)
        distribution = spec.dist_class(tf.constant(inputs), model)
        actions, logp = explorer.apply(distribution, tf.constant(noise), params)
        width = _get_row_scales(inputs, noise[:, self._program.ports.noise_size :])
        self._compare_output("action_logp", outputs["action_logp"], logp.numpy(), width)
        has_other_choice = np.zeros(len(noise), bool)
        for name, expected in zip(normalized, actions, strict=True):
            scale = np.maximum(
                width.reshape(-1, *[1] * (expected.ndim - 1)), np.abs(expected.numpy())
            )
            self._compare_output(name, outputs[name], expected.numpy(), scale)
            if outputs[name].dtype.kind != "f" and self.signature == GREEDY:
                changed = outputs[name] != reference[name]
                has_other_choice |= changed.reshape(len(noise), -1).any(axis=1)
        self.other_choices += int(has_other_choice.sum())
        mapped = spec.action_mapping.to_env([outputs[name] for name in normalized])
        for name, expected in zip(for_env, mapped, strict=True):
            self._compare_output(name, outputs[name], expected, _get_column_scales(expected))

    def _compare_output(
        self,
        name: str,
        actual: np.ndarray,
        expected: np.ndarray,
        scale: np.ndarray,
        *,
        is_computed: bool = False,
    ) -> None:
        """Records the difference of one output, if it is not larger than allowed.

        `scale` is for relative differences, of each number. If the network does not compute the
        output (`is_computed`), `expected` is computed from outputs of the artefact.
        """
        message, tolerance = f"returns other {name} than the policy", self._tolerance
        if actual.dtype.kind != "f" and tolerance < np.inf:
            if not np.array_equal(actual, expected):
                places = f"{int((actual != expected).sum())} of {actual.size} places"
                raise self._make_error(f"{message} in {places}. The export was refused.")
            self.differences.setdefault(name, Difference(0.0, 0.0))
            return
        is_finite = _is_unmasked_and_finite(expected)
        if tolerance == np.inf and actual.dtype.kind == "f":
            actual = np.where(actual <= _LOWEST_FLOAT16, MASKED_LOGIT, actual)
        if not np.array_equal(actual[~is_finite], expected[~is_finite], equal_nan=True):
            raise self._make_error(
                f"{message} where the policy's are masked or not finite. The export was refused."
            )
        if not np.isfinite(actual[is_finite]).all():
            raise self._make_error(
                f"{message}: numbers that are not finite. The export was refused."
            )
        difference = Difference(
            *(_find_largest_error(actual, expected, x, is_finite) for x in (1.0, scale))
        )
        if is_computed and ERROR_SLACK < difference.relative <= MAX_ERROR and tolerance < np.inf:
            self._doubtful.add(name)
        elif not difference.relative <= tolerance:
            raise self._make_difference_error(name, difference.relative)
        before = self.differences.get(name, Difference(0.0, 0.0))
        self.differences[name] = Difference(*map(max, before, difference))

    def _make_difference_error(self, name: str, relative: float) -> ExportError:
        return self._make_error(
            f"returns other {name} than the policy: the largest relative difference is "
            f"{relative:.3g}, allowed is {self._tolerance:g}. The export was refused."
        )

    def _compare_to_double(self, name: str) -> None:
        """Compares an output of all batches, and the policy's own, to double precision."""
        error = own_error = 0.0
        difference = self.differences[name]
        for outputs, policy_outputs, compute_exact in self._batches:
            try:
                reference = compute_exact()[name]
            except (ValueError, tf.errors.OpError) as problem:  # an operation lacks float64
                if difference.relative <= self._tolerance:
                    return
                raise self._make_difference_error(name, difference.relative) from problem
            expected = policy_outputs[name]
            is_finite, scale = _is_unmasked_and_finite(expected), _get_column_scales(expected)
            error = max(error, _find_largest_error(outputs[name], reference, scale, is_finite))
            own_error = max(own_error, _find_largest_error(expected, reference, scale, is_finite))
        allowed = min(ERROR_FACTOR * own_error + ERROR_SLACK, MAX_ERROR)
        if not error <= allowed:
            raise self._make_error(
                f"returns other {name} than the policy: the largest relative error against double "
                f"precision is {error:.3g}, the policy's own is {own_error:.3g}, allowed is "
                f"{allowed:.3g}. The export was refused."
            )
        self.differences[name] = difference._replace(error=error, own_error=own_error)


def _find_largest_error(
    actual: np.ndarray, expected: np.ndarray, scale: np.ndarray | float, where: np.ndarray
) -> float:
    """Returns the largest difference at the positions of a mask, relative to a scale."""
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(actual.astype(np.float64) - expected) / scale
    return float(np.max(errors, initial=0.0, where=where))


def _is_unmasked_and_finite(array: np.ndarray) -> np.ndarray:
    """Returns a mask of the numbers that are not masked, infinite or NaN."""
    return np.isfinite(array) & (array > MASKED_LOGIT / 2)


def _get_magnitudes(array: np.ndarray) -> np.ndarray:
    """Returns |x| in double precision, 0 for masked and non-finite numbers."""
    return np.where(_is_unmasked_and_finite(array), np.abs(array.astype(np.float64)), 0.0)


def _get_column_scales(array: np.ndarray) -> np.ndarray:
    """Returns max(1, |x|) `[B, ...]`, with |x| the largest of each column over all rows."""
    if array.dtype.kind != "f":
        return np.ones(array.shape)
    largest = _get_magnitudes(array).max(axis=0, initial=0.0)
    return np.broadcast_to(np.maximum(1.0, largest), array.shape)


def _get_row_scales(inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Returns the size of the numbers from which the actions of each row are computed, `[B]`."""
    largest = _get_magnitudes(inputs).max(axis=1, initial=0.0)
    drawn = np.square(_get_magnitudes(noise)).sum(axis=1) if noise.size else 0.0
    return np.maximum.reduce([np.ones(len(inputs)), largest, drawn * np.ones(len(inputs))])


def draw_random_inputs(
    ports: InputPorts, count: int, steps: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws inputs of acting: `[count, steps, ...]` of rows, `[count, ...]` of recurrent states.

    Masks allow about two of three choices.
    """
    rows = count * steps
    drawn = draw_observations(ports.obs_leaves, rows, rng)
    for i, mask in enumerate(ports.is_mask):
        if mask:
            drawn[i] = (rng.random(drawn[i].shape) < 0.67).astype(drawn[i].dtype)
    for view in ports.views:
        drawn += _draw_view(view, rows, rng)
    inputs = [x.reshape(count, steps, *x.shape[1:]) for x in drawn]
    recurrent_states = [0.5 * rng.standard_normal((count, *port.shape)) for port in ports.states]
    return [*inputs, *(x.astype(np.float32) for x in recurrent_states)]


def _draw_view(view: ViewInput, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Draws a view of earlier steps, one array per leaf."""
    count = rows * len(view.shifts) if view.is_window else rows
    if view.source == OBS:
        drawn = draw_observations(view.source_leaves, count, rng)
    elif view.source == ACTIONS:
        drawn = [_draw_actions(leaf, count, rng) for leaf in view.source_leaves]
    else:
        drawn = [rng.standard_normal(count).astype(np.float32)]
    return [x.reshape(rows, *port.shape) for x, port in zip(drawn, view.ports, strict=True)]


def _draw_actions(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    if is_float_box(leaf.space):
        return rng.uniform(-1.0, 1.0, (rows, *leaf.shape)).astype(leaf.dtype)
    return _draw_choices(leaf, rows, rng).astype(leaf.dtype)


def _draw_choices(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    sizes = np.reshape(choices_per_cell(leaf.space), leaf.shape)
    return rng.integers(sizes, size=(rows, *leaf.shape))


def draw_observations(
    obs_leaves: Sequence[Leaf], rows: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws observations that an environment might return, one array `[rows, *shape]` per leaf.

    Numbers in a Box are uniform between its bounds. If a bound is missing or too large to be meant
    as a range, they are normal around 0 or the nearest bound, at scales from 0.1 to 10.
    """
    return [_draw_leaf(leaf, rows, rng) for leaf in obs_leaves]


def _draw_leaf(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    space: Any = leaf.space
    if not isinstance(space, spaces.Box):
        start = getattr(space, "start", 0)  # a MultiBinary has none
        return (start + _draw_choices(leaf, rows, rng)).astype(leaf.dtype)
    size = (rows, *leaf.shape)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    is_bounded = high / 2 - low / 2 <= _MAX_RANGE / 2
    scale = 10.0 ** rng.uniform(-1.0, 1.0, (rows, *[1] * len(leaf.shape)))
    unbounded = np.clip(np.clip(0.0, low, high) + scale * rng.standard_normal(size), low, high)
    start, stop = np.where(is_bounded, low, 0.0), np.where(is_bounded, high, 0.0)
    drawn = np.where(is_bounded, start + rng.random(size) * (stop - start), unbounded)
    if leaf.dtype.kind != "f":
        drawn = np.clip(np.rint(drawn), low, high)
    return drawn.astype(leaf.dtype)
