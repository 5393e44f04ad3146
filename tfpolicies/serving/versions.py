"""One version of a served policy: an export that was checked, loaded and run once."""

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
from tfpolicies.export.pruning import without_outputs
from tfpolicies.serving.batching import Cost
from tfpolicies.serving.calls import VALUES, WAYS, Options, Way
from tfpolicies.serving.tensors import Port, fitted

_BATCH, _TIME = "batch", "time"
_REWARDS = "rewards"
_SPEC = "policy_spec.json"


class Version:
    """An export that is ready to answer.

    Attributes:
        name: the folder's number, or what identifies the export's contents.
        folder: where it was read.
        inputs: what the export takes: rows, or whole sequences if it has a memory.
        outputs: what it gives.
        step_inputs: what one step of a sequence takes while the server keeps its memory.
        step_outputs: what such a step gives.
        looks_back: whether it reads anything of earlier steps: a memory, or views.
        costs: of a batch, by the way that answers it.

    Args:
        folder: with `policy_spec.json` and what it names.
        threads: how many threads a call may use.

    Raises:
        ValueError: if the files do not belong together, or are not what an export writes.
        OSError: if one cannot be read.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self.folder = folder
        self._policies = {way: _policy(folder, way, threads) for way in WAYS}
        self._greedy = self._policies[Way(explore=False, values=True)]
        spec = self._greedy.spec
        if any(policy.spec != spec for policy in self._policies.values()):
            raise ValueError(f"{folder / _SPEC} changed while it was read.")
        content = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
        self.name = folder.name if folder.name.isdecimal() else content[:12]
        signature = spec["signatures"]["serving_default"]
        self.inputs = [Port.of(record) for record in signature["inputs"]]
        self.outputs = [Port.of(record) for record in signature["outputs"]]
        self.looks_back = bool(self._greedy.fresh(1))
        observed = {record["name"] for record in self._greedy.observed}
        self.step_inputs = [x.without(_TIME) for x in self.inputs if x.name in observed]
        if _REWARDS in self._greedy.fresh(1):
            self.step_inputs.append(
                Port(_REWARDS, np.dtype(np.float32), (_BATCH,), is_optional=True)
            )
        self.step_outputs = [
            port.without(_TIME) for port in self.outputs if not port.name.startswith("state_out_")
        ]
        self._of_steps = {port.name for port in self.step_outputs}
        self.costs = {way: Cost.measured(partial(self._try, way)) for way in WAYS}

    def policy(self, way: Way) -> OnnxPolicy:
        """Returns what runs."""
        return self._policies[way]

    def feed(self, given: Mapping[str, np.ndarray], options: Options) -> dict[str, np.ndarray]:
        """Returns the inputs of a whole call: rows, or sequences with their memory.

        Raises:
            RequestError: if what a request gives does not fit.
        """
        if self.looks_back and given.keys() <= {port.name for port in self.step_inputs}:
            raise RequestError(
                f"The policy looks back: give the parameter sequence_id, with sequence_start at "
                f"the first step, and the server keeps what it remembers. Without it the model "
                f"takes {', '.join(map(str, self.inputs))}."
            )
        feed = fitted(self.inputs, given)
        first = feed[self.inputs[0].name]
        steps = first.shape[1] if _TIME in self.inputs[0].shape else None
        if "seq_lens" in feed and steps is not None:
            _check_lengths(feed["seq_lens"], steps)
        if options.explore:
            rows = first.shape[:1] if steps is None else first.shape[:2]
            noise = self._noise(options, int(np.prod(rows)))
            feed["noise"] = noise.reshape(*rows, -1)
        return feed

    def leaves(self, given: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], Any]:
        """Returns the observations of one step of a sequence, and what the last action earned.

        Raises:
            RequestError: if what a request gives does not fit.
        """
        found = fitted(self.step_inputs, given)
        rewards = found.pop(_REWARDS, 0.0)
        return [*found.values()], rewards

    def step_feed(
        self, leaves: Sequence[np.ndarray], options: Options, carried: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Returns the inputs of one step of a sequence, given what is carried into it."""
        noise = self._noise(options, len(leaves[0])) if options.explore else None
        return self._greedy.feed(leaves, noise, carried)

    def fresh(self, rows: int) -> dict[str, np.ndarray]:
        """Returns what is carried into the first step of a sequence of `rows` rows."""
        return self._greedy.fresh(rows)

    def stepped(
        self,
        outputs: Mapping[str, np.ndarray],
        leaves: Sequence[np.ndarray],
        carried: Mapping[str, np.ndarray],
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns what a step gives, and what is carried into the next one."""
        rows = self._greedy.of_one_step(outputs)
        after = self._greedy.after(rows, leaves, carried)
        return {k: x for k, x in rows.items() if k in self._of_steps}, after

    def _noise(self, options: Options, rows: int) -> np.ndarray:
        return self._greedy.draw_noise(np.random.default_rng(options.seed), rows)

    def _try(self, way: Way, rows: int) -> float:
        """Takes a first step; returns the seconds of the processor that it took."""
        leaves = [
            np.zeros([rows, *port.sizes[1:]], port.dtype)
            for port in self.step_inputs
            if not port.is_optional
        ]
        feed = self.step_feed(leaves, Options(explore=way.explore), self.fresh(rows))
        began = time.thread_time()
        outputs = self.policy(way).infer(feed)
        seconds = time.thread_time() - began
        self.stepped(outputs, leaves, self.fresh(rows))
        return seconds


def _policy(folder: Path, way: Way, threads: int) -> OnnxPolicy:
    prepare = bytes if way.values else partial(without_outputs, names=[VALUES])
    return OnnxPolicy(folder, sample=way.explore, threads=threads, prepare=prepare)


def _check_lengths(lengths: np.ndarray, steps: int) -> None:
    if lengths.min() < 1 or lengths.max() > steps:
        raise RequestError(
            f"Input 'seq_lens' must be from 1 to {steps}, the steps that the sequences have, got "
            f"{lengths.tolist()[:9]}."
        )


def newest_folder(folder: Path) -> Path:
    """Returns the folder of the newest version in `folder`: itself, or its highest number.

    Raises:
        ValueError: if there is no export in it.
    """
    numbered = [
        path for path in folder.iterdir() if path.name.isdecimal() and (path / _SPEC).exists()
    ]
    if (folder / _SPEC).exists():
        return folder
    if not numbered:
        raise ValueError(f"{str(folder)!r} has neither a {_SPEC} nor numbered folders with one.")
    return max(numbered, key=lambda path: int(path.name))


def looks_of(folder: Path) -> tuple[tuple[Any, ...], ...]:
    """Returns what changes when files of an export are written: their places, sizes and times."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix in (".onnx", ".json"):
            stat = path.stat()
            found.append((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
