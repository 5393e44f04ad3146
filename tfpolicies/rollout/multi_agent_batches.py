"""From the rows of many agents to postprocessed batches, one for each policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.config.callbacks import DefaultCallbacks, overrides
from tfpolicies.models.spaces import nest
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.learning_batches import in_sequences
from tfpolicies.rollout.columns import (
    clipped_rewards,
    nested_actions,
    original,
    postprocessed,
    remembered,
)
from tfpolicies.rollout.multi_agent_rows import PolicyRows

Who = Mapping[int, tuple[Any, Any]]


@dataclass(eq=False)
class Sample:
    """The rows of one policy that are handed out, trajectory after trajectory.

    Attributes:
        rows: whose they are.
        obs: leaves `[R, ...]`.
        new_obs: likewise.
        columns: the other columns `[R, ...]`; rewards are the environment's.
        ends: bool `[R]`: the last row of each trajectory.
    """

    rows: PolicyRows
    obs: list[np.ndarray]
    new_obs: list[np.ndarray]
    columns: dict[str, np.ndarray]
    ends: np.ndarray

    def __post_init__(self) -> None:
        self._earned = self.columns["rewards"]

    def batch(self) -> SampleBatch:
        """Returns the rows as they are now."""
        rows, policy = self.rows, self.rows.policy
        space, actions = policy.observation_space, policy.action_space
        batch = SampleBatch(
            {
                "obs": nest(space, self.obs),
                "new_obs": nest(space, self.new_obs),
                **nested_actions(dict(self.columns), rows.actions, actions),
            }
        )
        batch.num_grad_updates = policy.num_grad_updates
        return batch

    def pieces(self, batch: SampleBatch) -> Iterator[tuple[int, SampleBatch]]:
        """Yields the unroll id and the batch of each trajectory."""
        stops = (np.flatnonzero(self.ends) + 1).tolist()
        for start, stop in zip([0, *stops], stops, strict=False):
            yield int(self.columns["unroll_id"][start]), batch[start:stop]

    def prepare(self, clip_rewards: bool | float | None) -> None:
        """Takes the rows into the filters, and scales and clips the rewards."""
        policy, columns = self.rows.policy, self.columns
        policy.learning.observe(
            [leaf[None] for leaf in self.obs], {name: x[None] for name, x in columns.items()}
        )
        self.obs, self.new_obs = ([*policy.learning.seen(x)] for x in (self.obs, self.new_obs))
        columns["rewards"] = policy.learning.scaled(clipped_rewards(self._earned, clip_rewards))

    def postprocess(self) -> None:
        """Adds the policy's columns for all trajectories at once."""
        policy, columns = self.rows.policy, self.columns
        packing = Packing.of(self.ends)
        open_rows = np.flatnonzero(self.ends & ~columns["terminateds"])
        after = [*self.new_obs, *remembered(policy, columns, self._earned, self.rows.actions)]
        ends = packing.pack(self.ends)
        ends[:, -1] = True
        fragments = Fragments(
            PackedColumns(columns, packing),
            ends,
            policy,
            packing.places(open_rows),
            [column[open_rows] for column in after],
        )
        policy.postprocess_fragments(fragments)
        columns.update({name: packing.unpack(x) for name, x in fragments.added.items()})
        if fragments.reached is not None:
            later = packing.rows_at(packing.unpack(fragments.reached))
            self.new_obs = [leaf[later] for leaf in self.new_obs]


