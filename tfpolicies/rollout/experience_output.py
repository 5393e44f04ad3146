"""Records the steps that a worker samples, as `config.output` says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpolicies.batch.sample_batch import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.errors import ConfigError
from tfpolicies.models.spaces import action_leaves, batch_leaves, unflatten
from tfpolicies.offline.experience_io import ExperienceWriter, IOContext
from tfpolicies.offline.json_writer import JsonLinesWriter
from tfpolicies.offline.parquet_writer import ParquetWriter
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.rollout_rows import RolloutRows

_LOGDIR, _DATASET = "logdir", "dataset"


class StepRecorder:
    """Writes sampled steps as the environments gave them, before postprocessing.

    Rewards are neither clipped nor scaled, observations not normalised, and actions are those of
    the environment.

    Args:
        worker: whose steps are recorded.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._writer: ExperienceWriter | None = None

    def record(self, samples: Sequence[RolloutRows], env_steps: int) -> None:
        """Writes the rows of a sample, of each policy."""
        batches = {sample.policy_id: _to_env_batch(sample) for sample in samples}
        if self._writer is None:
            self._writer = make_writer(self._worker)
        if [*batches] == [DEFAULT_POLICY_ID]:
            self._writer.write(batches[DEFAULT_POLICY_ID])
        else:
            self._writer.write(MultiAgentBatch(batches, env_steps))

    def close(self) -> None:
        """Writes the rest, and closes files."""
        if self._writer is not None and hasattr(self._writer, "close"):
            self._writer.close()


def set_log_dir(worker: Any, folder: Path) -> None:
    """Makes a worker record into the folder of a run, if its `output` is "logdir"."""
    worker.log_dir = str(folder)


def _to_env_batch(sample: RolloutRows) -> SampleBatch:
    """Returns rows with the environment's actions."""
    batch = sample.to_batch()
    policy: Policy = sample.policy
    leaves = batch_leaves(action_leaves(policy.action_space), batch["actions"], "actions")
    env_actions = policy.driver.acting.to_env(leaves)
    batch["actions"] = unflatten(policy.action_space, env_actions)
    return batch


def make_writer(worker: Any) -> ExperienceWriter:
    """Returns the writer that a worker's config asks for.

    Raises:
        ConfigError: if it names no folder, or a function that returns no writer.
    """
    config: AlgorithmConfig = worker.config
    output, options = config.output, config.output_config
    if callable(output):
        writer: ExperienceWriter = output(
            IOContext(worker.log_dir, config, worker.worker_index, worker)
        )
        if not callable(getattr(writer, "write", None)):
            raise ConfigError(
                "output must return a writer, an object with a method write(batch), got "
                f"{writer!r:.200}. Subclass tfpolicies.offline.ExperienceWriter."
            )
        return writer
    path = _get_path(output, options, worker.log_dir)
    file_format = options.get("format") or _get_format(path)
    if file_format == "parquet":
        spaces = {
            policy_id: (policy.observation_space, policy.action_space)
            for policy_id, policy in worker.policy_map.items()
        }
        return ParquetWriter(
            path,
            spaces,
            worker_index=worker.worker_index,
            max_file_size=config.output_max_file_size,
        )
    return JsonLinesWriter(
        path,
        worker_index=worker.worker_index,
        max_file_size=config.output_max_file_size,
        compress_columns=config.output_compress_columns,
        rllib_packing=file_format == "rllib",
    )


def _get_path(output: Any, options: Mapping[str, Any], log_dir: str | None) -> Any:
    if output == _DATASET:
        if options.get("path") is None:
            raise ConfigError("output='dataset' needs output_config={'path': a folder, ...}.")
        return options["path"]
    if output != _LOGDIR:
        return output
    if log_dir is None:
        raise ConfigError(
            "output='logdir' records into the folder of a run: train with learn(..., "
            "run_dir=...), or give the path of a folder."
        )
    return log_dir


def _get_format(path: str | os.PathLike[str]) -> str:
    return "parquet" if os.fspath(path).endswith((".parquet", ".pq")) else "json"
