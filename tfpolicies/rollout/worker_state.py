"""Gets and restores the state of a rollout worker."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpolicies.config.multi_agent import as_predicate, require_mapping_fn
from tfpolicies.errors import EnvError, WeightsError
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.base_worker import BaseWorker
from tfpolicies.rollout.observation_filters import ObservationFilters
from tfpolicies.rollout.policy_changes import PolicyAddition, PolicyTransaction
from tfpolicies.rollout.worker_policies import WorkerPolicies
from tfpolicies.storage.json_values import find_unresolved

logger = logging.getLogger("tfpolicies")


def get_worker_state(policies: WorkerPolicies, filters: ObservationFilters) -> dict[str, Any]:
    only_trained = policies.config.checkpoint_trainable_policies_only
    policy_map = policies.policy_map
    policy_ids = [pid for pid in policy_map if not only_trained or policies.is_trained(pid)]
    return {
        "policy_ids": policy_ids,
        "policy_states": {pid: policy_map[pid].get_state() for pid in policy_ids},
        "policy_mapping_fn": policies.policy_mapping_fn,
        "is_policy_to_train": policies.is_policy_to_train,
        "filters": filters.copy(),
        "global_vars": copy.deepcopy(policies.global_vars),
    }


def restore_worker_state(policies: WorkerPolicies, state: Mapping[str, Any]) -> None:
    policy_states = state.get("policy_states") if isinstance(state, Mapping) else None
    if not isinstance(policy_states, Mapping):
        raise WeightsError(
            "A state of a worker must be a dict with 'policy_states', as `get_state()` returns "
            f"it; got {state!r:.200}."
        )
    to_train = as_predicate(state.get("is_policy_to_train"))
    mapping_fn = state.get("policy_mapping_fn")
    require_mapping_fn(mapping_fn)
    new_policies = _make_new_policies(policies, policy_states)
    with PolicyTransaction() as transaction:
        for policy_id, policy_state in policy_states.items():
            if policy_id in new_policies:
                policy = new_policies[policy_id]
                addition = PolicyAddition(policy_id, policy=policy, policy_state=policy_state)
                policies.add_in_transaction(transaction, addition)
            else:
                policies.policy_map[policy_id].set_state(policy_state)
    policies.update_mapping_and_trainable(mapping_fn, None)
    if "is_policy_to_train" in state:
        policies.is_policy_to_train = to_train  # also None, for all
    if state.get("global_vars"):
        policies.set_global_vars(state["global_vars"])


def _make_new_policies(
    policies: WorkerPolicies, policy_states: Mapping[str, Any]
) -> dict[str, Policy]:
    """Checks the states of policies; returns the policies that do not exist yet."""
    new_policies = {}
    for policy_id, policy_state in policy_states.items():
        if policy_id in policies.policy_map:
            policy = policies.policy_map.get_handle(policy_id)
        else:
            policy = new_policies[policy_id] = policies.make_from_state(policy_id, policy_state)
        policy.driver.check_state(policy_state)
    return new_policies


def restore_sampling(
    worker: BaseWorker,
    num_seed_calls: int,
    rng: np.random.Generator | None,
    global_vars: Mapping[str, Any],
    sampler_state: Mapping[str, Any] | None,
) -> None:
    """Continues from a checkpoint: with its running episodes, or with new ones at the next sample.

    Args:
        worker: a `RolloutWorker`.
        num_seed_calls: the number of calls of `EpisodeSeeds.next` so far.
        rng: the sampler's generator. A worker without environments has none in its checkpoint; this
            worker keeps its own then.
        global_vars: the counters of the run.
        sampler_state: of the running episodes; None for new ones. They also start, with a warning,
            if the environments cannot continue the others.
    """
    worker.seeds.num_calls = num_seed_calls
    worker.global_vars = dict(global_vars)
    if worker.sampler is None:
        return
    if sampler_state is not None and sampler_state.get("kind") != worker.sampler.state_kind:
        sampler_state = None  # of another input, such as data before the run went online
    if rng is not None:
        worker.sampler.rng = rng
    worker.has_episodes = False
    if sampler_state is None:
        return
    try:
        unresolved = find_unresolved(sampler_state["envs"])
        if unresolved:  # of earlier versions
            raise EnvError(f"their state contains {next(iter(unresolved.values())).name}.")
        worker.sampler.set_state(sampler_state)
        worker.has_episodes = True
    except EnvError as error:
        logger.warning(
            "The episodes of the checkpoint cannot be continued, so new ones start: %s", error
        )
