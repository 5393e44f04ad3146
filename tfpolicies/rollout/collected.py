"""The rows of one policy that a sampler returns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.batch.leaves import concatenate_columns, map_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import UsageError
from tfpolicies.models.ports import Port, View, plain_leaves
from tfpolicies.models.spaces import nest
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.packing import PackedColumns, Packing

Trajectory = tuple[int, ...]
"""The episode id and the agent index of a trajectory."""


@dataclass(eq=False)
class Collected:
    """The rows of one policy, trajectory after trajectory.

    Attributes:
        policy_id: its id.
        policy: the policy of that id.
        actions: the leaves of its actions.
        obs: leaves `[R, ...]`.
        new_obs: leaves `[R, ...]` of the next observations.
        columns: the other columns `[R, ...]`; rewards are the environment's.
        ends: bool `[R]`: the last row of each trajectory.
        env_rewards: `[R]`, the environment's rewards.
        learning: the learning part of the policy's driver.
        shape: `(N, T)` of the array that the rows fill in order; None if trajectories have to be
            packed into one.
        views: additional columns `[R, ...]` of view requirements, nested.
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
        self.learning = self.policy.driver.learning

    def batch(self) -> SampleBatch:
        """Returns the current rows as a batch."""
        policy = self.policy
        space, action_space = policy.observation_space, policy.action_space
        views = policy.driver.acting.input_views
        batch = SampleBatch(
            {
                "obs": policy._as_given(nest(space, self.obs)),
                "new_obs": policy._as_given(nest(space, self.new_obs)),
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
        """Drops trajectories whose last row is excluded, bool `[R]`; returns one or no sample."""
        pieces = [rows for _, rows in self.pieces() if not barred[rows.stop - 1]]
        if not pieces:
            return []
        return [self.taking(np.concatenate([np.arange(x.start, x.stop) for x in pieces]))]

    def taking(self, rows: np.ndarray) -> Collected:
        """Selects rows by their numbers; a trajectory ends with its last selected row."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        unrolls = columns["unroll_id"]
        taken = replace(
            self,
            obs=[leaf[rows] for leaf in self.obs],
            new_obs=[leaf[rows] for leaf in self.new_obs],
            columns=columns,
            ends=np.append(unrolls[1:] != unrolls[:-1], True)[: len(rows)],
            shape=None,
            views={name: map_leaves(lambda x: x[rows], view) for name, view in self.views.items()},
        )
        taken.earned = self.earned[rows]
        return taken

    def followed_by(self, other: Collected) -> Collected:
        """Concatenates two sets of rows with the same columns."""
        joined = replace(
            other,
            obs=[np.concatenate(pair) for pair in zip(self.obs, other.obs, strict=True)],
            new_obs=[np.concatenate(x) for x in zip(self.new_obs, other.new_obs, strict=True)],
            columns={k: np.concatenate([self.columns[k], x]) for k, x in other.columns.items()},
            ends=np.concatenate([self.ends, other.ends]),
            shape=None,
            views={k: concatenate_columns(k, [self.views[k], x]) for k, x in other.views.items()},
        )
        joined.earned = np.concatenate([self.earned, other.earned])
        return joined

    def trajectories(self) -> Iterator[tuple[Trajectory, slice]]:
        """Yields the episode id and agent index, and the rows, of each trajectory."""
        columns = self.columns
        for _, rows in self.pieces():
            yield tuple(int(columns[x][rows.start]) for x in ("eps_id", "agent_index")), rows

    def prepare(self, clip_rewards: bool | float | None, returns: np.ndarray | None) -> None:
        """Updates the filters with the rows, and scales and clips the rewards.

        Args:
            clip_rewards: None, True (the sign) or a bound.
            returns: running returns `[R]`, if rewards are scaled by them.
        """
        learning, columns = self.learning, self.columns
        seen = columns if returns is None else {**columns, "rewards": returns}
        learning.observe(
            [leaf[None] for leaf in self.obs], {name: x[None] for name, x in seen.items()}
        )
        self.obs, self.new_obs = (
            [*learning.normalize_observations(x)] for x in (self.obs, self.new_obs)
        )
        columns["rewards"] = learning.scale_rewards(clipped_rewards(self.earned, clip_rewards))

    @property
    def packing(self) -> Packing:
        """The position of each row in an array `[N, T]`."""
        return Packing.of(self.ends) if self.shape is None else Packing(self.shape)

    def postprocess(self) -> None:
        """Adds the policy's columns for all trajectories at once."""
        policy, columns = self.policy, self.columns
        packing = self.packing
        open_rows = np.flatnonzero(self.ends & ~columns["terminateds"])
        after = [leaf[open_rows] for leaf in self.new_obs]
        if views := policy.driver.acting.views:
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


# -- columns ------------------------------------------------------------------------------------


def clipped_rewards(rewards: np.ndarray, clip: bool | float | None) -> np.ndarray:
    """Returns rewards for learning: their signs (True), clipped (a number), or unchanged.

    >>> clipped_rewards(np.array([-3.0, 0.5]), True), clipped_rewards(np.array([-3.0, 0.5]), 1.0)
    (array([-1.,  1.]), array([-1. ,  0.5]))
    """
    if not clip:
        return rewards
    result: np.ndarray = np.sign(rewards) if clip is True else np.clip(rewards, -clip, clip)
    return result


def require_same_columns(policy: Policy, kept: Collection[str], given: Collection[str]) -> None:
    """Checks that acting returns the same columns as before.

    Args:
        policy: acts.
        expected: the names of the existing columns.
        columns: the names of the new columns.

    Raises:
        UsageError: if they differ: rows of one batch have the same columns.
    """
    if set(kept) != set(given):
        raise UsageError(
            f"{type(policy).__name__} returned the columns {sorted(given)} when it acted, but "
            f"{sorted(kept)} before. Return the same extras in every call."
        )


def nested_columns(
    columns: dict[str, Any], ports: Sequence[Port], space: gym.Space[Any], views: Sequence[View]
) -> dict[str, Any]:
    """Joins the columns of leaves, for actions and for views, into nested columns, in place."""
    if len(ports) > 1 or ports[0].path:
        columns["actions"] = nest(space, [columns.pop(port.name) for port in ports])
    for view in views:
        for each in (view, view.following):
            if each is not None and (len(each.ports) > 1 or each.ports[0].path):
                columns[each.name] = each.nested([columns.pop(port.name) for port in each.ports])
    return columns


def seen_after(
    views: Sequence[View],
    columns: Mapping[str, np.ndarray],
    rows: np.ndarray,
    **sources: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Returns the leaves of views one step after some rows, `[K, ...]` each.

    Args:
        views: the views that acting reads.
        columns: the outputs of acting.
        rows: int `[K]`.
        **sources: the leaves of `obs`, `actions`, `rewards`, and of `new_obs`, `[R, ...]` each.
    """
    taken = {name: [leaf[rows] for leaf in leaves] for name, leaves in sources.items()}
    found = []
    for view in views:
        seen = [columns[port.name][rows] for port in (view.following or view).ports]
        found += view.reached(seen, taken[view.source], taken["new_obs"])
    return found
