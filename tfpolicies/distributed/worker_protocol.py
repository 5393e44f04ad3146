"""Functions and data that workers exchange: samples in one direction, policies in the other.

All functions run in a worker's process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.policy_spec import PolicySpec
from tfpolicies.connectors import OwnFilter
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.evaluation import play
from tfpolicies.rollout.experience_input import get_input_position, set_input_position
from tfpolicies.rollout.policy_changes import MappingAndTrainable, PolicyAddition
from tfpolicies.rollout.rollout_worker import RolloutWorker
from tfpolicies.rollout.sampler import EvaluationResult

Spaces = dict[str, tuple[gym.Space | None, gym.Space | None]]
FilterDeltas = dict[str, dict[str, Any]]
"""By policy id and attribute: filters with their observations since the last transfer."""

_LEARNING_KEYS = ("_optimizer_variables", "target_weights", "rng", "learning_rng")


class EnvDescription(NamedTuple):
    """The spaces and the number of a worker's environments.

    Attributes:
        spaces: observation and action space of each policy, and of the environment (`"__env__"`),
            before connectors.
        num_envs: the number of environments.
        is_multi_agent: whether each of them has several agents.
    """

    spaces: Spaces
    num_envs: int
    is_multi_agent: bool


def describe_envs(worker: RolloutWorker) -> EnvDescription:
    spaces: Spaces = {
        pid: (spec.observation_space, spec.action_space) for pid, spec in worker.policy_dict.items()
    }
    envs = worker.environments
    is_multi_agent = isinstance(envs, MultiAgentEnvAdapter)
    if envs is not None:
        source: Any = worker.env if is_multi_agent else envs
        # A multi-agent environment may leave its spaces to the policies.
        observation_space, action_space = (
            getattr(source, f"{kind}_space", None) for kind in ("observation", "action")
        )
        spaces["__env__"] = observation_space, action_space
    return EnvDescription(spaces, 0 if envs is None else envs.num_envs, is_multi_agent)


def get_policy_spaces(
    worker: RolloutWorker, policy_id: str, spec: PolicySpec, policy_mapping_fn: Any
) -> tuple[Any, Any]:
    """Returns the spaces that a policy would get in a worker."""
    complete_spec = worker.policies.complete_specs({policy_id: spec}, policy_mapping_fn)[policy_id]
    return complete_spec.observation_space, complete_spec.action_space


# -- from sampling workers ---------------------------------------------------------------------


class SampleResult(NamedTuple):
    """One sample with its metrics and filter deltas. If it is lost, none of them is counted.

    `input_position` is where the worker continues to read its data: a worker that replaces it reads
    on where the last sample that arrived ended.
    """

    batch: SampleBatch | MultiAgentBatch
    metrics: list[RolloutMetrics]
    filter_deltas: FilterDeltas
    worker_index: int = 0
    input_position: Any = None


def sample_with_metrics(worker: RolloutWorker) -> SampleResult:
    """Returns a sample, the metrics of episodes that ended in it, and the filter deltas."""
    batch = worker.sample()
    return SampleResult(
        batch,
        worker.get_metrics(),
        _pop_filter_deltas(worker),
        worker.worker_index,
        get_input_position(worker),
    )


def _pop_filter_deltas(worker: RolloutWorker) -> FilterDeltas:
    deltas: FilterDeltas = {}
    for policy_id, filters in _get_filters(worker).items():
        pending = {
            name: pending_filter
            for name, pending_filter in filters.items()
            if pending_filter.pending_count
        }
        if pending:
            deltas[policy_id] = {
                name: pending_filter.snapshot() for name, pending_filter in pending.items()
            }
            if not worker.config.update_worker_filter_stats:  # it uses only its own statistics
                worker.policy_map.get_handle(policy_id).driver.learning.flush_filters()
        for pending_filter in pending.values():
            pending_filter.forget_pending()
    return deltas


def _get_filters(worker: RolloutWorker) -> FilterDeltas:
    """Returns the filters of all policies, without loading policies into memory."""
    handles = ((pid, worker.policy_map.get_handle(pid)) for pid in worker.policy_map)
    filters_by_policy = (
        (pid, {**policy.driver.filters, **get_custom_filter(policy)}) for pid, policy in handles
    )
    return {pid: filters for pid, filters in filters_by_policy if filters}


def get_custom_filter(policy: Policy) -> dict[str, OwnFilter]:
    """Returns the user's filter among the connectors of a policy, if there is one."""
    filters = [
        connector for connector in policy.agent_connectors or () if isinstance(connector, OwnFilter)
    ]
    return {"own_filter": filters[0]} if filters else {}


