"""From the rows that samplers collected to postprocessed batches, one for each policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np

from tfpolicies import ported
from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.config.callbacks import DefaultCallbacks, overrides
from tfpolicies.models.filters import ReturnFilter
from tfpolicies.models.ports import Port, plain_leaves
from tfpolicies.models.spaces import nest
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.learning_batches import in_sequences
from tfpolicies.rollout.columns import (
    clipped_rewards,
    nested_columns,
    postprocessed,
    seen_after,
)
from tfpolicies.rollout.packing import PackedColumns, Packing
from tfpolicies.rollout.running_returns import RunningReturns
from tfpolicies.rollout.views import Lookback

Who = Mapping[int, tuple[Any, Any]]
"""The episode and the agent of each trajectory, by unroll id."""

_Kept = TypeVar("_Kept", Lookback, RunningReturns)

_Originals = dict[int, dict[Any, tuple[Any, ...]]]
"""What postprocessing is told of trajectories as they were collected, by episode id and agent."""


@dataclass(eq=False)
class Collected:
    """The rows of one policy that are handed out, trajectory after trajectory.

    Attributes:
        policy_id: whose they are.
        policy: the policy of that id.
        actions: the leaves of its actions.
        obs: leaves `[R, ...]`.
        new_obs: likewise.
        columns: the other columns `[R, ...]`; rewards are the environment's.
        ends: bool `[R]`: the last row of each trajectory.
        earned: `[R]`, the environment's rewards.
        learning: the policy's part of that name.
        shape: `(N, T)` of the array that the rows fill in order; None if trajectories have to be
            packed into one.
        views: columns `[R, ...]` that are required besides, nested.
    """

    policy_id: str
    policy: Any
    actions: Sequence[Port]
    obs: list[np.ndarray]
    new_obs: list[np.ndarray]
    columns: dict[str, np.ndarray]
    ends: np.ndarray
    shape: tuple[int, int] | None = None
    views: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.earned = self.columns["rewards"]
        self.learning = self.policy.learning

    def batch(self) -> SampleBatch:
        """Returns the rows as they are now."""
        policy = self.policy
        space, action_space = policy.observation_space, policy.action_space
        views = policy.acting.given
        batch = SampleBatch(
            {
                "obs": nest(space, self.obs),
                "new_obs": nest(space, self.new_obs),
                **nested_columns(dict(self.columns), self.actions, action_space, views),
                **self.views,
            }
        )
        batch.num_grad_updates = policy.num_grad_updates
        return batch

    def pieces(self) -> Iterator[tuple[int, slice]]:
        """Yields the unroll id and the rows of each trajectory."""
        stops = (np.flatnonzero(self.ends) + 1).tolist()
        for start, stop in zip([0, *stops], stops, strict=False):
            yield int(self.columns["unroll_id"][start]), slice(start, stop)

    def without(self, barred: np.ndarray) -> list[Collected]:
        """Returns the trajectories whose last row is not barred, bool `[R]`; none if all are."""
        pieces = [rows for _, rows in self.pieces() if not barred[rows.stop - 1]]
        if not pieces:
            return []
        kept = np.concatenate([np.arange(rows.start, rows.stop) for rows in pieces])
        return [
            replace(
                self,
                obs=[leaf[kept] for leaf in self.obs],
                new_obs=[leaf[kept] for leaf in self.new_obs],
                columns={name: column[kept] for name, column in self.columns.items()},
                ends=self.ends[kept],
                shape=None,
            )
        ]

    def prepare(self, clip_rewards: bool | float | None, returns: np.ndarray | None) -> None:
        """Takes the rows into the filters, and scales and clips the rewards.

        Args:
            clip_rewards: None, True (the sign) or a bound.
            returns: `[R]`, those so far, where rewards are scaled by these.
        """
        learning, columns = self.learning, self.columns
        seen = columns if returns is None else {**columns, "rewards": returns}
        learning.observe(
            [leaf[None] for leaf in self.obs], {name: x[None] for name, x in seen.items()}
        )
        self.obs, self.new_obs = ([*learning.seen(x)] for x in (self.obs, self.new_obs))
        columns["rewards"] = learning.scaled(clipped_rewards(self.earned, clip_rewards))

    @property
    def packing(self) -> Packing:
        """Where the rows stand in an array `[N, T]`."""
        return Packing.of(self.ends) if self.shape is None else Packing(self.shape)

    def postprocess(self) -> None:
        """Adds the policy's columns for all trajectories at once."""
        policy, columns = self.policy, self.columns
        packing = self.packing
        open_rows = np.flatnonzero(self.ends & ~columns["terminateds"])
        after = [leaf[open_rows] for leaf in self.new_obs]
        if views := policy.acting.views:
            plain = plain_leaves(policy.observation_space)
            after += seen_after(
                views,
                columns,
                open_rows,
                obs=[self.obs[i] for i in plain],
                new_obs=[self.new_obs[i] for i in plain],
                actions=[columns[port.name] for port in self.actions],
                rewards=[self.earned],
            )
        after += [x[open_rows] for name, x in columns.items() if name.startswith("state_out_")]
        ends = packing.pack(self.ends)
        ends[:, -1] = True
        fragments = Fragments(
            PackedColumns(columns, packing),
            ends,
            policy,
            packing.places(open_rows),
            after,
        )
        policy.postprocess_fragments(fragments)
        columns.update({name: packing.unpack(x) for name, x in fragments.added.items()})
        if fragments.reached is not None:
            later = packing.rows_at(packing.unpack(fragments.reached))
            self.new_obs = [leaf[later] for leaf in self.new_obs]


