"""One version of a served policy: an export that was checked, loaded and tried."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.base.onnx_graph import remove_outputs
from tfpolicies.errors import RequestError
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.export.spec_file import ONNX_FOLDER, SPEC_FILE, is_number, list_versions
from tfpolicies.serving.batching import BatchCost
from tfpolicies.serving.infer_requests import (
    INFER_VARIANTS,
    VALUE_OUTPUT,
    InferOptions,
    InferVariant,
)
from tfpolicies.serving.request_texts import quote
from tfpolicies.serving.sequence_state import NOISE, REWARDS, SLOTS, STATE_OUT, SequenceStates
from tfpolicies.serving.tensor_checks import TensorMetadata, match_inputs
from tfpolicies.serving.time_limits import ModelTimeoutError, TimeLimits

_BATCH_AXIS, _TIME_AXIS = "batch", "time"
_MAX_LISTED_VERSIONS = 20  # most versions that an error lists


class ModelVersion:
    """An export that is ready to answer.

    Attributes:
        name: the folder's number, or the beginning of `content`.
        folder: of the export.
        content_hash: a hash of the export's contents.
        inputs: of the export: rows, or whole sequences for a recurrent policy.
        outputs: of the export.
        step_inputs: inputs of one step of a sequence whose state the server keeps.
        step_outputs: outputs of such a step.
        uses_history: whether it depends on earlier steps, by recurrent state or views.
        has_time_axis: whether requests have a time axis (whole sequences).
        greedy: the complete model, which defines the states.
        costs: of a batch of single steps, by variant.
        time_limits: stops runs that take too long.

    Args:
        folder: with `policy_spec.json` and the files that it names.
        threads: of one call.
        time_limits: stops runs that take too long.
        seconds: time limit of the trial run.
        providers: of ONNX Runtime; see `OnnxPolicy`.

    Raises:
        ValueError: if the files do not belong together, are not an export, or have a model that
            exceeds its time limit.
        OSError: if one cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        threads: int = 1,
        time_limits: TimeLimits | None = None,
        seconds: float = 60.0,
        providers: Sequence[str] | None = None,
    ) -> None:
        self.folder, self.time_limits = folder, time_limits or TimeLimits()
        self._policies = _load_policies(folder, threads, providers)
        for policy in self._policies.values():
            policy.get_run_options = self.time_limits.get_options
        self.greedy = self._policies[InferVariant(explore=False, values=True)]
        spec = self.greedy.spec
        if any(policy.spec != spec for policy in self._policies.values()):
            raise ValueError(f"{folder / SPEC_FILE} changed while it was read.")
        self.content_hash = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
        version_folder = folder.parent if folder.name == ONNX_FOLDER else folder
        self.name = version_folder.name if is_number(version_folder) else self.content_hash[:12]
        signature = spec["signatures"]["serving_default"]
        self.inputs = [TensorMetadata.from_spec(record) for record in signature["inputs"]]
        self.outputs = [TensorMetadata.from_spec(record) for record in signature["outputs"]]
        initial_states = self.greedy.make_initial_carry(0)
        self.uses_history, self._reads_rewards = bool(initial_states), REWARDS in initial_states
        self.has_time_axis = _TIME_AXIS in self.inputs[0].shape
        observation_names = {record["name"] for record in self.greedy.observation_ports}
        self.step_inputs = [
            x.without_axis(_TIME_AXIS) for x in self.inputs if x.name in observation_names
        ]
        if self._reads_rewards:
            self.step_inputs.append(
                TensorMetadata(REWARDS, np.dtype(np.float32), (_BATCH_AXIS,), is_optional=True)
            )
        self.step_outputs = [
            tensor.without_axis(_TIME_AXIS)
            for tensor in self.outputs
            if not tensor.name.startswith(STATE_OUT)
        ]
        self.costs = self._measure_costs(seconds)

    def _measure_costs(self, seconds: float) -> dict[InferVariant, BatchCost]:
        """Measures the cost of batches in a trial run."""
        try:
            with self.time_limits.limit(seconds):
                return {
                    variant: BatchCost.measure(partial(self._time_trial_step, variant))
                    for variant in INFER_VARIANTS
                }
        except ModelTimeoutError as error:
            raise ValueError(
                f"{self.folder} was tried on a few rows, which did not end in {seconds:.3g} "
                "seconds (--max-seconds)."
            ) from error

    def get_policy(self, variant: InferVariant) -> OnnxPolicy:
        return self._policies[variant]

    def make_feed(
        self, inputs: Mapping[str, np.ndarray], options: InferOptions
    ) -> dict[str, np.ndarray]:
        """Returns the inputs of a whole request: rows, or sequences with their states."""
        if self.uses_history and inputs.keys() <= {port.name for port in self.step_inputs}:
            raise RequestError(
                f"The policy reads earlier steps: give the parameter sequence_id, with "
                f"sequence_start at the first step, and the server keeps them. Without it the "
                f"model takes {', '.join(map(str, self.inputs))}."
            )
        feed = match_inputs(self.inputs, inputs)
        first_input = feed[self.inputs[0].name]
        steps = first_input.shape[1] if self.has_time_axis else None
        valid_steps = None
        if "seq_lens" in feed and steps is not None:
            _require_valid_lengths(feed["seq_lens"], steps)
            valid_steps = np.arange(steps) < feed["seq_lens"][:, None]
        self._check_observations(feed, valid_steps)
        if options.explore:
            rows = first_input.shape[:1] if steps is None else first_input.shape[:2]
            rng = np.random.default_rng(options.seed)
            noise = self.greedy.draw_noise(rng, int(np.prod(rows)))
            feed[NOISE] = noise.reshape(*rows, -1)
        return feed

    def make_step_feed(
        self, inputs: Mapping[str, np.ndarray], options: InferOptions
    ) -> dict[str, np.ndarray]:
        """Returns the inputs of one step of a sequence, without its state.

        Raises:
            RequestError: if the request's inputs are invalid.
        """
        feed = match_inputs(self.step_inputs, inputs)
        self._check_observations(feed)
        return self._add_step_inputs(feed, options)

    def _add_step_inputs(
        self, feed: dict[str, np.ndarray], options: InferOptions
    ) -> dict[str, np.ndarray]:
        """Adds rewards and noise to the observations of a step."""
        rows = len(feed[self.step_inputs[0].name])
        if self._reads_rewards and REWARDS not in feed:
            feed[REWARDS] = np.zeros(rows, np.float32)
        if options.explore:
            feed[NOISE] = self.greedy.draw_noise(np.random.default_rng(options.seed), rows)
        return feed

    def _check_observations(
        self, feed: Mapping[str, np.ndarray], valid_steps: np.ndarray | None = None
    ) -> None:
        try:
            self.greedy.check_observations(feed, valid_steps)
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _time_trial_step(self, variant: InferVariant, rows: int) -> float:
        """Runs a first step; returns its CPU time in seconds."""
        inputs = {
            port.name: np.zeros([rows, *port.sizes[1:]], port.dtype) for port in self.step_inputs
        }
        states = SequenceStates(self.greedy)
        feed = self._add_step_inputs(inputs, InferOptions(explore=variant.explore)) | {
            SLOTS: states.allocate(rows)
        }
        start = time.thread_time()
        states.step(self.get_policy(variant), feed)
        return time.thread_time() - start


