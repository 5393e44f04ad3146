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
outputs of the network differ by more than `SLACK`, and by at most `FARTHEST`, both sides are
compared to the policy in double precision: the artefact's error may be `FACTOR` times the error of
the policy's float32 numbers, plus `SLACK`. A network with an operation that does not exist in
double precision may differ by `TOLERANCE`.
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
from tfpolicies.export.distribution import samples_by_itself
from tfpolicies.export.reference import ReferenceActing
from tfpolicies.export.serving import (
    GREEDY,
    SAMPLE,
    output_ports,
    served_outputs,
    serving_explorer,
)
from tfpolicies.models.distributions import MASKED_LOGIT
from tfpolicies.models.ports import ACTIONS, NOISE, OBS, SEQ_LENS, InputPorts, View
from tfpolicies.models.spaces import Leaf, cell_sizes, is_float_box
from tfpolicies.program.devices import CPU
from tfpolicies.program.program import Program
from tfpolicies.program.runtimes.onnx import cpu_session
from tfpolicies.state import PolicyState
from tfpolicies.system.paths import link_without_wildcards

ONNX_FILES = {GREEDY: "model.onnx", SAMPLE: "model_sample.onnx"}
TOLERANCE = 1e-5
FARTHEST = 1e-3
FACTOR, SLACK = 4.0, 1e-6
_SEED = 0
_LOWEST_FLOAT16 = np.finfo(np.float16).min  # the value of a masked logit in float16
_WIDE = 1e4  # wider bounds are not used as a range to draw from
_ROWS = (1, 7, 248, 248, 248, 248)  # batch sizes for other models: 1000 in total
_SEQUENCES = ((1, 1), (3, 7), (16, 12), (248, 1))  # sequences and steps, for recurrent models

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
            signature: {name: difference._asdict() for name, difference in found.items()}
            for signature, found in self.differences.items()
        }
        told = {"differences": differences, "seed": _SEED}
        return {**self._asdict(), **told}


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
    steps = {signature: onnx_step(folder / name) for signature, name in ONNX_FILES.items()}
    return verify(lambda signature, inputs: steps[signature](inputs), program, state)


