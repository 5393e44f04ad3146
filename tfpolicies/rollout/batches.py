"""Converts the rows of samplers to postprocessed batches, one for each policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.config.callbacks import DefaultCallbacks, overrides
from tfpolicies.extensions import EXTENSIONS
from tfpolicies.models.filters import ReturnFilter
from tfpolicies.policy.learning_batches import in_sequences, postprocessed
from tfpolicies.rollout.collected import Collected, clipped_rewards
from tfpolicies.rollout.running_returns import RunningReturns
from tfpolicies.rollout.views import Lookback
from tfpolicies.rollout.waiting import Waiting

Who = Mapping[int, tuple[Any, Any]]
"""The episode and the agent of each trajectory, by unroll id."""

_Originals = dict[int, dict[Any, tuple[Any, ...]]]
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
    """

    def __init__(
        self,
        clip_rewards: bool | float | None,
        callbacks: DefaultCallbacks,
        worker: object,
        policies: Mapping[str, Any],
        running: Callable[[], Collection[int]],
        enable_connectors: bool = True,
    ) -> None:
        self._running = running
        self._lookbacks: dict[str, Lookback] = {}  # by policy id
        self._running_returns: dict[str, RunningReturns] = {}
        self._waiting: dict[str, Waiting] = {}
        self._with_ids = enable_connectors
        self._clip_rewards = clip_rewards
        self._callbacks = callbacks
        self._worker = worker
        self._policies = policies

    def batches(
        self, samples: Sequence[Collected], who: Callable[[], Who]
    ) -> dict[str, SampleBatch]:
        """Returns the postprocessed batches by policy id.

        Args:
            samples: the rows of each policy.
            get_owners: returns the episode and agent of each trajectory; called only if a policy or
                callback processes single trajectories.
        """
        for sample in samples:
            sample.prepare(self._clip_rewards, self._returns(sample))
            views = sample.learning.settle_views()
            if views:
                lookback = self._lookbacks.setdefault(sample.policy_id, Lookback())
                batch, running = sample.batch(), set(self._running())
                sample.views = lookback.views(batch, sample.ends, views, running)
        calls_back = overrides(self._callbacks, "on_postprocess_trajectory")
        told = {x.policy_id for x in samples if calls_back or x.learning.postprocesses_trajectories}
        known = who() if told else {}
        waiting = self._waiting
        samples = [
            waiting[sample.policy_id].join(sample) if sample.policy_id in waiting else sample
            for sample in samples
        ]
        originals = self._originals(samples, known) if told else {}
        found = {}
        for sample in samples:
            ready = self._ready(sample)
            if sample.policy_id in told and len(ready.ends):
                batch = self._by_trajectory(ready, originals, known)
            else:
                batch = ready.batch()
            policy = sample.policy
            found[sample.policy_id] = (
                in_sequences(batch, policy) if policy.is_recurrent() else batch
            )
        return found

    def leave_out(self, sample: Collected, barred: np.ndarray) -> list[Collected]:
        """Drops trajectories of a sample whose last row is excluded, bool `[R]`.

        Also drops their rows that were carried over. Returns an empty list if no trajectory is
        left.
        """
        lost = [trajectory for trajectory, rows in sample.trajectories() if barred[rows.stop - 1]]
        for waiting in self._waiting.values() if lost else ():
            waiting.forget(lost)
        return sample.without(barred)

    @property
    def holds_infos(self) -> bool:
        """True if a row that was carried over has a non-empty info."""
        return any(waiting.holds_infos for waiting in self._waiting.values())

    def _ready(self, sample: Collected) -> Collected:
        """Carries over the rows that need later ones; returns the others.

        They are postprocessed, unless the policy postprocesses single trajectories.
        """
        if sample.learning.postprocesses_trajectories:
            return sample
        count = sample.learning.lookahead
        if not count:
            sample.postprocess()
            return sample
        waiting = self._waiting.setdefault(sample.policy_id, Waiting())
        ready = waiting.hold_back(sample, count, set(self._running()))
        sample.postprocess()
        return sample.taking(np.flatnonzero(ready))

    def get_state(self) -> dict[str, Any]:
        """Returns the rows and returns that later samples need, as plain values and arrays."""
        return {
            "views": _states(self._lookbacks),
            "returns": _states(self._running_returns),
            "waiting": _states(self._waiting),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; parts that are missing in it start empty."""
        views, returns = state.get("views", ()), state.get("returns", ())
        self._lookbacks = {name: Lookback.from_state(saved) for name, saved in views}
        self._running_returns = {name: RunningReturns.from_state(saved) for name, saved in returns}
        self._waiting = {
            name: Waiting.from_state(saved, name, self._policies[name])
            for name, saved in state.get("waiting", ())
            if name in self._policies
        }

    def _returns(self, sample: Collected) -> np.ndarray | None:
        """Returns the running returns of a sample's rows, if its rewards are scaled by them."""
        policy = sample.policy
        if not isinstance(policy.driver.filters.get("reward_filter"), ReturnFilter):
            return None
        kept = self._running_returns.setdefault(sample.policy_id, RunningReturns())
        clipped = clipped_rewards(sample.earned, self._clip_rewards)
        return kept.add(
            {**sample.columns, "rewards": clipped},
            sample.ends,
            sample.packing,
            set(self._running()),
            gamma=policy.config.get("gamma", 0.99),
        )

    def _originals(self, samples: Sequence[Collected], who: Who) -> _Originals:
        """Returns the rows before postprocessing: `(policy_id, policy, batch)` per trajectory.

        The id is omitted for code that was written for `enable_connectors=False`.
        """
        found: _Originals = {}
        for sample in samples:
            batch = sample.batch()
            head = (sample.policy_id, sample.policy) if self._with_ids else (sample.policy,)
            for unroll, rows in sample.pieces():
                episode, agent = who[unroll]
                found.setdefault(episode.episode_id, {})[agent] = (*head, batch[rows])
        return found

    def _by_trajectory(self, sample: Collected, originals: _Originals, who: Who) -> SampleBatch:
        """Postprocesses one trajectory at a time, and joins the results."""
        policy, pieces = sample.policy, []
        batch = sample.batch()
        for unroll, rows in sample.pieces():
            episode, agent = who[unroll]
            all_agents, piece = originals[episode.episode_id], batch[rows]
            if sample.learning.postprocesses_trajectories:
                others = {other: x for other, x in all_agents.items() if other != agent}
                piece = postprocessed(policy, piece, others, episode)
            with EXTENSIONS.edit_batch(piece, policy.observation_space):
                self._callbacks.on_postprocess_trajectory(
                    worker=self._worker,
                    episode=episode,
                    agent_id=agent,
                    policy_id=sample.policy_id,
                    policies=self._policies,
                    postprocessed_batch=piece,
                    original_batches=all_agents,
                )
            pieces.append(piece)
        joined = cast(SampleBatch, concat_samples(pieces))
        joined.num_grad_updates = policy.num_grad_updates
        return joined


def _states(by_policy: Mapping[str, Any]) -> list[list[Any]]:
    return [[name, each.get_state()] for name, each in by_policy.items()]