class Postprocessor:
    """Makes the batches of a sample, one for each policy that has rows in it.

    Args:
        clip_rewards: None, True (the sign) or a bound.
        callbacks: the user's.
        worker: passed to callbacks.
        policies: by id; passed to callbacks.
        running: returns the ids of episodes of which rows are still to come.
        enable_connectors: whether original batches are `(policy_id, policy, batch)` or, if False,
            `(policy, batch)`.
    """

    def __init__(
        self,
        clip_rewards: bool | float | None,
        callbacks: DefaultCallbacks,
        worker: Any,
        policies: Mapping[str, Any],
        running: Callable[[], Collection[int]],
        enable_connectors: bool = True,
    ) -> None:
        self._running = running
        self._lookbacks: dict[str, Lookback] = {}  # by policy id
        self._running_returns: dict[str, RunningReturns] = {}  # likewise
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
            who: asked where somebody works on single trajectories.
        """
        for sample in samples:
            sample.prepare(self._clip_rewards, self._returns(sample))
            views = sample.learning.settled_views()
            if views:
                lookback = self._lookbacks.setdefault(sample.policy_id, Lookback())
                batch, running = sample.batch(), set(self._running())
                sample.views = lookback.views(batch, sample.ends, views, running)
        calls_back = overrides(self._callbacks, "on_postprocess_trajectory")
        one_by_one = [x for x in samples if calls_back or x.learning.by_trajectory]
        known = who() if one_by_one else {}
        originals = self._originals(samples, known) if one_by_one else {}
        found = {}
        for sample in samples:
            policy = sample.policy
            if not sample.learning.by_trajectory:
                sample.postprocess()
            if sample in one_by_one:
                batch = self._by_trajectory(sample, originals, known)
            else:
                batch = sample.batch()
            recurrent = policy.is_recurrent()
            found[sample.policy_id] = in_sequences(batch, policy) if recurrent else batch
        return found

    def get_state(self) -> dict[str, Any]:
        """Returns what later samples look back on, `views` and `returns`, as values and arrays."""
        kept = {"views": self._lookbacks, "returns": self._running_returns}
        return {
            what: [[name, each.get_state()] for name, each in by_policy.items()]  # type: ignore[attr-defined]
            for what, by_policy in kept.items()
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; what is missing in it begins anew."""
        self._lookbacks = _restored(Lookback, state.get("views", ()))
        self._running_returns = _restored(RunningReturns, state.get("returns", ()))

    def _returns(self, sample: Collected) -> np.ndarray | None:
        """Returns the returns so far of a sample's rows, where its rewards are scaled by these."""
        policy = sample.policy
        if not isinstance(policy.holding.filters.get("reward_filter"), ReturnFilter):
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
        """Returns the rows as collected: `(policy_id, policy, batch)` for each trajectory.

        The id is left out for code that was written for `enable_connectors=False`.
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
        """Calls what works on one trajectory at a time, and joins the results."""
        policy, pieces = sample.policy, []
        batch = None if sample.learning.by_trajectory else sample.batch()
        for unroll, rows in sample.pieces():
            episode, agent = who[unroll]
            all_agents = originals[episode.episode_id]
            if batch is None:
                others = {other: x for other, x in all_agents.items() if other != agent}
                piece = postprocessed(policy, all_agents[agent][-1], others, episode)
            else:
                piece = batch[rows]
            with ported.shown(piece, policy.observation_space):
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


def _restored(kind: type[_Kept], states: Sequence[Any]) -> dict[str, _Kept]:
    found = {name: kind() for name, _ in states}
    for name, saved in states:
        found[name].set_state(saved)
    return found
