"""Protocol of `Algorithm` for its components, which cannot import it (circular import)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tfpolicies.algorithms.algorithm_policies import AlgorithmPolicies
from tfpolicies.algorithms.evaluator import Evaluator
from tfpolicies.algorithms.train_batch_sampler import TrainBatchSampler
from tfpolicies.algorithms.training_metrics import TrainingMetrics
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.rollout_worker import RolloutWorker

PolicyStateDicts = Mapping[str, Mapping[str, Any]]
"""States of `Policy.get_state`, by policy id."""


class AlgorithmProtocol(Protocol):
    """The members of `Algorithm` that its components use."""

    config: AlgorithmConfig
    callbacks: DefaultCallbacks
    workers: WorkerSet
    policies: AlgorithmPolicies
    counters: dict[str, int]
    iteration: int
    run_dir: Path | None
    warns_about_unserializable: bool
    _evaluator: Evaluator
    _last_finite_checkpoint: str | None
    _last_result: dict[str, Any]
    _metrics: TrainingMetrics
    _train_batch_sampler: TrainBatchSampler

    @property
    def worker(self) -> RolloutWorker: ...

    @property
    def evaluation_worker(self) -> RolloutWorker | None: ...

    @property
    def evaluation_workers(self) -> WorkerSet | None: ...

    @classmethod
    def get_default_config(cls) -> AlgorithmConfig: ...

    def train(self) -> dict[str, Any]: ...

    def evaluate(self) -> dict[str, dict[str, Any]]: ...

    def save(
        self, checkpoint_dir: Path, *, policy_states: PolicyStateDicts | None = None
    ) -> object: ...

    def restore(self, checkpoint_path: Path, *, allow_non_finite: bool) -> None: ...

    def add_policy(self, policy_id: str, *, policy: Policy) -> Policy: ...

    def remove_policy(self, policy_id: str) -> None: ...

    def get_policy(self) -> Any: ...

    def get_extra_state(self) -> dict[str, Any]: ...

    def set_extra_state(self, state: Mapping[str, Any]) -> None: ...

    def stop(self) -> None: ...
