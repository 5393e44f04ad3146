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
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.evaluation import play
from tfpolicies.rollout.policy_changes import MappingAndTrainable, PolicyAddition
from tfpolicies.rollout.rollout_worker import RolloutWorker
from tfpolicies.rollout.sampler import Played

Spaces = dict[str, tuple[gym.Space | None, gym.Space | None]]
Changes = dict[str, dict[str, Any]]
"""By policy id and attribute: filters with their observations since the last transfer."""

_FOR_LEARNING = ("_optimizer_variables", "target_weights", "rng", "learning_rng")


class Description(NamedTuple):
    """The spaces and the number of a worker's environments.

    Attributes:
        spaces: observation and action space of each policy, and of the environment (`"__env__"`),
            before connectors.
        num_envs: the number of environments.
        is_multi_agent: whether each of them has several agents.
    """

    spaces: Spaces
    num_envs: int
    several_agents: bool


def describe(worker: RolloutWorker) -> Description:
    """Returns the description of a worker's environments."""
    spaces: Spaces = {
        pid: (spec.observation_space, spec.action_space) for pid, spec in worker.policy_dict.items()
    }
    envs = worker.environments
    several = isinstance(envs, MultiAgentEnvironments)
    if envs is not None:
        source: Any = worker.env if several else envs
        # A multi-agent environment may leave its spaces to the policies.
        observed, acted = (getattr(source, f"{of}_space", None) for of in ("observation", "action"))
        spaces["__env__"] = observed, acted
    return Description(spaces, 0 if envs is None else envs.num_envs, several)


def spaces_for(worker: RolloutWorker, policy_id: str, spec: PolicySpec) -> tuple[Any, Any]:
    """Returns the spaces that a policy would get in a worker."""
    whole = worker.policies.complete_specs({policy_id: spec})[policy_id]
    return whole.observation_space, whole.action_space


# -- from sampling workers ---------------------------------------------------------------------


class Harvest(NamedTuple):
    """One sample with its metrics and filter deltas. If it is lost, none of them is counted."""

    batch: SampleBatch | MultiAgentBatch
    metrics: list[RolloutMetrics]
    changes: Changes


def harvest(worker: RolloutWorker) -> Harvest:
    """Returns a sample, the metrics of episodes that ended in it, and the filter deltas."""
    batch = worker.sample()
    return Harvest(batch, worker.get_metrics(), _take_changes(worker))


def _take_changes(worker: RolloutWorker) -> Changes:
    taken: Changes = {}
    for policy_id, own in _filters(worker).items():
        pending = {name: each for name, each in own.items() if each.pending_count}
        if pending:
            taken[policy_id] = {name: each.snapshot() for name, each in pending.items()}
            if not worker.config.update_worker_filter_stats:  # it uses only its own statistics
                worker.policy_map.handle(policy_id).driver.learning.flush_filters()
        for each in pending.values():
            each.forget_pending()
    return taken


def _filters(worker: RolloutWorker) -> Changes:
    """Returns the filters of all policies, without loading policies into memory."""
    handles = ((pid, worker.policy_map.handle(pid)) for pid in worker.policy_map)
    found = ((pid, {**policy.driver.filters, **own_filter_of(policy)}) for pid, policy in handles)
    return {pid: own for pid, own in found if own}


def own_filter_of(policy: Policy) -> dict[str, OwnFilter]:
    """Returns the user's filter among the connectors of a policy, if there is one."""
    found = [each for each in policy.agent_connectors or () if isinstance(each, OwnFilter)]
    return {"own_filter": found[0]} if found else {}


def merge_changes(worker: RolloutWorker, changes: Changes) -> set[str]:
    """Applies the filter deltas of other workers to a worker; returns the ids of the policies."""
    own = _filters(worker)
    merged = set()
    for policy_id, others in changes.items():
        held = worker.policy_map.handle(policy_id).driver if policy_id in own else None
        if held is None or held.is_frozen:
            continue
        for name, other in others.items():
            own[policy_id][name].apply_changes(other)
        held.apply_filters()
        merged.add(policy_id)
    return merged


def filters_of(worker: RolloutWorker, policy_ids: Collection[str]) -> Changes:
    """Returns copies of some policies' filters."""
    return {
        policy_id: {name: each.snapshot() for name, each in own.items()}
        for policy_id, own in _filters(worker).items()
        if policy_id in policy_ids
    }


def take_filters(worker: RolloutWorker, filters: Changes) -> None:
    """Copies the statistics of other filters; what is pending here stays pending."""
    own = _filters(worker)
    for policy_id in filters.keys() & own.keys():
        for name, other in filters[policy_id].items():
            own[policy_id][name].sync(other)
        worker.policy_map.handle(policy_id).driver.apply_filters()


def play_share(
    worker: RolloutWorker, shares: Mapping[int, int], by_episodes: bool, seconds: float | None
) -> Played:
    """Plays a worker's share of episodes or steps, by worker index, within a time limit."""
    amount = shares.get(worker.worker_index, 0)
    if not amount:
        return Played([], 0)
    return play(worker, amount, by_episodes=by_episodes, seconds=seconds)


# -- to sampling workers -----------------------------------------------------------------------


