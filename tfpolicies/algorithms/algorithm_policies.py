"""The policies of an algorithm: added and removed in all workers that train or evaluate."""

from __future__ import annotations

from typing import Any

from tfpolicies.algorithms.evaluator import Evaluator
from tfpolicies.algorithms.training_checks import TrainableCheck
from tfpolicies.config.multi_agent import as_predicate, is_surely_trained
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.errors import UnknownPolicyError, suggest_similar_names
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.policy_changes import MappingAndTrainable, PolicyAddition, PolicyTransaction


class AlgorithmPolicies:
    """Changes the policies of all workers of an algorithm, or of none.

    Args:
        workers: the training workers.
        evaluator: has the evaluation workers.
        check: applied to policies that will be trained.
    """

    def __init__(self, workers: WorkerSet, evaluator: Evaluator, check: TrainableCheck) -> None:
        self._workers = workers
        self._evaluator = evaluator
        self._check = check

    def get(self, policy_id: str) -> Any:
        policies = self._workers.local_worker().policy_map
        try:
            return policies.get_handle(policy_id)
        except UnknownPolicyError:
            policy_ids = sorted(policies)
            matches = suggest_similar_names(policy_id, policy_ids)
            raise UnknownPolicyError(
                f"No policy {policy_id!r}; there are {policy_ids}.{matches}"
            ) from None

    def add(self, addition: PolicyAddition, *, evaluation_workers: bool) -> Policy:
        """Adds a policy to all workers; see `Algorithm.add_policy`.

        Args:
            addition: the policy or its spec, with mapping and trainable predicate.
            evaluation_workers: whether evaluation workers get it.
        """
        self._require_trainable(addition)
        with PolicyTransaction() as transaction:
            new_policy = self._workers.add_in_transaction(transaction, addition)
            if evaluation_workers and self._evaluator.workers is not None:
                policy_id, mapping_fn = addition.policy_id, addition.policy_mapping_fn
                copy = self._evaluator.copy_policy(new_policy, policy_id)
                evaluation_addition = PolicyAddition(
                    policy_id, policy=copy, policy_mapping_fn=mapping_fn
                )
                self._evaluator.workers.add_in_transaction(transaction, evaluation_addition)
        return new_policy

    def _require_trainable(self, addition: PolicyAddition) -> None:
        """Checks a policy if it is certain to be trained; see `TrainableCheck.require`."""
        predicate: Any = addition.is_policy_to_train
        if predicate is None:
            predicate = self._workers.local_worker().is_policy_to_train
        policy, spec = addition.policy, addition.spec
        policy_class = type(policy) if spec is None else spec.policy_class
        is_frozen = policy is not None and policy.driver.is_frozen
        if not is_frozen and is_surely_trained(addition.policy_id, predicate):
            self._check.check(addition.policy_id, policy_class)  # type: ignore[arg-type]

    def remove(
        self,
        policy_id: str,
        mapping_and_trainable: MappingAndTrainable,
        *,
        evaluation_workers: bool,
    ) -> None:
        """Removes a policy from all workers; see `Algorithm.remove_policy`."""
        mapping_fn = mapping_and_trainable.policy_mapping_fn
        evaluating_workers = self._evaluator.workers if evaluation_workers else None
        if evaluating_workers is not None:
            evaluating_workers.require_unmapped(policy_id, mapping_fn)
        self._workers.remove_policy(policy_id, **mapping_and_trainable._asdict())
        if (
            evaluating_workers is not None
            and policy_id in evaluating_workers.local_worker().policy_map
        ):
            evaluating_workers.remove_policy(policy_id, policy_mapping_fn=mapping_fn)

    def set_mapping_and_trainable(self, mapping_and_trainable: MappingAndTrainable) -> None:
        """Sets the policy mapping function and the trainable policies in all workers.

        Args:
            mapping_and_trainable: the mapping function, and the ids or predicate of trained
                policies (None for all).
        """
        predicate = as_predicate(mapping_and_trainable.policies_to_train)
        self._workers.set_mapping_and_trainable(mapping_and_trainable.policy_mapping_fn, predicate)
        self._evaluator.set_mapping_and_trainable(
            MappingAndTrainable(mapping_and_trainable.policy_mapping_fn, predicate)
        )
