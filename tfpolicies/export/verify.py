"""Verification: a written artefact is run and compared with the policy it came from.

Two programs that compute the same in another order differ by rounding, which the comparison has to
allow for, and nothing else. A difference counts relative to `max(1, |x|)`, |x| being the largest of
its column; where x is computed from larger numbers (an action from its mean and noise, a
log-probability from logits), relative to those. Greedy and sampled choices must be equal, except
where the two best differ by rounding only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.errors import ExportError
from tfpolicies.export.serving import GREEDY, NOISE, OUTPUT_FIELDS, SAMPLE, observation_ports
from tfpolicies.models.spaces import Leaf
from tfpolicies.program.program import Program
from tfpolicies.state import PolicyState

ONNX_FILES = {GREEDY: "model.onnx", SAMPLE: "model_sample.onnx"}
OBSERVATIONS = 1000
TOLERANCE = 1e-5
_SEED = 0
_OF_ACTIONS = ("actions", "actions_normalized", "action_logp")
_WIDE = 1e4  # bounds further apart than this are not taken as a range to draw from

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
    near_ties: int  # choices that differ because the two best are equal up to rounding
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


def verify(
    run: Runner, program: Program, state: PolicyState, observations: int = OBSERVATIONS
) -> Parity:
    """Compares an artefact with a Program and a state on random observations.

    Args:
        run: `run(signature, inputs)` gives the artefact's outputs by name.
        program: what the artefact was made from.
        state: likewise.
        observations: how many to draw; they are given in batches of several sizes.

    Raises:
        ExportError: naming the output that differs and by how much.
    """
    for slot in program.layout.of("model"):
        if not np.isfinite(state.arrays[slot.key]).all():
            raise ExportError(
                f"The weight {slot.key!r} of the policy is not finite: the policy has diverged in "
                "training, and is not exported. Restore an earlier checkpoint."
            )
    differences, near_ties = {}, 0
    for signature in (GREEDY, SAMPLE):
        ours, reference, noise = _run_both(run, program, state, observations, signature)
        differences[signature], ties = _compare(signature, program, ours, reference, noise)
        near_ties += ties
    largest = max(x.relative for found in differences.values() for x in found.values())
    return Parity(observations, largest, near_ties, differences)


def _run_both(
    run: Runner, program: Program, state: PolicyState, observations: int, signature: str
) -> tuple[Arrays, Arrays, np.ndarray]:
    """Returns the artefact's outputs, the policy's and the noise, for all observations."""
    rng = np.random.default_rng(_SEED)
    dist_class = program.spec.dist_class
    names = [port.name for port in observation_ports(program)]
    ours, reference, noises = [], [], []
    for rows in _chunk_sizes(observations):
        obs = random_observations(program.spec.obs_leaves, rows, rng)
        inputs = dict(zip(names, obs, strict=True))
        noise = np.zeros((rows, dist_class.noise_size), np.float32)
        if signature == SAMPLE:
            inputs[NOISE] = noise = dist_class.draw_noise(rng, rows)
        wanted = dict(
            zip(program.output_names, program.runtime.run(state, obs, noise), strict=True)
        )
        wanted = {name: wanted[field] for name, field in OUTPUT_FIELDS.items() if field in wanted}
        try:
            outputs = dict(run(signature, inputs))
        except Exception as error:
            raise ExportError(
                f"The exported signature {signature!r} does not run on {rows} observations: "
                f"{type(error).__name__}: {error}"
            ) from error
        _check_form(signature, outputs, wanted)
        ours.append(outputs)
        reference.append(wanted)
        noises.append(noise)
    return _joined(ours), _joined(reference), np.concatenate(noises)


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _check_form(signature: str, ours: Arrays, reference: Arrays) -> None:
    if set(ours) != set(reference):
        raise ExportError(
            f"The exported signature {signature!r} gives {sorted(ours)}, but should give "
            f"{sorted(reference)}."
        )
    for name, wanted in reference.items():
        form, expected = (f"{x.dtype}{list(x.shape)}" for x in (ours[name], wanted))
        if form != expected:
            raise ExportError(
                f"The exported signature {signature!r} gives {name} as {form}, not {expected}."
            )


def _compare(
    signature: str, program: Program, ours: Arrays, reference: Arrays, noise: np.ndarray
) -> tuple[dict[str, Difference], int]:
    """Returns the largest difference per output, and the number of near-ties."""
    discrete = isinstance(program.spec.action_space, spaces.Discrete)
    same = np.ones(len(noise), bool)
    if discrete:
        same = _equal_choices(signature, ours, reference, noise)
    scales = _scales(program.spec, reference, noise)
    differences = {}
    for name, wanted in reference.items():
        rows = same if name in _OF_ACTIONS else slice(None)
        given, wanted, scale = ours[name][rows], wanted[rows], scales[name][rows]
        finite = np.isfinite(wanted)
        if not np.array_equal(given[~finite], wanted[~finite], equal_nan=True):
            raise ExportError(
                f"The exported signature {signature!r} gives other {name} than the policy where "
                "the policy's are not finite. The export was refused."
            )
        error = np.abs(given[finite].astype(np.float64) - wanted[finite])
        relative = float(np.max(error / scale[finite], initial=0.0))
        if not relative <= TOLERANCE:
            raise ExportError(
                f"The exported signature {signature!r} gives other {name} than the policy: the "
                f"largest relative difference is {relative:.3g}, allowed is {TOLERANCE:g}. "
                "The export was refused."
            )
        differences[name] = Difference(float(np.max(error, initial=0.0)), relative)
    return differences, int((~same).sum())


def _equal_choices(
    signature: str, ours: Arrays, reference: Arrays, noise: np.ndarray
) -> np.ndarray:
    """Returns which rows `[B]` chose the same; other rows must be near-ties."""
    scores = reference["action_dist_inputs"].astype(np.float64) + noise
    wanted, chosen = reference["actions_normalized"], ours["actions_normalized"]
    same = chosen == wanted
    rows = np.arange(len(scores))
    gaps = scores[rows, wanted] - scores[rows, np.clip(chosen, 0, scores.shape[1] - 1)]
    wrong = ~same & ~(gaps <= 2 * TOLERANCE * np.maximum(1.0, np.abs(scores).max(axis=-1)))
    if wrong.any():
        raise ExportError(
            f"The exported signature {signature!r} chooses another action than the policy for "
            f"{int(wrong.sum())} of {len(wrong)} observations. The export was refused."
        )
    return same


def _scales(spec: Any, reference: Arrays, noise: np.ndarray) -> Arrays:
    """Returns what the differences of each output count relative to, in the output's shape."""
    with np.errstate(all="ignore"):
        scales = {name: _sizes(x) for name, x in reference.items()}
        inputs = reference["action_dist_inputs"].astype(np.float64)
        if isinstance(spec.action_space, spaces.Discrete):
            scales["action_logp"] = np.maximum(
                scales["action_logp"], scales["action_dist_inputs"].max(axis=-1)
            )
        else:
            mean, log_std = np.split(inputs, 2, axis=-1)
            std = np.exp(log_std)
            # exp turns the absolute error of log_std into a relative one of std
            terms = np.maximum(_sizes(mean), std * np.abs(noise) * _sizes(log_std))
            shape = reference["actions"].shape
            scales["actions_normalized"] = terms.reshape(shape)
            scales["actions"] = terms.reshape(shape) * _half_widths(spec)
            scales["actions"] = np.maximum(scales["actions"], np.abs(reference["actions"]))
            # (action - mean) / std loses what the action lost by rounding, times 1 / std
            lost = np.sum(np.abs(noise) * terms / std + np.abs(log_std), axis=-1)
            scales["action_logp"] = np.maximum(scales["action_logp"], lost)
    return {name: np.nan_to_num(x, nan=1.0, posinf=np.inf) for name, x in scales.items()}


def _sizes(array: np.ndarray) -> np.ndarray:
    """Returns max(1, |x|) `[B, ...]`, with |x| the largest of each column among all rows."""
    finite = np.where(np.isfinite(array), np.abs(array.astype(np.float64)), 0.0)
    return np.broadcast_to(np.maximum(1.0, finite.max(axis=0)), array.shape)


def _half_widths(spec: Any) -> np.ndarray:
    """Returns by how much the action pipeline stretches each component."""
    space = spec.action_space
    widths = space.high.astype(np.float64) / 2 - space.low.astype(np.float64) / 2
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    return np.where(bounded & spec.pipeline.normalize, np.maximum(widths, 1.0), 1.0)


def _chunk_sizes(rows: int) -> Iterator[int]:
    for size in itertools.chain((1, 7), itertools.repeat(248)):
        if rows <= 0:
            return
        yield min(size, rows)
        rows -= size


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