class Packing:
    """Where the rows of trajectories stand in an array `[N, T]` that keeps each one together.

    T is the length of the longest trajectory; shorter ones follow each other in a row of the array
    as far as they fit.

    >>> packing = Packing.of(np.array([0, 0, 1, 1, 1], bool))
    >>> packing.pack(np.array([1, 2, 3, 4, 5]))
    array([[1, 2, 3],
           [4, 5, 0]])
    """

    def __init__(self, shape: tuple[int, int], where: np.ndarray | None, base: np.ndarray) -> None:
        self.shape = shape
        self._where = where  # int [R] into the flat array; None: the rows fill it in order
        self._base = base  # int [R]: where the array's row begins that a row stands in

    @classmethod
    def of(cls, ends: np.ndarray) -> Packing:
        """Returns the packing of trajectories whose last rows are marked, bool `[R]`."""
        stops = np.flatnonzero(ends) + 1
        lengths = np.diff(stops, prepend=0)
        width = int(lengths.max())
        if (lengths == width).all():
            base = np.repeat(np.arange(len(lengths)) * width, width)
            return cls((len(lengths), width), None, base)
        starts, row, used = [], 0, 0
        for length in lengths.tolist():
            if used + length > width:
                row, used = row + 1, 0
            starts.append(row * width + used)
            used += length
        where = np.repeat(np.array(starts) - (stops - lengths), lengths) + np.arange(len(ends))
        return cls((row + 1, width), where, where // width * width)

    def pack(self, column: np.ndarray) -> np.ndarray:
        """Returns a column `[R, ...]` as `[N, T, ...]`; zeros fill it up."""
        if self._where is None:
            return column.reshape(*self.shape, *column.shape[1:])
        packed = np.zeros((self.shape[0] * self.shape[1], *column.shape[1:]), column.dtype)
        packed[self._where] = column
        return packed.reshape(*self.shape, *column.shape[1:])

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """Returns what stands where the rows stand, `[R, ...]` of `[N, T, ...]`."""
        flat = packed.reshape(-1, *packed.shape[2:])
        return flat if self._where is None else flat[self._where]

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places `(n, t)` of rows, int `[K]` each."""
        where = rows if self._where is None else self._where[rows]
        row, column = np.divmod(where, self.shape[1])
        return row, column

    def rows_at(self, steps: np.ndarray) -> np.ndarray:
        """Returns, for each row, which row stands at step `steps` of its place in the array."""
        flat = self._base + steps
        if self._where is None:
            return flat
        row_at = np.zeros(self.shape[0] * self.shape[1], np.int64)
        row_at[self._where] = np.arange(len(self._where))
        return row_at[flat]


class PackedColumns(Mapping[str, np.ndarray]):
    """Columns `[R, ...]` that are packed to `[N, T, ...]` when they are read.

    Args:
        columns: by name.
        packing: where their rows stand.
    """

    def __init__(self, columns: Mapping[str, np.ndarray], packing: Packing) -> None:
        self._columns = columns
        self._packing = packing

    def __getitem__(self, name: str) -> np.ndarray:
        return self._packing.pack(self._columns[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class Postprocessor:
    """Makes the batches of a sample, one for each policy that has rows in it.

    Args:
        clip_rewards: None, True (the sign) or a bound.
        callbacks: the user's.
        worker: passed to callbacks.
        policies: by id; passed to callbacks.
        enable_connectors: whether original batches are `(policy_id, policy, batch)` or, if False,
            `(policy, batch)`.
    """

    def __init__(
        self,
        clip_rewards: bool | float | None,
        callbacks: DefaultCallbacks,
        worker: Any,
        policies: Mapping[str, Any],
        enable_connectors: bool = True,
    ) -> None:
        self._with_ids = enable_connectors
        self._clip_rewards = clip_rewards
        self._callbacks = callbacks
        self._worker = worker
        self._policies = policies

    def batches(self, samples: list[Sample], who: Who) -> dict[str, SampleBatch]:
        """Returns the postprocessed batches by policy id.

        Args:
            samples: the rows of each policy.
            who: by unroll id, the episode and the agent of a trajectory.
        """
        for sample in samples:
            sample.prepare(self._clip_rewards)
        calls_back = overrides(self._callbacks, "on_postprocess_trajectory")
        one_by_one = [
            sample for sample in samples if calls_back or sample.rows.policy.learning.by_trajectory
        ]
        originals = self._originals(samples, who) if one_by_one else {}
        found = {}
        for sample in samples:
            policy = sample.rows.policy
            if not policy.learning.by_trajectory:
                sample.postprocess()
            batch = sample.batch()
            if sample in one_by_one:
                batch = self._by_trajectory(sample, batch, originals, who)
            recurrent = policy.is_recurrent()
            found[sample.rows.policy_id] = in_sequences(batch, policy) if recurrent else batch
        return found

    def _originals(self, samples: list[Sample], who: Who) -> dict[int, dict[Any, tuple[Any, ...]]]:
        """Returns by episode and agent what `original` makes of the rows as collected."""
        found: dict[int, dict[Any, tuple[Any, ...]]] = {}
        for sample in samples:
            rows = sample.rows
            for unroll, piece in sample.pieces(sample.batch()):
                episode, agent = who[unroll]
                of_episode = found.setdefault(episode.episode_id, {})
                of_episode[agent] = original(
                    rows.policy_id, rows.policy, piece, with_id=self._with_ids
                )
        return found

    def _by_trajectory(
        self,
        sample: Sample,
        batch: SampleBatch,
        originals: dict[int, dict[Any, tuple[Any, ...]]],
        who: Who,
    ) -> SampleBatch:
        """Calls what works on one trajectory at a time, and joins the results."""
        policy, made = sample.rows.policy, []
        for unroll, rows in sample.pieces(batch):
            episode, agent = who[unroll]
            all_agents, piece = originals[episode.episode_id], rows
            if policy.learning.by_trajectory:
                others = {other: x for other, x in all_agents.items() if other != agent}
                piece = postprocessed(policy, piece, others, episode)
            self._callbacks.on_postprocess_trajectory(
                worker=self._worker,
                episode=episode,
                agent_id=agent,
                policy_id=sample.rows.policy_id,
                policies=self._policies,
                postprocessed_batch=piece,
                original_batches=all_agents,
            )
            made.append(piece)
        joined = cast(SampleBatch, concat_samples(made))
        joined.num_grad_updates = batch.num_grad_updates
        return joined