def merge_filter_deltas(worker: RolloutWorker, deltas: FilterDeltas) -> set[str]:
    """Applies the filter deltas of other workers to a worker; returns the ids of the policies."""
    filters = _get_filters(worker)
    merged_ids = set()
    for policy_id, policy_deltas in deltas.items():
        driver = worker.policy_map.get_handle(policy_id).driver if policy_id in filters else None
        if driver is None or driver.is_frozen:
            continue
        for name, delta in policy_deltas.items():
            filters[policy_id][name].apply_changes(delta)
        driver.apply_filters()
        merged_ids.add(policy_id)
    return merged_ids


def copy_filters(worker: RolloutWorker, policy_ids: Collection[str]) -> FilterDeltas:
    return {
        policy_id: {
            name: policy_filter.snapshot() for name, policy_filter in policy_filters.items()
        }
        for policy_id, policy_filters in _get_filters(worker).items()
        if policy_id in policy_ids
    }


def sync_filters(worker: RolloutWorker, filters: FilterDeltas) -> None:
    """Copies the statistics of other filters; pending statistics stay pending."""
    own_filters = _get_filters(worker)
    for policy_id in filters.keys() & own_filters.keys():
        for name, other in filters[policy_id].items():
            own_filters[policy_id][name].sync(other)
        worker.policy_map.get_handle(policy_id).driver.apply_filters()


def evaluate_share(
    worker: RolloutWorker, shares: Mapping[int, int], by_episodes: bool, seconds: float | None
) -> EvaluationResult:
    """Plays a worker's share of episodes or steps, by worker index, within a time limit."""
    amount = shares.get(worker.worker_index, 0)
    if not amount:
        return EvaluationResult([], 0)
    return play(worker, amount, by_episodes=by_episodes, seconds=seconds)


# -- to sampling workers -----------------------------------------------------------------------


class WeightsUpdate(NamedTuple):
    """An update of the policies of the learning worker.

    Attributes:
        weights: of policies by id.
        partial: the policies whose weights contain only those for inference.
        hyperparameters: their hyperparameters, float32 `[H]`.
        timesteps: their global time steps.
        filters: their filters, if these are to be copied.
        global_vars: the counters of the run, or None.
    """

    weights: dict[str, Any]
    partial: frozenset[str]
    hyperparameters: dict[str, np.ndarray]
    timesteps: dict[str, int]
    filters: FilterDeltas
    global_vars: Mapping[str, Any] | None


def make_weights_update(
    worker: RolloutWorker,
    policy_ids: Collection[str],
    global_vars: Mapping[str, Any] | None = None,
    *,
    with_filters: bool = False,
    inference_only: bool = False,
) -> WeightsUpdate:
    """Returns the update for some policies; with `inference_only`, of inference weights."""
    policies = {pid: worker.policy_map.get_handle(pid) for pid in policy_ids}
    states = {pid: policy.driver.state for pid, policy in policies.items()}
    inference_weights = {
        pid: policy.driver.get_acting_weights()
        for pid, policy in policies.items()
        if inference_only
    }
    partial_weights = {pid: part for pid, part in inference_weights.items() if part is not None}
    full_weights = worker.get_weights([pid for pid in policy_ids if pid not in partial_weights])
    return WeightsUpdate(
        partial_weights | full_weights,
        frozenset(partial_weights),
        {pid: state.hyperparameters.copy() for pid, state in states.items() if state is not None},
        {pid: policy.global_timestep for pid, policy in policies.items()},
        copy_filters(worker, policy_ids) if with_filters else {},
        global_vars,
    )


def apply_weights_update(worker: RolloutWorker, update: WeightsUpdate) -> None:
    """Applies an update; policies that do not exist here are ignored."""
    weights = {pid: x for pid, x in update.weights.items() if pid in worker.policy_map}
    worker.set_weights(weights)
    for policy_id in weights:
        policy = worker.policy_map.get_handle(policy_id)
        policy.global_timestep = update.timesteps[policy_id]
        state = policy.driver.state
        if state is not None and policy_id in update.hyperparameters:
            state.hyperparameters[...] = update.hyperparameters[policy_id]
    sync_filters(worker, update.filters)
    if update.global_vars is not None:
        worker.set_global_vars(update.global_vars)


