"""Samples train batches: complete fragments of all workers, split by policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tfpolicies.algorithms.health_stats import RowMeter
from tfpolicies.algorithms.recent_actions import RecentActions
from tfpolicies.algorithms.training_checks import TrainableCheck
from tfpolicies.algorithms.training_metrics import TrainingMetrics
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch, concat_samples
from tfpolicies.distributed.worker_set import WorkerSet


def sample_steps(
    sample: Callable[[], Sequence[SampleBatch | MultiAgentBatch]],
    env_steps: int = 0,
    agent_steps: int = 0,
) -> list[SampleBatch | MultiAgentBatch]:
    """Calls `sample`, at least once, until there are enough steps; returns all batches.

    Args:
        sample: returns batches.
        env_steps: the minimum number of environment steps.
        agent_steps: the minimum number of agent transitions.
    """
    batches: list[SampleBatch | MultiAgentBatch] = []
    while True:
        batches += [batch.decompress_if_needed() for batch in sample()]
        has_env_steps = sum(batch.env_steps() for batch in batches) >= env_steps
        if has_env_steps and sum(batch.agent_steps() for batch in batches) >= agent_steps:
            return batches


class TrainBatchSampler:
    """Samples the rows that a training step learns from, and counts them.

    Args:
        workers: the training workers.
        metrics: the counters and timers of the run.
        check: applied to trained policies.

    Attributes:
        env_steps_per_row: environment steps per training row of the last train batch.
        recent_actions: the newest actions of trained policies.
        row_meter: measures observations and rewards.
    """

    def __init__(self, workers: WorkerSet, metrics: TrainingMetrics, check: TrainableCheck) -> None:
        self._workers = workers
        self._metrics = metrics
        self._check = check
        self.env_steps_per_row = 1.0
        self._has_fitted_filters = False
        self.recent_actions = RecentActions()
        self.row_meter = RowMeter()

    def sample(self, min_steps: int, *, while_learning: bool) -> dict[str, SampleBatch]:
        """Returns the rows of at least `min_steps` steps, by the id of the policy that learns.

        Args:
            min_steps: steps, as `count_steps_by` counts them.
            while_learning: whether remote workers continue sampling in the background.
        """
        started_at = time.perf_counter()
        workers = self._workers
        if not self._has_fitted_filters:
            workers.fit_filters()
            self._has_fitted_filters = True
        sample = workers.sample_ready if while_learning else workers.sample
        batch = concat_samples(
            sample_steps(sample, **{self._metrics.unit: min_steps})
        ).as_multi_agent()
        counters = self._metrics.counters
        counters["num_env_steps_sampled"] += batch.env_steps()
        counters["num_agent_steps_sampled"] += batch.agent_steps()
        policies = self._workers.local_worker().policies
        trained_rows = {
            policy_id: rows
            for policy_id, rows in batch.policy_batches.items()
            if policy_id in policies.policy_map and policies.is_trained(policy_id, batch)
        }
        self._check.check_sampled(trained_rows, policies.policy_map)
        for policy_id, rows in trained_rows.items():
            self.recent_actions.add(policy_id, rows)
            self.row_meter.measure(policy_id, rows)
        agent_steps = sum(rows.count for rows in trained_rows.values())
        self.env_steps_per_row = batch.env_steps() / max(1, agent_steps)
        self._metrics.add_time("sample", started_at)
        return trained_rows
