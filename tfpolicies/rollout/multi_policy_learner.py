"""Learning of several policies from one batch, each from its own rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.postprocessing import standardized
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.errors import UsageError
from tfpolicies.rollout.worker_policies import WorkerPolicies

Gradients = Sequence[Any] | Mapping[str, Any]
"""Those of the default policy, or of several by id."""


class MultiPolicyLearner:
    """Updates those policies of a worker that are trained.

    Args:
        policies: of the worker.
    """

    def __init__(self, policies: WorkerPolicies) -> None:
        self._policies = policies
        self._policy_map = policies.policy_map

    def select_rows(self, samples: SampleBatch | MultiAgentBatch) -> dict[str, SampleBatch]:
        """Returns the rows of a batch whose policies are trained on it, by policy id.

        They are readable: what was compressed is unpacked in copies.

        Raises:
            UnknownPolicyError: if there is no policy of an id.
        """
        batch = samples.as_multi_agent()
        for policy_id in batch.policy_batches:
            self._policy_map.handle(policy_id)
        trains = self._policies.trains
        return {
            pid: _unpack(rows) for pid, rows in batch.policy_batches.items() if trains(pid, batch)
        }

    def learn_on_batch(self, samples: SampleBatch | MultiAgentBatch) -> dict[str, Any]:
        """Updates each policy once; see `RolloutWorker.learn_on_batch`."""
        return {
            pid: self._policy_map[pid].learn_on_batch(rows)
            for pid, rows in self.select_rows(samples).items()
        }

    def learn_minibatches(
        self,
        samples: SampleBatch | MultiAgentBatch,
        num_epochs: int,
        minibatch_size: int,
        standardize_fields: Collection[str],
        rng: np.random.Generator,
    ) -> dict[str, Any]:
        """Updates each policy in minibatches; returns the results by policy id.

        Args:
            samples: the batch.
            num_epochs: how often each row is learned from.
            minibatch_size: rows of an update; 0 for all rows at once.
            standardize_fields: columns that get mean 0 and standard deviation 1 first.
            rng: orders the rows.

        Raises:
            MissingColumnError: if there is no such column to standardize; nothing is changed then.
        """
        by_policy = self.select_rows(samples)
        for rows in by_policy.values():
            for name in standardize_fields:
                rows[name] = standardized(np.asarray(rows[name], np.float32))
        results: dict[str, Any] = {}
        for policy_id, rows in by_policy.items():
            driver, size = self._policy_map[policy_id].driver, minibatch_size or rows.count
            results[policy_id] = driver.learning.update(rows, num_epochs, size, rng=rng)
        return results

    def compute_gradients(
        self, samples: SampleBatch | MultiAgentBatch, single_agent: bool | None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns gradients and their statistics; see `RolloutWorker.compute_gradients`."""
        if single_agent:
            gradients, info = self._compute_default_gradients(samples.as_multi_agent())
            return gradients, {**info, "batch_count": samples.count}
        results = {
            policy_id: self._policy_map[policy_id].compute_gradients(rows)
            for policy_id, rows in self.select_rows(samples).items()
        }
        infos: dict[str, Any] = {policy_id: info for policy_id, (_, info) in results.items()}
        by_policy = {policy_id: gradients for policy_id, (gradients, _) in results.items()}
        return by_policy, {**infos, "batch_count": samples.count}

    def _compute_default_gradients(self, batch: MultiAgentBatch) -> tuple[Any, dict[str, Any]]:
        if set(batch.policy_batches) != {DEFAULT_POLICY_ID}:
            raise UsageError(
                "single_agent=True needs a batch of the default policy alone, got one of "
                f"{sorted(batch.policy_batches)}."
            )
        policy = self._policy_map[DEFAULT_POLICY_ID]
        return policy.compute_gradients(_unpack(batch.policy_batches[DEFAULT_POLICY_ID]))

    def apply_gradients(self, gradients: Gradients) -> None:
        """Applies gradients; see `RolloutWorker.apply_gradients`."""
        by_policy = gradients if isinstance(gradients, Mapping) else {DEFAULT_POLICY_ID: gradients}
        policies = {policy_id: self._policy_map[policy_id] for policy_id in by_policy}
        for policy_id, policy in policies.items():
            if self._policies.trains(policy_id):
                policy.apply_gradients(by_policy[policy_id])


def _unpack(batch: SampleBatch) -> SampleBatch:
    """Returns the batch with its observations unpacked, leaving the caller's as it is."""
    return batch.copy(shallow=True).decompress_if_needed()
