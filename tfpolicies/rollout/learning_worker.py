"""Base class of workers that learn: updates each policy from its own rows of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.postprocessing import standardized
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.errors import UsageError
from tfpolicies.policy_map.policy_map import PolicyMap
from tfpolicies.rollout.base_worker import BaseWorker
from tfpolicies.rollout.worker_policies import WorkerPolicies

Gradients = Sequence[Any] | Mapping[str, Any]
"""Gradients of the default policy, or of several policies by id."""


class LearningWorker(BaseWorker):
    """Base class of `RolloutWorker` with the methods that update policies."""

    policies: WorkerPolicies

    @property
    def policy_map(self) -> PolicyMap:
        """The policies by id."""
        return self.policies.policy_map

    def sample_and_learn(
        self,
        expected_batch_size: int,
        num_sgd_iter: int,
        sgd_minibatch_size: int,
        standardize_fields: Collection[str],
    ) -> tuple[dict[str, Any], int]:
        """Samples one batch and learns from it in minibatches.

        Args:
            expected_batch_size: what `batch.count` must be.
            num_sgd_iter: epochs.
            sgd_minibatch_size: rows per update; 0 for all rows at once.
            standardize_fields: columns to standardize to mean 0 and standard deviation 1 first.

        Returns:
            The results by policy id (for a custom policy, the result of its last minibatch), and
            the count of the batch.

        Raises:
            UsageError: if the batch has another count; also an AssertionError.
            MissingColumnError: if a column to standardize does not exist; no policy learns then.
        """
        batch = self.sample()
        if batch.count != expected_batch_size:
            raise UsageError(
                f"sample_and_learn expected a batch of {expected_batch_size} steps, but this "
                f"worker returned {batch.count}; see rollout_fragment_length."
            )
        rows_by_policy, results = self._select_rows(batch), {}
        for rows in rows_by_policy.values():
            for name in standardize_fields:
                rows[name] = standardized(np.asarray(rows[name], np.float32))
        for policy_id, rows in rows_by_policy.items():
            driver, size = self.policy_map[policy_id].driver, sgd_minibatch_size or rows.count
            results[policy_id] = driver.learning.update(
                rows, num_sgd_iter, size, rng=self._require_sampler().rng
            )
        return results, batch.count

    def learn_on_batch(self, samples: SampleBatch | MultiAgentBatch) -> dict[str, Any]:
        """Updates each trainable policy on its part of a batch; returns results by policy id.

        Raises:
            UnknownPolicyError: if a policy id does not exist; nothing is changed then.
        """
        return {
            policy_id: self.policy_map[policy_id].learn_on_batch(rows)
            for policy_id, rows in self._select_rows(samples).items()
        }

    def compute_gradients(
        self, samples: SampleBatch | MultiAgentBatch, single_agent: bool | None = None
    ) -> tuple[Gradients, dict[str, Any]]:
        """Returns the gradients of a batch, for `apply_gradients`, and their statistics.

        Args:
            samples: the batch.
            single_agent: True returns the gradients of the default policy as a list, with its info.
                Otherwise both are dicts by the ids of the trainable policies; the info also has
                `batch_count`.

        Raises:
            UsageError: if `single_agent` is True for a batch of other policies.
        """
        if single_agent:
            rows = self._require_default_rows(samples.as_multi_agent())
            gradients, info = self.policy_map[DEFAULT_POLICY_ID].compute_gradients(rows)
            return gradients, {**info, "batch_count": samples.count}
        results = {
            policy_id: self.policy_map[policy_id].compute_gradients(rows)
            for policy_id, rows in self._select_rows(samples).items()
        }
        infos: dict[str, Any] = {policy_id: info for policy_id, (_, info) in results.items()}
        gradients_by_policy = {
            policy_id: gradients for policy_id, (gradients, _) in results.items()
        }
        return gradients_by_policy, {**infos, "batch_count": samples.count}

    def apply_gradients(self, grads: Gradients) -> None:
        """Applies gradients: a list to the default policy, a dict by policy id.

        Gradients of policies that are not trained are ignored.

        Raises:
            UnknownPolicyError: if a policy id does not exist; nothing is changed then.
        """
        gradients_by_policy = grads if isinstance(grads, Mapping) else {DEFAULT_POLICY_ID: grads}
        policies = {policy_id: self.policy_map[policy_id] for policy_id in gradients_by_policy}
        for policy_id, policy in policies.items():
            if self.policies.is_trained(policy_id):
                policy.apply_gradients(gradients_by_policy[policy_id])

    def _select_rows(self, samples: SampleBatch | MultiAgentBatch) -> dict[str, SampleBatch]:
        """Returns the decompressed rows of each policy that is trained on a batch, by policy id."""
        batch = samples.as_multi_agent()
        for policy_id in batch.policy_batches:
            self.policy_map.get_handle(policy_id)
        is_trained = self.policies.is_trained
        return {
            pid: _unpack(rows)
            for pid, rows in batch.policy_batches.items()
            if is_trained(pid, batch)
        }

    def _require_default_rows(self, batch: MultiAgentBatch) -> SampleBatch:
        if set(batch.policy_batches) != {DEFAULT_POLICY_ID}:
            raise UsageError(
                "single_agent=True needs a batch of only the default policy, got one of "
                f"{sorted(batch.policy_batches)}."
            )
        return _unpack(batch.policy_batches[DEFAULT_POLICY_ID])


def _unpack(batch: SampleBatch) -> SampleBatch:
    """Decompresses observations in a copy."""
    return batch.copy(shallow=True).decompress_if_needed()
