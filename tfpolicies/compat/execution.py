"""Functions that ported training loops call, and the names of their counters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tfpolicies.algorithms.train_batch_sampler import sample_steps
from tfpolicies.batch.postprocessing import discount_cumsum
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch, concat_samples
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.errors import UnknownPolicyError, UsageError

discount = discount_cumsum

LAST_TARGET_UPDATE_TS = "last_target_update_ts"
LEARNER_INFO = "learner"
LEARNER_STATS_KEY = "learner_stats"
NUM_AGENT_STEPS_SAMPLED = "num_agent_steps_sampled"
NUM_AGENT_STEPS_TRAINED = "num_agent_steps_trained"
NUM_ENV_STEPS_SAMPLED = "num_env_steps_sampled"
NUM_ENV_STEPS_TRAINED = "num_env_steps_trained"
NUM_TARGET_UPDATES = "num_target_updates"


def synchronous_parallel_sample(
    *,
    worker_set: WorkerSet,
    max_agent_steps: int | None = None,
    max_env_steps: int | None = None,
    concat: bool = True,
) -> Any:
    """Samples in all workers, once, or until there are enough steps.

    Args:
        worker_set: an algorithm's `workers`.
        max_agent_steps: minimum number of agent transitions to sample; or
        max_env_steps: minimum number of environment steps. If both are None: one `sample()` per
            worker.
        concat: whether to concatenate the batches.

    Returns:
        A `SampleBatch` or `MultiAgentBatch`; without `concat` a list of them.

    Raises:
        UsageError: if both numbers are given.
    """
    if max_agent_steps is not None and max_env_steps is not None:
        raise UsageError(
            "Give either max_agent_steps or max_env_steps to synchronous_parallel_sample, not "
            f"both: got {max_agent_steps} and {max_env_steps}."
        )
    batches = sample_steps(worker_set.sample, max_env_steps or 0, max_agent_steps or 0)
    return concat_samples(batches) if concat else batches


def train_one_step(
    algorithm: Any,
    train_batch: SampleBatch | MultiAgentBatch,
    policies_to_train: Collection[str] | None = None,
) -> dict[str, Any]:
    """Updates policies on their parts of a batch.

    A policy runs `num_sgd_iter` epochs of minibatches of `sgd_minibatch_size` rows if its
    config has these settings, and otherwise one update on all rows.

    Args:
        algorithm: the algorithm that has the policies.
        train_batch: of one policy or of several.
        policies_to_train: their ids; None for all that the algorithm trains.

    Returns:
        The policies' results by id. Return it from `training_step`: trained steps are counted from
        it.

    Raises:
        UnknownPolicyError: if the batch has rows of a policy that does not exist.
    """
    worker, results = algorithm.workers.local_worker(), {}
    for policy_id, batch in train_batch.as_multi_agent().policy_batches.items():
        policy = worker.get_policy(policy_id)
        if policy is None:
            raise UnknownPolicyError(
                f"train_batch has rows of a policy {policy_id!r}, but there are "
                f"{sorted(worker.policy_map)}. Add the policy, or take its rows out of the batch."
            )
        is_trained = worker.policies.is_trained(policy_id, train_batch)
        if is_trained if policies_to_train is None else policy_id in policies_to_train:
            epochs, size = (policy.config.get(x) for x in ("num_sgd_iter", "sgd_minibatch_size"))
            if epochs and size:
                results[policy_id] = policy.driver.learning.train(batch, epochs, size)
            else:
                results[policy_id] = policy.learn_on_batch(batch)
    return results


multi_gpu_train_one_step = train_one_step
"""The batch is moved once to the device that learns."""
