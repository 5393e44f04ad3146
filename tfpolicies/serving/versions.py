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

from tfpolicies.errors import RequestError
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.export.spec_file import ONNX_FOLDER, SPEC_FILE, is_number, list_versions
from tfpolicies.onnx_graphs import without_outputs
from tfpolicies.serving.batching import Cost
from tfpolicies.serving.calls import VALUES, WAYS, Options, Way
from tfpolicies.serving.memory import NOISE, REWARDS, SLOTS, STATE_OUT, Memory
from tfpolicies.serving.tensors import Port, fitted
from tfpolicies.serving.texts import quote
from tfpolicies.serving.time_limits import OverdueError, TimeLimits

_BATCH, _TIME = "batch", "time"
_MOST_NAMED = 20  # most versions that an error lists


class Version:
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
        self._policies = _policies(folder, threads, providers)
        for policy in self._policies.values():
            policy.get_run_options = self.time_limits.get_options
        self.greedy = self._policies[Way(explore=False, values=True)]
        spec = self.greedy.spec
        if any(policy.spec != spec for policy in self._policies.values()):
            raise ValueError(f"{folder / SPEC_FILE} changed while it was read.")
        self.content = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
        place = folder.parent if folder.name == ONNX_FOLDER else folder
        self.name = place.name if is_number(place) else self.content[:12]
        signature = spec["signatures"]["serving_default"]
        self.inputs = [Port.of(record) for record in signature["inputs"]]
        self.outputs = [Port.of(record) for record in signature["outputs"]]
        carried = self.greedy.fresh(0)
        self.looks_back, self._is_told_rewards = bool(carried), REWARDS in carried
        self.has_time = _TIME in self.inputs[0].shape
        observed = {record["name"] for record in self.greedy.observed}
        self.step_inputs = [x.without(_TIME) for x in self.inputs if x.name in observed]
        if self._is_told_rewards:
            self.step_inputs.append(
                Port(REWARDS, np.dtype(np.float32), (_BATCH,), is_optional=True)
            )
        self.step_outputs = [
            port.without(_TIME) for port in self.outputs if not port.name.startswith(STATE_OUT)
        ]
        self.costs = self._measure_costs(seconds)

    def _measure_costs(self, seconds: float) -> dict[Way, Cost]:
        """Measures the cost of batches in a trial run.

        Raises:
            ValueError: if it exceeds the time limit.
        """
        try:
            with self.time_limits.limit(seconds):
                return {way: Cost.measured(partial(self._try, way)) for way in WAYS}
        except OverdueError as error:
            raise ValueError(
                f"{self.folder} was tried on a few rows, which did not end in {seconds:.3g} "
                "seconds (--max-seconds)."
            ) from error

    def policy(self, way: Way) -> OnnxPolicy:
        return self._policies[way]

    def feed(self, given: Mapping[str, np.ndarray], options: Options) -> dict[str, np.ndarray]:
        """Returns the inputs of a whole request: rows, or sequences with their states.

        Raises:
            RequestError: if the request's inputs are invalid.
        """
        if self.looks_back and given.keys() <= {port.name for port in self.step_inputs}:
            raise RequestError(
                f"The policy reads earlier steps: give the parameter sequence_id, with "
                f"sequence_start at the first step, and the server keeps them. Without it the "
                f"model takes {', '.join(map(str, self.inputs))}."
            )
        feed = fitted(self.inputs, given)
        first = feed[self.inputs[0].name]
        steps = first.shape[1] if self.has_time else None
        counted = None
        if "seq_lens" in feed and steps is not None:
            _check_lengths(feed["seq_lens"], steps)
            counted = np.arange(steps) < feed["seq_lens"][:, None]
        self._check(feed, counted)
        if options.explore:
            rows = first.shape[:1] if steps is None else first.shape[:2]
            rng = np.random.default_rng(options.seed)
            noise = self.greedy.draw_noise(rng, int(np.prod(rows)))
            feed[NOISE] = noise.reshape(*rows, -1)
        return feed

    def step_feed(self, given: Mapping[str, np.ndarray], options: Options) -> dict[str, np.ndarray]:
        """Returns the inputs of one step of a sequence, without its state.

        Raises:
            RequestError: if the request's inputs are invalid.
        """
        feed = fitted(self.step_inputs, given)
        self._check(feed)
        return self._whole(feed, options)

    def _whole(self, feed: dict[str, np.ndarray], options: Options) -> dict[str, np.ndarray]:
        """Adds rewards and noise to the observations of a step."""
        rows = len(feed[self.step_inputs[0].name])
        if self._is_told_rewards and REWARDS not in feed:
            feed[REWARDS] = np.zeros(rows, np.float32)
        if options.explore:
            feed[NOISE] = self.greedy.draw_noise(np.random.default_rng(options.seed), rows)
        return feed

    def _check(self, feed: Mapping[str, np.ndarray], counted: np.ndarray | None = None) -> None:
        try:
            self.greedy.check(feed, counted)
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _try(self, way: Way, rows: int) -> float:
        """Runs a first step; returns its CPU time in seconds."""
        given = {
            port.name: np.zeros([rows, *port.sizes[1:]], port.dtype) for port in self.step_inputs
        }
        memory = Memory(self.greedy)
        feed = self._whole(given, Options(explore=way.explore)) | {SLOTS: memory.begin(rows)}
        began = time.thread_time()
        memory.step(self.policy(way), feed)
        return time.thread_time() - began


def _policies(folder: Path, threads: int, providers: Sequence[str] | None) -> dict[Way, OnnxPolicy]:
    """Loads the model for each variant; an export without values needs one for both."""
    found: dict[Way, OnnxPolicy] = {}
    load = partial(OnnxPolicy, folder, threads=threads, providers=providers)
    for explore in (False, True):
        policy = load(sample=explore)
        found[Way(explore, values=True)] = found[Way(explore, values=False)] = policy
        outputs = policy.spec["signatures"]["serving_default"]["outputs"]
        if VALUES in [port["name"] for port in outputs]:
            prepare = partial(without_outputs, names=[VALUES])
            found[Way(explore, values=False)] = load(sample=explore, prepare=prepare)
    return found


def _check_lengths(lengths: np.ndarray, steps: int) -> None:
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

    Raises:
        ValueError: if there is no export in it, or none of that number.
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
            f"{', '.join([*numbers][-_MOST_NAMED:])}."
        )
    return numbers[pin or [*numbers][-1]]


def looks_of(folder: Path) -> tuple[tuple[Any, ...], ...]:
    """Returns a value that changes when files of an export are written: paths, sizes and times."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix in (".onnx", ".json") and path.exists():
            stat = path.stat()
            found.append((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