def onnx_step(path: Path) -> Step:
    """Returns a function that runs an ONNX file, from inputs to outputs by name."""
    try:
        session = cpu_session(path.read_bytes(), threads=0)
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

    Raises:
        ExportError: naming the output that differs and by how much.
    """
    for slot in program.layout.acting:
        if not np.isfinite(state.arrays[slot.key]).all():
            raise ExportError(
                f"The weight {slot.key!r} of the policy is not finite: the policy has diverged in "
                "training, so it is not exported. Restore an earlier checkpoint."
            )
    double = functools.cache(lambda: ReferenceActing(program, in_double=True))
    found = [Comparison(run, program, state, name, tolerance, double) for name in signatures]
    for comparison in found:
        comparison.try_all()
    differences = {each.signature: each.differences for each in found}
    largest = max(x.relative for each in found for x in each.differences.values())
    other_choices = sum(x.other_choices for x in found)
    told = tolerance if tolerance < np.inf else None
    return Parity(found[0].rows, largest, other_choices, differences, told)


def by_steps(step: Step, program: Program) -> Runner:
    """Returns a `run` function for sequences, from a `step` function for inputs `[B, ...]`."""
    if not program.ports.is_recurrent:
        return lambda signature, inputs: step(inputs)
    names = {port.name: port.name.replace("_in_", "_out_") for port in program.ports.states}

    def run(signature: str, inputs: Arrays) -> Arrays:
        rows = {name: x for name, x in inputs.items() if name not in {*names, SEQ_LENS}}
        memory = {name: inputs[name] for name in names}
        found: list[Arrays] = []
        for t in range(next(iter(rows.values())).shape[1]):
            outputs = dict(step({name: x[:, t] for name, x in rows.items()} | memory))
            going = t < inputs[SEQ_LENS]
            memory = {
                name: _where(going, outputs.pop(names[name]), old) for name, old in memory.items()
            }
            found.append(outputs)
        return _stack(found) | {names[name]: x for name, x in memory.items()}

    return run


def _where(flags: np.ndarray, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns the rows of `new` where flags `[B]` are set, and those of `old` elsewhere."""
    return np.where(flags.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def _stack(steps: Sequence[Arrays]) -> Arrays:
    return {name: np.stack([each[name] for each in steps], axis=1) for name in steps[0]}


class Comparison:
    """Compares one signature of an artefact to the policy; see `verify`.

    `get_double_runtime` returns the policy in double precision; it is called if a difference may be rounding.

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
        double: Callable[[], ReferenceActing] | None = None,
    ) -> None:
        self._run = run
        self._program = program
        self._state = state
        self._tolerance = tolerance
        self.signature = signature
        self._explorer = serving_explorer(program)
        self._outputs = output_ports(program)
        self._rng = np.random.default_rng(_SEED)
        self._act: Callable[..., Any] = program.runtime.run
        if program.functions.acting_device != CPU:
            self._act = ReferenceActing(program, in_double=False).run
        self._double = double or (lambda: ReferenceActing(program, in_double=True))
        self._batches: list[tuple[Arrays, Arrays, Callable[[], Arrays]]] = []
        self._doubtful: set[str] = set()  # outputs that have to be compared to double precision
        self.rows = self.other_choices = 0
        self.differences: dict[str, Difference] = {}

    def try_all(self) -> None:
        """Compares all batches; raises an `ExportError` that names the output that differs."""
        is_recurrent = self._program.ports.is_recurrent
        for count, steps in _SEQUENCES if is_recurrent else [(n, 1) for n in _ROWS]:
            inputs = self.drawn(count, steps)
            lengths = np.full(count, steps, np.int32)
            if is_recurrent:
                self._disturb(inputs[-len(self._program.ports.states) :])
                lengths[1:] = self._rng.integers(1, steps + 1, count - 1)
            self._try(inputs, lengths)
        for name in sorted(self._doubtful):
            self._judge(name)

    def drawn(self, count: int, steps: int) -> list[np.ndarray]:
        """Draws inputs by `random_inputs`, but recurrent states that the policy can reach."""
        ports = self._program.ports
        inputs = random_inputs(ports, count, steps, self._rng)
        if ports.is_recurrent:
            inputs[-len(ports.states) :] = self._reached_memory(count)
        return inputs

    def _try(self, inputs: list[np.ndarray], lengths: np.ndarray) -> None:
        explorer, (count, steps) = self._explorer, inputs[0].shape[:2]
        noise = np.zeros((count, steps, explorer.noise_size), np.float32)
        if self.signature == SAMPLE:
            params = np.zeros(explorer.num_params, np.float32)
            noise = explorer.draw_noise(self._rng, count * steps, params).reshape(count, steps, -1)
        valid = np.arange(steps) < lengths[:, None]
        ours, wanted = self.both(inputs, lengths, noise)

        @functools.cache
        def exact() -> Arrays:
            reference = self._reference(inputs, lengths, noise, self._double().run)
            return self._select_rows(reference, valid)

        self._batches.append((ours, wanted, exact))
        self._compare_all(ours, wanted, noise[valid])

    def both(
        self, inputs: list[np.ndarray], lengths: np.ndarray, noise: np.ndarray
    ) -> tuple[Arrays, Arrays]:
        """Returns the outputs of artefact and policy by name, with only the valid steps, as rows.

        `lengths` `[B]` are the valid steps of each sequence; only the signature that samples uses
        the noise `[B, T, k]`.
        """
        ports, (count, steps) = self._program.ports, inputs[0].shape[:2]
        valid = np.arange(steps) < lengths[:, None]
        given = {p.name: x for p, x in zip(ports.all, inputs, strict=True)}
        if self.signature == SAMPLE:
            given[NOISE] = noise
        if ports.is_recurrent:
            given[SEQ_LENS] = lengths
        else:
            given = {name: x[:, 0] for name, x in given.items()}
        wanted = self._reference(inputs, lengths, noise, self._act)
        ours = self._given(given, count, steps)
        return self._select_rows(ours, valid), self._select_rows(wanted, valid)

    def _select_rows(self, outputs: Arrays, valid: np.ndarray) -> Arrays:
        """Returns the outputs of valid steps, bool `[B, T]`, as rows."""
        found = self._outputs
        return {p.name: outputs[p.name][valid] if p.axes == 2 else outputs[p.name] for p in found}

    def _given(self, inputs: Arrays, count: int, steps: int) -> Arrays:
        """Runs the artefact, and checks names, dtypes and shapes of its outputs."""
        try:
            found = {name: np.asarray(x) for name, x in self._run(self.signature, inputs).items()}
        except Exception as error:
            raise self._refusal(
                f"does not run on {count} x {steps} observations: {type(error).__name__}: {error}"
            ) from error
        names = sorted(port.name for port in self._outputs)
        if sorted(found) != names:
            raise self._refusal(f"returns {sorted(found)}, but should return {names}.")
        for port in self._outputs:
            shape = [count, steps][: port.axes] + list(port.port.shape)
            form = f"{found[port.name].dtype}{list(found[port.name].shape)}"
            expected = f"{port.port.dtype}{shape}"
            if form != expected:
                raise self._refusal(f"returns {port.name} as {form}, not {expected}.")
        return found

    def _refusal(self, problem: str) -> ExportError:
        return ExportError(f"The exported signature {self.signature!r} {problem}")

    def _reached_memory(self, count: int) -> list[np.ndarray]:
        """Returns recurrent states `[count, ...]` that the policy reaches in 0 to 3 steps.

        Random numbers would be fine for most models, but a state may be a count of steps, for
        example.
        """
        program = self._program
        lengths = self._rng.integers(0, 4, count)
        inputs = random_inputs(program.ports, count, 3, self._rng)
        for memory in inputs[-len(program.ports.states) :]:
            memory.fill(0.0)
        noise = np.zeros((count, 3, 0), np.float32)
        reached = self._reference(inputs, lengths, noise, self._act)
        return [reached[port.name] for port in program.act_layout.states]

    def _disturb(self, memories: Sequence[np.ndarray]) -> None:
        """Adds noise to every second recurrent state `[count, ...]`, to reveal wrong weights.

        Numbers that are integers in all rows are unchanged: they may be a count of steps or an
        index.
        """
        for memory in memories:
            is_real = (memory % 1.0 != 0.0).any(axis=0)
            noise = 0.5 * self._rng.standard_normal(memory[1::2].shape)
            memory[1::2] += np.where(is_real, noise, 0.0).astype(memory.dtype)

    def _reference(
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
        obs, seen, memory = program.ports.split(inputs)
        own = np.zeros((len(lengths), explorer.noise_size), np.float32)
        networks = program.ports.noise_size
        params = np.zeros(explorer.num_params, np.float32)
        found = []
        for t in range(inputs[0].shape[1]):
            rows = [x[:, t] for x in (*obs, *seen)]
            own[:, :networks] = noise[:, t, :networks]
            acted = run(self._state, [*rows, *memory], own, params)
            outputs = program.act_layout.flatten(acted)
            found.append(served_outputs(program, [np.array(x) for x in outputs]))
            going = t < lengths
            memory = [_where(going, *pair) for pair in zip(acted.states, memory, strict=True)]
        if not program.ports.is_recurrent:
            return found[0]
        return {**_stack(found), **{f"state_out_{i}": x for i, x in enumerate(memory)}}

    def _compare_all(self, ours: Arrays, wanted: Arrays, noise: np.ndarray) -> None:
        spec, explorer = self._program.spec, self._explorer
        count, inputs = len(self._program.act_layout.actions), ours["action_dist_inputs"]
        normalized, for_env = [*ours][:count], [*ours][count : 2 * count]
        derived = {*normalized, *for_env, "action_logp"}
        by_itself = samples_by_itself(spec)
        if by_itself and self.signature == GREEDY:  # only the class knows the effect of noise
            derived = set() if explorer.key == spec.explorer.key else {"action_logp"}
        for name in [name for name in ours if name not in derived]:
            self._compare(name, ours[name], wanted[name], _sizes(wanted[name]), is_computed=True)
        self.rows += len(noise)
        if by_itself:
            return
        params = tf.zeros([explorer.num_params], tf.float32)
        model = self._program.model_of(self._state)
        distribution = spec.dist_class(tf.constant(inputs), model)
        actions, logp = explorer.apply(distribution, tf.constant(noise), params)
        width = _row_sizes(inputs, noise[:, self._program.ports.noise_size :])
        self._compare("action_logp", ours["action_logp"], logp.numpy(), width)
        other = np.zeros(len(noise), bool)
        for name, right in zip(normalized, actions, strict=True):
            scale = np.maximum(width.reshape(-1, *[1] * (right.ndim - 1)), np.abs(right.numpy()))
            self._compare(name, ours[name], right.numpy(), scale)
            if ours[name].dtype.kind != "f" and self.signature == GREEDY:
                changed = ours[name] != wanted[name]
                other |= changed.reshape(len(noise), -1).any(axis=1)
        self.other_choices += int(other.sum())
        mapped = spec.action_mapping.to_env([ours[name] for name in normalized])
        for name, right in zip(for_env, mapped, strict=True):
            self._compare(name, ours[name], right, _sizes(right))

    def _compare(
        self,
        name: str,
        given: np.ndarray,
        right: np.ndarray,
        scale: np.ndarray,
        *,
        is_computed: bool = False,
    ) -> None:
        """Records the difference of one output, if it is not larger than allowed.

        `scale` is for relative differences, of each number. If the network does not compute the
        output (`is_computed`), `expected` is computed from outputs of the artefact.
        """
        other, tolerance = f"returns other {name} than the policy", self._tolerance
        if given.dtype.kind != "f" and tolerance < np.inf:
            if not np.array_equal(given, right):
                places = f"{int((given != right).sum())} of {given.size} places"
                raise self._refusal(f"{other} in {places}. The export was refused.")
            self.differences.setdefault(name, Difference(0.0, 0.0))
            return
        plain = _is_plain(right)
        if tolerance == np.inf and given.dtype.kind == "f":
            given = np.where(given <= _LOWEST_FLOAT16, MASKED_LOGIT, given)
        if not np.array_equal(given[~plain], right[~plain], equal_nan=True):
            raise self._refusal(
                f"{other} where the policy's are masked or not finite. The export was refused."
            )
        if not np.isfinite(given[plain]).all():
            raise self._refusal(f"{other}: numbers that are not finite. The export was refused.")
        found = Difference(*(_largest(given, right, x, plain) for x in (1.0, scale)))
        if is_computed and SLACK < found.relative <= FARTHEST and tolerance < np.inf:
            self._doubtful.add(name)
        elif not found.relative <= tolerance:
            raise self._difference_error(name, found.relative)
        before = self.differences.get(name, Difference(0.0, 0.0))
        self.differences[name] = Difference(*map(max, before, found))

    def _difference_error(self, name: str, relative: float) -> ExportError:
        return self._refusal(
            f"returns other {name} than the policy: the largest relative difference is "
            f"{relative:.3g}, allowed is {self._tolerance:g}. The export was refused."
        )

    def _judge(self, name: str) -> None:
        """Compares an output of all batches, and the policy's own, to double precision."""
        error = own_error = 0.0
        found = self.differences[name]
        for ours, wanted, exact in self._batches:
            try:
                reference = exact()[name]
            except (ValueError, tf.errors.OpError) as problem:  # an operation lacks float64
                if found.relative <= self._tolerance:
                    return
                raise self._difference_error(name, found.relative) from problem
            right = wanted[name]
            plain, scale = _is_plain(right), _sizes(right)
            error = max(error, _largest(ours[name], reference, scale, plain))
            own_error = max(own_error, _largest(right, reference, scale, plain))
        allowed = min(FACTOR * own_error + SLACK, FARTHEST)
        if not error <= allowed:
            raise self._refusal(
                f"returns other {name} than the policy: the largest relative error against double "
                f"precision is {error:.3g}, the policy's own is {own_error:.3g}, allowed is "
                f"{allowed:.3g}. The export was refused."
            )
        self.differences[name] = found._replace(error=error, own_error=own_error)


def _largest(
    left: np.ndarray, right: np.ndarray, scale: np.ndarray | float, where: np.ndarray
) -> float:
    """Returns the largest difference at the positions of a mask, relative to a scale."""
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(left.astype(np.float64) - right) / scale
    return float(np.max(errors, initial=0.0, where=where))


def _is_plain(array: np.ndarray) -> np.ndarray:
    """Returns a mask of the numbers that are not masked, infinite or NaN."""
    return np.isfinite(array) & (array > MASKED_LOGIT / 2)


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns |x| in double precision, 0 for masked and non-finite numbers."""
    return np.where(_is_plain(array), np.abs(array.astype(np.float64)), 0.0)


def _sizes(array: np.ndarray) -> np.ndarray:
    """Returns max(1, |x|) `[B, ...]`, with |x| the largest of each column over all rows."""
    if array.dtype.kind != "f":
        return np.ones(array.shape)
    largest = _plain(array).max(axis=0, initial=0.0)
    return np.broadcast_to(np.maximum(1.0, largest), array.shape)


def _row_sizes(inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Returns the size of the numbers from which the actions of each row are computed, `[B]`."""
    largest = _plain(inputs).max(axis=1, initial=0.0)
    drawn = np.square(_plain(noise)).sum(axis=1) if noise.size else 0.0
    return np.maximum.reduce([np.ones(len(inputs)), largest, drawn * np.ones(len(inputs))])


def random_inputs(
    ports: InputPorts, count: int, steps: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws inputs of acting: `[count, steps, ...]` of rows, `[count, ...]` of recurrent states.

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
    """Draws a view of earlier steps, one array per leaf."""
    count = rows * len(view.shifts) if view.is_window else rows
    if view.source == OBS:
        drawn = random_observations(view.source_leaves, count, rng)
    elif view.source == ACTIONS:
        drawn = [_random_action(leaf, count, rng) for leaf in view.source_leaves]
    else:
        drawn = [rng.standard_normal(count).astype(np.float32)]
    return [x.reshape(rows, *port.shape) for x, port in zip(drawn, view.ports, strict=True)]


def _random_action(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    if is_float_box(leaf.space):
        return rng.uniform(-1.0, 1.0, (rows, *leaf.shape)).astype(leaf.dtype)
    return _random_choices(leaf, rows, rng).astype(leaf.dtype)


def _random_choices(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    sizes = np.reshape(cell_sizes(leaf.space), leaf.shape)
    return rng.integers(sizes, size=(rows, *leaf.shape))


def random_observations(
    obs_leaves: Sequence[Leaf], rows: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws observations that an environment might return, one array `[rows, *shape]` per leaf.

    Numbers in a Box are uniform between its bounds. If a bound is missing or too large to be meant
    as a range, they are normal around 0 or the nearest bound, at scales from 0.1 to 10.
    """
    return [_random_leaf(leaf, rows, rng) for leaf in obs_leaves]


def _random_leaf(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    space: Any = leaf.space
    if not isinstance(space, spaces.Box):
        start = getattr(space, "start", 0)  # a MultiBinary has none
        return (start + _random_choices(leaf, rows, rng)).astype(leaf.dtype)
    size = (rows, *leaf.shape)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    ranged = high / 2 - low / 2 <= _WIDE / 2
    scale = 10.0 ** rng.uniform(-1.0, 1.0, (rows, *[1] * len(leaf.shape)))
    free = np.clip(np.clip(0.0, low, high) + scale * rng.standard_normal(size), low, high)
    start, stop = np.where(ranged, low, 0.0), np.where(ranged, high, 0.0)
    drawn = np.where(ranged, start + rng.random(size) * (stop - start), free)
    if leaf.dtype.kind != "f":
        drawn = np.clip(np.rint(drawn), low, high)
    return drawn.astype(leaf.dtype)