def _load_policies(
    folder: Path, threads: int, providers: Sequence[str] | None
) -> dict[InferVariant, OnnxPolicy]:
    """Loads the model for each variant; an export without values needs one for both."""
    policies: dict[InferVariant, OnnxPolicy] = {}
    load = partial(OnnxPolicy, folder, threads=threads, providers=providers)
    for explore in (False, True):
        policy = load(sample=explore)
        policies[InferVariant(explore, values=True)] = policies[
            InferVariant(explore, values=False)
        ] = policy
        outputs = policy.spec["signatures"]["serving_default"]["outputs"]
        if VALUE_OUTPUT in [port["name"] for port in outputs]:
            prepare = partial(remove_outputs, names=[VALUE_OUTPUT])
            policies[InferVariant(explore, values=False)] = load(sample=explore, prepare=prepare)
    return policies


def _require_valid_lengths(lengths: np.ndarray, steps: int) -> None:
    if lengths.min() < 1 or lengths.max() > steps:
        raise RequestError(
            f"Input 'seq_lens' must be from 1 to {steps}, the number of steps of the input, got "
            f"{lengths.tolist()[:9]}."
        )


def find_version(folder: Path, pin: str = "") -> Path:
    """Returns the folder of the version in `folder` that is served.

    It is `folder` itself if it is an export, and otherwise the one with the highest number,
    compared as a number: 10 comes after 9.

    Args:
        folder: of an export, or of numbered exports.
        pin: a number that is served instead of the highest one; "" for none.
    """
    if (folder / SPEC_FILE).exists():
        return folder
    numbers = list_versions(folder)
    if not numbers:
        raise ValueError(
            f"{str(folder)!r} has neither a {SPEC_FILE} nor numbered folders with one."
        )
    if pin and pin not in numbers:
        raise ValueError(
            f"{str(folder)!r} has no version {quote(pin)}, which --pin names. It has "
            f"{', '.join([*numbers][-_MAX_LISTED_VERSIONS:])}."
        )
    return numbers[pin or [*numbers][-1]]


def get_file_signature(folder: Path) -> tuple[tuple[Any, ...], ...]:
    """Returns a value that changes when files of an export are written: paths, sizes and times."""
    signature = []
    for path in sorted(folder.iterdir()):
        if path.suffix in (".onnx", ".json") and path.exists():
            stat = path.stat()
            signature.append((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(signature)
