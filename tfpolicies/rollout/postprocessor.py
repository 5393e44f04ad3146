"""Converts the rows of samplers to postprocessed batches, one for each policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tfpolicies.base.extensions import EXTENSIONS
from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.config.callbacks import DefaultCallbacks, overrides
from tfpolicies.models.mean_std_filters import ReturnFilter
from tfpolicies.policy.batch_utils import make_sequence_batch, run_postprocessing
from tfpolicies.rollout.n_step_carryover import NStepCarryover
from tfpolicies.rollout.rollout_rows import RolloutRows, apply_reward_clipping
from tfpolicies.rollout.running_returns import RunningReturns
from tfpolicies.rollout.view_columns import Lookback

TrajectoryOwners = Mapping[int, tuple[Any, Any]]
"""The episode and the agent of each trajectory, by unroll id."""

_OriginalBatches = dict[int, dict[Any, tuple[Any, ...]]]
"""Batches of trajectories before postprocessing, by episode id and agent."""


class Postprocessor:
    """Creates the batches of a sample, one for each policy that has rows in it.

    Args:
        clip_rewards: None, True (the sign) or a bound.
        callbacks: the user's.
        worker: passed to callbacks.
        policies: by id; passed to callbacks.
        get_running_ids: returns the ids of episodes that have further rows.
        enable_connectors: whether original batches are `(policy_id, policy, batch)` or, if False,
            `(policy, batch)`.
        observes: whether the rows update the running statistics of policies.
    """

    def __init__(
        self,
        clip_rewards: bool | float | None,
        callbacks: DefaultCallbacks,
        worker: object,
        policies: Mapping[str, Any],
        get_running_ids: Callable[[], Collection[int]],
        enable_connectors: bool = True,
        *,
        observes: bool = True,
    ) -> None:
        self._observes = observes
        self._get_running_ids = get_running_ids
        self._lookbacks: dict[str, Lookback] = {}  # by policy id
        self._running_returns: dict[str, RunningReturns] = {}
        self._carryovers: dict[str, NStepCarryover] = {}
        self._includes_policy_ids = enable_connectors
        self._clip_rewards = clip_rewards
        self._callbacks = callbacks
        self._worker = worker
        self._policies = policies

    def make_batches(
        self, samples: Sequence[RolloutRows], get_owners: Callable[[], TrajectoryOwners]
    ) -> dict[str, SampleBatch]:
        """Returns the postprocessed batches by policy id.

        Args:
            samples: the rows of each policy.
            get_owners: returns the episode and agent of each trajectory; called only if a policy or
                callback processes single trajectories.
        """
        for sample in samples:
            sample.prepare(
                self._clip_rewards, self._update_returns(sample), observes=self._observes
            )
            views = sample.learning.freeze_views()
            if views:
                lookback = self._lookbacks.setdefault(sample.policy_id, Lookback())
                batch, running_ids = sample.to_batch(), set(self._get_running_ids())
                sample.views = lookback.make_views(batch, sample.ends, views, running_ids)
        has_callback = overrides(self._callbacks, "on_postprocess_trajectory")
        trajectory_policy_ids = {
            x.policy_id for x in samples if has_callback or x.learning.postprocesses_trajectories
        }
        owners = get_owners() if trajectory_policy_ids else {}
        carryovers = self._carryovers
        samples = [
            carryovers[sample.policy_id].prepend_to(sample)
            if sample.policy_id in carryovers
            else sample
            for sample in samples
        ]
        originals = self._collect_originals(samples, owners) if trajectory_policy_ids else {}
        result = {}
        for sample in samples:
            ready = self._take_ready(sample)
            if sample.policy_id in trajectory_policy_ids and len(ready.ends):
                batch = self._postprocess_trajectories(ready, originals, owners)
            else:
                batch = ready.to_batch()
            policy = sample.policy
            result[sample.policy_id] = (
                make_sequence_batch(batch, policy) if policy.is_recurrent() else batch
            )
        return result

    def exclude(self, sample: RolloutRows, excluded: np.ndarray) -> list[RolloutRows]:
        """Drops trajectories of a sample whose last row is excluded, bool `[R]`.

        Also drops their rows that were carried over. Returns an empty list if no trajectory is
        left.
        """
        excluded_trajectories = [
            trajectory for trajectory, rows in sample.iter_trajectories() if excluded[rows.stop - 1]
        ]
        for carryover in self._carryovers.values() if excluded_trajectories else ():
            carryover.drop(excluded_trajectories)
        return sample.drop_excluded(excluded)

    @property
    def has_infos(self) -> bool:
        """True if a row that was carried over has a non-empty info."""
        return any(carryover.has_infos for carryover in self._carryovers.values())

    def _take_ready(self, sample: RolloutRows) -> RolloutRows:
        """Carries over the rows that need later ones; returns the others.

        They are postprocessed, unless the policy postprocesses single trajectories.
        """
        if sample.learning.postprocesses_trajectories:
            return sample
        count = sample.learning.lookahead
        if not count:
            sample.postprocess()
            return sample
        carryover = self._carryovers.setdefault(sample.policy_id, NStepCarryover())
        ready = carryover.hold_last_rows(sample, count, set(self._get_running_ids()))
        sample.postprocess()
        return sample.take(np.flatnonzero(ready))

    def get_state(self) -> dict[str, Any]:
        """Returns the rows and returns that later samples need, as plain values and arrays."""
        return {
            "views": _get_states(self._lookbacks),
            "returns": _get_states(self._running_returns),
            "waiting": _get_states(self._carryovers),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; parts that are missing in it start empty."""
        views, returns = state.get("views", ()), state.get("returns", ())
        self._lookbacks = {name: Lookback.from_state(saved) for name, saved in views}
        self._running_returns = {name: RunningReturns.from_state(saved) for name, saved in returns}
        self._carryovers = {
            name: NStepCarryover.from_state(saved, name, self._policies[name])
            for name, saved in state.get("waiting", ())
            if name in self._policies
        }

    def _update_returns(self, sample: RolloutRows) -> np.ndarray | None:
        """Returns the running returns of a sample's rows, if its rewards are scaled by them."""
        policy = sample.policy
        if not isinstance(policy.driver.filters.get("reward_filter"), ReturnFilter):
            return None
        running_returns = self._running_returns.setdefault(sample.policy_id, RunningReturns())
        clipped = apply_reward_clipping(sample.env_rewards, self._clip_rewards)
        return running_returns.add(
            {**sample.columns, "rewards": clipped},
            sample.ends,
            sample.packing,
            set(self._get_running_ids()),
            gamma=policy.config.get("gamma", 0.99),
        )

    def _collect_originals(
        self, samples: Sequence[RolloutRows], owners: TrajectoryOwners
    ) -> _OriginalBatches:
        """Returns the rows before postprocessing: `(policy_id, policy, batch)` per trajectory.

        The id is omitted for code that was written for `enable_connectors=False`.
        """
        result: _OriginalBatches = {}
        for sample in samples:
            batch = sample.to_batch()
            prefix = (
                (sample.policy_id, sample.policy) if self._includes_policy_ids else (sample.policy,)
            )
            for unroll, rows in sample.iter_unrolls():
                episode, agent = owners[unroll]
                result.setdefault(episode.episode_id, {})[agent] = (*prefix, batch[rows])
        return result

    def _postprocess_trajectories(
        self, sample: RolloutRows, originals: _OriginalBatches, owners: TrajectoryOwners
    ) -> SampleBatch:
        """Postprocesses one trajectory at a time, and joins the results."""
        policy, results = sample.policy, []
        batch = sample.to_batch()
        for unroll, rows in sample.iter_unrolls():
            episode, agent = owners[unroll]
            all_agents, trajectory_batch = originals[episode.episode_id], batch[rows]
            if sample.learning.postprocesses_trajectories:
                other_agents = {
                    other_agent: x for other_agent, x in all_agents.items() if other_agent != agent
                }
                trajectory_batch = run_postprocessing(
                    policy, trajectory_batch, other_agents, episode
                )
            with EXTENSIONS.edit_batch(trajectory_batch, policy.observation_space):
                self._callbacks.on_postprocess_trajectory(
                    worker=self._worker,
                    episode=episode,
                    agent_id=agent,
                    policy_id=sample.policy_id,
                    policies=self._policies,
                    postprocessed_batch=trajectory_batch,
                    original_batches=all_agents,
                )
            results.append(trajectory_batch)
        joined = cast(SampleBatch, concat_samples(results))
        joined.num_grad_updates = policy.num_grad_updates
        return joined


def _get_states(by_policy: Mapping[str, Any]) -> list[list[Any]]:
    return [[name, component.get_state()] for name, component in by_policy.items()]
