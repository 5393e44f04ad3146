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
from tfpolicies.models.ports import PolicyPort, ViewInput, get_unmasked_leaf_indices
from tfpolicies.models.spaces import unflatten
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.trajectory_packing import PackedColumns, Packing

Trajectory = tuple[int, ...]
"""The episode id and the agent index of a trajectory."""


@dataclass(eq=False)
class RolloutRows:
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
    actions: Sequence[PolicyPort]
    obs: list[np.ndarray]
    new_obs: list[np.ndarray]
    columns: dict[str, np.ndarray]
    ends: np.ndarray
    shape: tuple[int, int] | None = None
    views: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.env_rewards = self.columns["rewards"]
        self.learning = self.policy.driver.learning

    def to_batch(self) -> SampleBatch:
        policy = self.policy
        space, action_space = policy.observation_space, policy.action_space
        views = policy.driver.acting.input_views
        batch = SampleBatch(
            {
                "obs": policy._convert_observations(unflatten(space, self.obs)),
                "new_obs": policy._convert_observations(unflatten(space, self.new_obs)),
                **nest_columns(dict(self.columns), self.actions, action_space, views),
                **self.views,
            }
        )
        batch.num_grad_updates = policy.num_grad_updates
        return batch

    def iter_unrolls(self) -> Iterator[tuple[int, slice]]:
        stops = (np.flatnonzero(self.ends) + 1).tolist()
        for start, stop in zip([0, *stops], stops, strict=False):
            yield int(self.columns["unroll_id"][start]), slice(start, stop)

    def drop_excluded(self, excluded: np.ndarray) -> list[RolloutRows]:
        """Drops trajectories whose last row is excluded, bool `[R]`; returns one or no sample."""
        remaining = [rows for _, rows in self.iter_unrolls() if not excluded[rows.stop - 1]]
        if not remaining:
            return []
        return [self.take(np.concatenate([np.arange(x.start, x.stop) for x in remaining]))]

    def take(self, rows: np.ndarray) -> RolloutRows:
        """Selects rows by their numbers; a trajectory ends with its last selected row."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        unroll_ids = columns["unroll_id"]
        result = replace(
            self,
            obs=[leaf[rows] for leaf in self.obs],
            new_obs=[leaf[rows] for leaf in self.new_obs],
            columns=columns,
            ends=np.append(unroll_ids[1:] != unroll_ids[:-1], True)[: len(rows)],
            shape=None,
            views={name: map_leaves(lambda x: x[rows], view) for name, view in self.views.items()},
        )
        result.env_rewards = self.env_rewards[rows]
        return result

    def concatenate(self, other: RolloutRows) -> RolloutRows:
        """Concatenates two sets of rows with the same columns."""
        result = replace(
            other,
            obs=[np.concatenate(pair) for pair in zip(self.obs, other.obs, strict=True)],
            new_obs=[np.concatenate(x) for x in zip(self.new_obs, other.new_obs, strict=True)],
            columns={k: np.concatenate([self.columns[k], x]) for k, x in other.columns.items()},
            ends=np.concatenate([self.ends, other.ends]),
            shape=None,
            views={k: concatenate_columns(k, [self.views[k], x]) for k, x in other.views.items()},
        )
        result.env_rewards = np.concatenate([self.env_rewards, other.env_rewards])
        return result

    def iter_trajectories(self) -> Iterator[tuple[Trajectory, slice]]:
        """Yields the episode id and agent index, and the rows, of each trajectory."""
        columns = self.columns
        for _, rows in self.iter_unrolls():
            yield tuple(int(columns[x][rows.start]) for x in ("eps_id", "agent_index")), rows

    def prepare(
        self,
        clip_rewards: bool | float | None,
        returns: np.ndarray | None,
        *,
        observes: bool = True,
    ) -> None:
        """Updates the filters with the rows, and scales and clips the rewards.

        Args:
            clip_rewards: None, True (the sign) or a bound.
            returns: running returns `[R]`, if rewards are scaled by them.
            observes: whether the rows update the filters.
        """
        learning, columns = self.learning, self.columns
        observed_columns = columns if returns is None else {**columns, "rewards": returns}
        if observes:
            learning.observe(
                [leaf[None] for leaf in self.obs],
                {name: x[None] for name, x in observed_columns.items()},
            )
        self.obs, self.new_obs = (
            [*learning.normalize_observations(x)] for x in (self.obs, self.new_obs)
        )
        columns["rewards"] = learning.scale_rewards(
            apply_reward_clipping(self.env_rewards, clip_rewards)
        )

    @property
    def packing(self) -> Packing:
        """The position of each row in an array `[N, T]`."""
        return Packing.from_ends(self.ends) if self.shape is None else Packing(self.shape)

    def postprocess(self) -> None:
        """Adds the policy's columns for all trajectories at once."""
        policy, columns = self.policy, self.columns
        packing = self.packing
        open_rows = np.flatnonzero(self.ends & ~columns["terminateds"])
        next_inputs = [leaf[open_rows] for leaf in self.new_obs]
        if views := policy.driver.acting.views:
            unmasked_leaves = get_unmasked_leaf_indices(policy.observation_space)
            next_inputs += get_next_views(
                views,
                columns,
                open_rows,
                obs=[self.obs[i] for i in unmasked_leaves],
                new_obs=[self.new_obs[i] for i in unmasked_leaves],
                actions=[columns[port.name] for port in self.actions],
                rewards=[self.env_rewards],
            )
        next_inputs += [
            x[open_rows] for name, x in columns.items() if name.startswith("state_out_")
        ]
        fragment_ends = packing.pack(self.ends)
        fragment_ends[:, -1] = True
        fragments = Fragments(
            PackedColumns(columns, packing),
            fragment_ends,
            policy,
            packing.get_positions(open_rows),
            next_inputs,
        )
        policy.postprocess_fragments(fragments)
        columns.update({name: packing.unpack(x) for name, x in fragments.new_columns.items()})
        if fragments.next_obs_index is not None:
            reached_rows = packing.get_rows_at(packing.unpack(fragments.next_obs_index))
            self.new_obs = [leaf[reached_rows] for leaf in self.new_obs]


