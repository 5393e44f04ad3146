"""Reads and validates the training state in a checkpoint, without the policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.algorithms.host import HostAlgorithm
from tfpolicies.rollout.metrics import restored_metrics
from tfpolicies.storage.array_places import put_arrays
from tfpolicies.storage.checkpoint import Checkpoint
from tfpolicies.storage.generator_json import decode_generator
from tfpolicies.storage.json_values import decode_value
from tfpolicies.type_aliases import Json

MALFORMED = (AttributeError, LookupError, TypeError, ValueError)


class RunState(NamedTuple):
    """The training state of a run, besides its policies."""

    progress: dict[str, Any]  # as `set_progress` takes it
    seeds_used: int
    rng: np.random.Generator | None  # of the sampler; None if there was none
    global_vars: dict[str, Any]
    sampler: dict[str, Any] | None  # the running episodes
    evaluation: tuple[int, dict[str, np.random.Generator]] | None  # seeds used; by policy id
    extra: Any  # as `Algorithm.set_extra_state` takes it


def get_progress(algorithm: HostAlgorithm) -> dict[str, Any]:
    """Returns the counters of a run, for a checkpoint."""
    return algorithm._results.progress(algorithm.iteration)


def run_state(checkpoint: Checkpoint) -> RunState:
    """Decodes the training state of a checkpoint.

    Raises:
        Exception: one of `MALFORMED`, if a part is missing or malformed.
    """
    manifest, arrays = checkpoint.manifest, checkpoint.arrays
    worker = manifest["worker"]
    rng = None if worker["rng"] is None else decode_generator(worker["rng"])
    return RunState(
        _progress(manifest["progress"]),
        _count(worker["seeds_used"]),
        rng,
        _dict(decode_value(worker["global_vars"])),
        _episodes(worker["sampler"], arrays.get("sampler", {}), rng),
        _evaluation(manifest["evaluation"]),
        put_arrays(decode_value(manifest["extra"]), arrays.get("extra", {}), checkpoint.segments),
    )


def _progress(record: Json) -> dict[str, Any]:
    found = _dict(decode_value(record))
    restored_metrics(found["episodes"])  # raises if malformed
    for count in (found["iteration"], found["episodes_total"], *_dict(found["counters"]).values()):
        _count(count)
    if not isinstance(found["time_total_s"], int | float):
        raise TypeError(f"time_total_s: {found['time_total_s']!r:.80}")
    return found


def _evaluation(record: dict[str, Any] | None) -> tuple[int, dict[str, np.random.Generator]] | None:
    if record is None:
        return None
    rngs = {pid: decode_generator(rng) for pid, rng in _dict(record["rngs"]).items()}
    return _count(record["seeds_used"]), rngs


def _dict(value: Json) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80}, which should be a dict")
    return value


def _count(value: Json) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise TypeError(f"{value!r:.80}, which should be an integer >= 0")
    return value


def _episodes(
    record: dict[str, Any] | None, arrays: Mapping[str, np.ndarray], rng: np.random.Generator | None
) -> dict[str, Any] | None:
    if record is None:
        return None
    if rng is None:
        raise TypeError("running episodes without a generator")
    stored = _dict(record).get("running", record.get("many_agents"))  # the latter is older
    if stored is None:
        own = _arrays_by_name(record, arrays)
    else:
        own = put_arrays(decode_value(stored), arrays)
    return {**own, "envs": decode_value(record["envs"]), "rng": rng.bit_generator.state}


def _arrays_by_name(record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Decodes the running single-agent episodes of older checkpoints."""

    def numbered(prefix: str) -> list[np.ndarray]:
        count = sum(name.startswith(f"{prefix}/") for name in arrays)
        return [arrays[f"{prefix}/{i}"] for i in range(count)]

    finals = []
    for k, (t, leaves) in enumerate(record["finals"]):
        last = [arrays[f"finals/{k}/{i}"] for i in range(leaves)]
        finals.append((t, arrays[f"finals/{k}/indices"], last))

    def named(prefix: str) -> dict[str, np.ndarray]:
        found = {k: x for k, x in arrays.items() if k.startswith(prefix)}
        return {k.removeprefix(prefix): x for k, x in found.items()}

    return {
        "columns": named("columns/"),
        "memory": named("memory/"),
        "obs": numbered("obs"),
        "alive": arrays["alive"],
        "finals": finals,
        "running": numbered("running"),
        "next_unroll": record["next_unroll"],
        "pending": decode_value(record["pending"]),
    }
