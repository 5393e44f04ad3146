"""Reads and validates the training state in a checkpoint, without the policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
from tfpolicies.algorithms.health_stats import RowMeter
from tfpolicies.base.type_aliases import Json
from tfpolicies.rollout.episode_summaries import restore_metrics
from tfpolicies.storage.checkpoint import Checkpoint
from tfpolicies.storage.generator_json import decode_generator
from tfpolicies.storage.json_values import decode_value
from tfpolicies.storage.nested_arrays import restore_arrays

MALFORMED_ERRORS = (AttributeError, LookupError, TypeError, ValueError)


class TrainingState(NamedTuple):
    """The training state of a run, besides its policies."""

    progress: dict[str, Any]  # as `set_progress` takes it
    seeds_used: int
    rng: np.random.Generator | None  # of the sampler; None if there was none
    global_vars: dict[str, Any]
    sampler: dict[str, Any] | None  # the running episodes
    input_positions: dict[int, Any]  # by worker index, where workers read recorded experience
    evaluation: tuple[int, dict[str, np.random.Generator]] | None  # seeds used; by policy id
    extra: Any  # as `Algorithm.set_extra_state` takes it
    row_meter: list[Any]  # as `RowMeter.set_state` takes it; empty in older checkpoints


def get_progress(algorithm: AlgorithmProtocol) -> dict[str, Any]:
    """Returns the counters of a run, for a checkpoint."""
    return algorithm._metrics.get_progress(algorithm.iteration)


def read_training_state(checkpoint: Checkpoint) -> TrainingState:
    """Decodes the training state of a checkpoint.

    Raises:
        Exception: one of `MALFORMED_ERRORS`, if a part is missing or malformed.
    """
    manifest, arrays = checkpoint.manifest, checkpoint.arrays
    worker = manifest["worker"]
    rng = None if worker["rng"] is None else decode_generator(worker["rng"])
    return TrainingState(
        _decode_progress(manifest["progress"]),
        _require_count(worker["seeds_used"]),
        rng,
        _require_dict(decode_value(worker["global_vars"])),
        _decode_episodes(worker["sampler"], arrays.get("sampler", {}), rng),
        {int(index): position for index, position in worker.get("input_positions", ())},
        _decode_evaluation(manifest["evaluation"]),
        restore_arrays(
            decode_value(manifest["extra"]), arrays.get("extra", {}), checkpoint.segments
        ),
        _decode_row_meter(manifest.get("row_meter", []), arrays.get("row_meter", {})),
    )


def _decode_progress(record: Json) -> dict[str, Any]:
    progress = _require_dict(decode_value(record))
    restore_metrics(progress["episodes"])  # raises if malformed
    for count in (
        progress["iteration"],
        progress["episodes_total"],
        *_require_dict(progress["counters"]).values(),
    ):
        _require_count(count)
    if not isinstance(progress["time_total_s"], int | float):
        raise TypeError(f"time_total_s: {progress['time_total_s']!r:.80}")
    return progress


def _decode_evaluation(
    record: dict[str, Any] | None,
) -> tuple[int, dict[str, np.random.Generator]] | None:
    if record is None:
        return None
    rngs = {pid: decode_generator(rng) for pid, rng in _require_dict(record["rngs"]).items()}
    return _require_count(record["seeds_used"]), rngs


def _decode_row_meter(record: Json, arrays: Mapping[str, np.ndarray]) -> list[Any]:
    state: list[Any] = restore_arrays(decode_value(record), arrays)
    RowMeter().set_state(state)  # raises if malformed
    return state


def _require_dict(value: Json) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80}, which should be a dict")
    return value


def _require_count(value: Json) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise TypeError(f"{value!r:.80}, which should be an integer >= 0")
    return value


def _decode_episodes(
    record: dict[str, Any] | None, arrays: Mapping[str, np.ndarray], rng: np.random.Generator | None
) -> dict[str, Any] | None:
    if record is None:
        return None
    if rng is None:
        raise TypeError("running episodes without a generator")
    running_record = _require_dict(record).get(
        "running", record.get("many_agents")
    )  # the latter is older
    if running_record is None:
        state = _decode_old_episodes(record, arrays)
    else:
        state = restore_arrays(decode_value(running_record), arrays)
    return {**state, "envs": decode_value(record["envs"]), "rng": rng.bit_generator.state}


def _decode_old_episodes(
    record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Decodes the running single-agent episodes of older checkpoints."""

    def get_array_list(prefix: str) -> list[np.ndarray]:
        count = sum(name.startswith(f"{prefix}/") for name in arrays)
        return [arrays[f"{prefix}/{i}"] for i in range(count)]

    finals = []
    for k, (t, leaves) in enumerate(record["finals"]):
        final_leaves = [arrays[f"finals/{k}/{i}"] for i in range(leaves)]
        finals.append((t, arrays[f"finals/{k}/indices"], final_leaves))

    def get_array_dict(prefix: str) -> dict[str, np.ndarray]:
        matching = {k: x for k, x in arrays.items() if k.startswith(prefix)}
        return {k.removeprefix(prefix): x for k, x in matching.items()}

    return {
        "columns": get_array_dict("columns/"),
        "memory": get_array_dict("memory/"),
        "obs": get_array_list("obs"),
        "alive": arrays["alive"],
        "finals": finals,
        "running": get_array_list("running"),
        "next_unroll": record["next_unroll"],
        "pending": decode_value(record["pending"]),
    }