def get_inference_state(policy: Policy) -> dict[str, Any]:
    """Returns the state of a policy without the parts that only learning needs."""
    return {name: x for name, x in policy.get_state().items() if name not in _LEARNING_KEYS}


def add_policy(
    worker: RolloutWorker, addition: PolicyAddition, mapping_and_trainable: MappingAndTrainable
) -> None:
    """Adds a policy of the learning worker by its state.

    Args:
        worker: the worker that gets it. If it has the policy, the policy gets the state.
        addition: has the state, from `get_inference_state`.
        mapping_and_trainable: the mapping and the trained policies.
    """
    worker.policies.apply(addition)
    worker.policies.set_mapping_and_trainable(mapping_and_trainable)


def remove_policy(
    worker: RolloutWorker, policy_id: str, mapping_and_trainable: MappingAndTrainable
) -> None:
    """Removes a policy if it exists, and sets the mapping and the trained policies."""
    worker.policies.revert(policy_id, mapping_and_trainable)


def request_new_episodes(worker: RolloutWorker) -> None:
    """Makes a worker start new episodes with its next sample."""
    worker.has_episodes = False


class WorkerSnapshot(NamedTuple):
    """A snapshot of the learning worker that makes another worker equal to it.

    Attributes:
        states: of all policies by id, from `get_inference_state`.
        mapping_and_trainable: the mapping and the trained policies.
        global_vars: the counters of the run.
        explore: whether policies explore, by id.
        input_positions: by worker index, where workers continue to read their data.
    """

    states: dict[str, dict[str, Any]]
    mapping_and_trainable: MappingAndTrainable
    global_vars: dict[str, Any]
    explore: dict[str, bool]
    input_positions: Mapping[int, Any] = {}


def make_snapshot(
    worker: RolloutWorker, input_positions: Mapping[int, Any] | None = None
) -> WorkerSnapshot:
    policies = dict(worker.policy_map.items())
    states = {pid: get_inference_state(policy) for pid, policy in policies.items()}
    configs = {pid: policy.config for pid, policy in policies.items()}
    explore = {pid: config["explore"] for pid, config in configs.items() if "explore" in config}
    return WorkerSnapshot(
        states,
        worker.policies.mapping_and_trainable,
        dict(worker.global_vars),
        explore,
        dict(input_positions or {}),
    )


def restore_snapshot(
    worker: RolloutWorker, snapshot: WorkerSnapshot, episode_seed: int | None = None
) -> None:
    """Makes a worker equal to the learning worker.

    Args:
        worker: the worker to change.
        snapshot: the result of `make_snapshot`.
        episode_seed: a number from which the seeds of new episodes are derived; None keeps the
            running episodes.
    """
    for policy_id in set(worker.policy_map) - set(snapshot.states):
        worker.policies.remove(policy_id)
    worker.set_state({"policy_states": snapshot.states, "global_vars": snapshot.global_vars})
    for policy_id, explore in snapshot.explore.items():
        worker.policy_map.get_handle(policy_id).config["explore"] = explore
    worker.policies.set_mapping_and_trainable(snapshot.mapping_and_trainable)
    if episode_seed is None:
        return
    worker.seeds.num_calls = 1 + episode_seed
    if worker.config.seed is not None:
        _reseed(worker, episode_seed)
    set_input_position(worker, snapshot.input_positions.get(worker.worker_index))
    request_new_episodes(worker)


def _reseed(worker: RolloutWorker, episode_seed: int) -> None:
    """Reseeds a worker's generators, so that it does not repeat the random numbers of its seed."""
    seeds = np.random.SeedSequence([worker.config.seed, worker.worker_index, episode_seed])
    generators = [policy.driver.generator for policy in worker.policy_map.values()]
    generators_to_seed = [generator for generator in generators if generator is not None]
    sampler_seed, *policy_seeds = seeds.spawn(1 + len(generators_to_seed))
    if worker.sampler is not None:
        worker.sampler.rng = np.random.default_rng(sampler_seed)
    for generator, seed in zip(generators_to_seed, policy_seeds, strict=True):
        generator.bit_generator.state = np.random.default_rng(seed).bit_generator.state