# -- columns ------------------------------------------------------------------------------------


def apply_reward_clipping(rewards: np.ndarray, clip: bool | float | None) -> np.ndarray:
    """Returns rewards for learning: their signs (True), clipped (a number), or unchanged.

    >>> apply_reward_clipping(np.array([-3.0, 0.5]), True)
    array([-1.,  1.])
    >>> apply_reward_clipping(np.array([-3.0, 0.5]), 1.0)
    array([-1. ,  0.5])
    """
    if not clip:
        return rewards
    result: np.ndarray = np.sign(rewards) if clip is True else np.clip(rewards, -clip, clip)
    return result


def require_same_columns(
    policy: Policy, expected: Collection[str], columns: Collection[str]
) -> None:
    """Checks that acting returns the same columns as before.

    Args:
        policy: acts.
        expected: the names of the existing columns.
        columns: the names of the new columns.
    """
    if set(expected) != set(columns):
        raise UsageError(
            f"{type(policy).__name__} returned the columns {sorted(columns)} when it acted, but "
            f"{sorted(expected)} before. Return the same extras in every call."
        )


def nest_columns(
    columns: dict[str, Any],
    ports: Sequence[PolicyPort],
    space: gym.Space[Any],
    views: Sequence[ViewInput],
) -> dict[str, Any]:
    """Joins the columns of leaves, for actions and for views, into nested columns, in place."""
    if len(ports) > 1 or ports[0].path:
        columns["actions"] = unflatten(space, [columns.pop(port.name) for port in ports])
    for view in views:
        for current in (view, view.next_step_view):
            if current is not None and (len(current.ports) > 1 or current.ports[0].path):
                columns[current.name] = current.unflatten(
                    [columns.pop(port.name) for port in current.ports]
                )
    return columns


def get_next_views(
    views: Sequence[ViewInput],
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
    selected = {name: [leaf[rows] for leaf in leaves] for name, leaves in sources.items()}
    result = []
    for view in views:
        current_leaves = [columns[port.name][rows] for port in (view.next_step_view or view).ports]
        result += view.advance(current_leaves, selected[view.source], selected["new_obs"])
    return result