class News(NamedTuple):
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
    hyper: dict[str, np.ndarray]
    timesteps: dict[str, int]
    filters: Changes
    global_vars: Mapping[str, Any] | None


def news_of(
    worker: RolloutWorker,
    policy_ids: Collection[str],
    global_vars: Mapping[str, Any] | None = None,
    *,
    with_filters: bool = False,
    to_sample: bool = False,
) -> News:
    """Returns the update for some policies; with `inference_only`, inference weights where possible."""
    policies = {pid: worker.policy_map.handle(pid) for pid in policy_ids}
    states = {pid: policy.driver.state for pid, policy in policies.items()}
    given = {
        pid: policy.driver.get_acting_weights() for pid, policy in policies.items() if to_sample
    }
    parts = {pid: part for pid, part in given.items() if part is not None}
    whole = worker.get_weights([pid for pid in policy_ids if pid not in parts])
    return News(
        parts | whole,
        frozenset(parts),
        {pid: state.hyper.copy() for pid, state in states.items() if state is not None},
        {pid: policy.global_timestep for pid, policy in policies.items()},
        filters_of(worker, policy_ids) if with_filters else {},
        global_vars,
    )


def take_news(worker: RolloutWorker, news: News) -> None:
    """Applies an update; policies that do not exist here are ignored."""
    known = {pid: x for pid, x in news.weights.items() if pid in worker.policy_map}
    worker.set_weights(known)
    for policy_id in known:
        policy = worker.policy_map.handle(policy_id)
        policy.global_timestep = news.timesteps[policy_id]
        state = policy.driver.state
        if state is not None and policy_id in news.hyper:
            state.hyper[...] = news.hyper[policy_id]
    take_filters(worker, news.filters)
    if news.global_vars is not None:
        worker.set_global_vars(news.global_vars)


def acting_state(policy: Policy) -> dict[str, Any]:
    """Returns the state of a policy without the parts that only learning needs."""
    return {name: x for name, x in policy.get_state().items() if name not in _FOR_LEARNING}


def add_policy(worker: RolloutWorker, addition: PolicyAddition, roles: MappingAndTrainable) -> None:
    """Adds a policy of the learning worker by its state.

    Args:
        worker: the worker that gets it. If it has the policy, the policy gets the state.
        addition: has the state, from `acting_state`.
        mapping_and_trainable: the mapping and the trained policies.
    """
    worker.policies.apply(addition)
    worker.policies.assign(roles)


def remove_policy(worker: RolloutWorker, policy_id: str, roles: MappingAndTrainable) -> None:
    """Removes a policy if it exists, and sets the mapping and the trained policies."""
    worker.policies.revert(policy_id, roles)


def begin_episodes(worker: RolloutWorker) -> None:
    """Makes a worker start new episodes with its next sample."""
    worker.has_episodes = False


class Alignment(NamedTuple):
    """A snapshot of the learning worker that makes another worker equal to it.

    Attributes:
        states: of all policies by id, from `acting_state`.
        mapping_and_trainable: the mapping and the trained policies.
        global_vars: the counters of the run.
        explore: whether policies explore, by id.
    """

    states: dict[str, dict[str, Any]]
    roles: MappingAndTrainable
    global_vars: dict[str, Any]
    explore: dict[str, bool]


def alignment_of(worker: RolloutWorker) -> Alignment:
    """Returns the snapshot of a worker."""
    policies = dict(worker.policy_map.items())
    states = {pid: acting_state(policy) for pid, policy in policies.items()}
    configs = {pid: policy.config for pid, policy in policies.items()}
    explore = {pid: config["explore"] for pid, config in configs.items() if "explore" in config}
    return Alignment(
        states, worker.policies.mapping_and_trainable, dict(worker.global_vars), explore
    )


def align(worker: RolloutWorker, alignment: Alignment, episodes: int | None = None) -> None:
    """Makes a worker equal to the learning worker.

    Args:
        worker: the worker to change.
        snapshot: the result of `alignment_of`.
        episode_seed: a number from which the seeds of new episodes are derived; None keeps the running
            episodes.
    """
    for policy_id in set(worker.policy_map) - set(alignment.states):
        worker.policies.remove(policy_id)
    worker.set_state({"policy_states": alignment.states, "global_vars": alignment.global_vars})
    for policy_id, explore in alignment.explore.items():
        worker.policy_map.handle(policy_id).config["explore"] = explore
    worker.policies.assign(alignment.roles)
    if episodes is None:
        return
    worker.seeds.used = 1 + episodes
    if worker.config.seed is not None:
        _draw_anew(worker, episodes)
    begin_episodes(worker)


def _draw_anew(worker: RolloutWorker, episodes: int) -> None:
    """Reseeds a worker's generators, so that it does not repeat the random numbers of its seed."""
    seeds = np.random.SeedSequence([worker.config.seed, worker.worker_index, episodes])
    generators = [policy.driver.generator for policy in worker.policy_map.values()]
    drawing = [generator for generator in generators if generator is not None]
    first, *others = seeds.spawn(1 + len(drawing))
    if worker.sampler is not None:
        worker.sampler.rng = np.random.default_rng(first)
    for generator, seed in zip(drawing, others, strict=True):
        generator.bit_generator.state = np.random.default_rng(seed).bit_generator.state
