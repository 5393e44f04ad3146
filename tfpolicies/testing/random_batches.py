"""Training batches without an environment: a policy acts on random observations."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np

from tfpolicies.batch.leaves import map_leaves
from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.batch.view_builder import Trajectories
from tfpolicies.errors import UsageError
from tfpolicies.export.verify import draw_random_inputs
from tfpolicies.models.ports import make_leaf_ports
from tfpolicies.models.spaces import action_leaves, unflatten
from tfpolicies.policy.batch_utils import run_postprocessing
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.recurrent_state import RecurrentState
from tfpolicies.testing.policy_under_test import draw_masks, get_ports, replace_masks


def random_batch(
    policy: Policy, rows: int, *, length: int = 25, seed: int = 0, explore: bool = True
) -> SampleBatch:
    """Returns a training batch like that of a sampler, for random observations.

    Trajectories of `length` steps (the last one may be shorter) end alternately by termination and
    by truncation. The policy acts, carries its recurrent state from step to step, and postprocesses
    each trajectory. Acting counts as in a rollout: the generator and the time step advance.

    Args:
        policy: any policy.
        rows: of the batch, at least 1.
        length: of the trajectories.
        seed: of observations and rewards.
        explore: sample or be greedy.

    Raises:
        UsageError: if `rows` or `length` is below 1.

    >>> import gymnasium as gym
    >>> from tfpolicies import Policy
    >>> class Zeros(Policy):
    ...     def compute_actions(self, obs_batch, state_batches=None, **kwargs):
    ...         return np.zeros(len(obs_batch), int), [], {}
    >>> policy = Zeros(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), {})
    >>> batch = random_batch(policy, 30)
    >>> batch.count, batch["obs"].shape, batch["truncateds"].nonzero()[0]
    (30, (30, 3), array([29]))
    """
    if rows < 1 or length < 1:
        raise UsageError(f"rows and length must be at least 1, got {rows} and {length}.")
    rng = np.random.default_rng(seed)
    length = min(length, rows)
    count = -(-rows // length)
    rewards = rng.standard_normal((count, length)).astype(np.float32)
    columns = {**_collect_columns(policy, rewards, rng, explore), "rewards": rewards}
    batches, remaining = [], rows
    for i in range(count):
        steps = min(length, remaining)
        remaining -= steps
        ends = np.arange(steps) == steps - 1
        batch = SampleBatch(map_leaves(itemgetter((i, slice(steps))), columns)).copy()
        batch["terminateds"] = ends & (i % 2 == 0)
        batch["truncateds"] = ends & (i % 2 == 1)
        batch["t"] = np.arange(steps)
        batch["eps_id"] = batch["unroll_id"] = np.full(steps, i)
        batch["agent_index"] = np.zeros(steps, np.int64)
        batch.update(Trajectories(ends).build_views(batch, policy.driver.learning.freeze_views()))
        batches.append(run_postprocessing(policy, batch, {}, None))
    return concat_samples(batches)  # type: ignore[return-value]


def _collect_columns(
    policy: Policy, rewards: np.ndarray, rng: np.random.Generator, explore: bool
) -> dict[str, Any]:
    """Acts in N environments for T steps with `rewards` `[N, T]`; returns the columns."""
    count, length = rewards.shape
    ports, leaves = get_ports(policy), action_leaves(policy.action_space)
    obs_arrays = draw_random_inputs(ports, count, length + 1, rng)[: len(ports.obs)]
    obs_arrays = replace_masks(
        ports, obs_arrays, draw_masks(ports, leaves, count * (length + 1), rng)
    )
    memory, steps = RecurrentState(policy, count), []
    for t in range(length):
        _, columns = memory.act([leaf[:, t] for leaf in obs_arrays], explore=explore)
        memory.record_rewards(rewards[:, t])
        steps.append({name: np.array(column) for name, column in columns.items()})
    stacked = {name: np.stack([step[name] for step in steps], axis=1) for name in steps[0]}
    parts = [stacked.pop(port.name) for port in make_leaf_ports("actions", leaves)]
    stacked["actions"] = unflatten(policy.action_space, parts)
    for view in policy.driver.acting.input_views:
        for input_view in filter(None, (view, view.next_step_view)):
            stacked[input_view.name] = input_view.unflatten(
                [stacked.pop(port.name) for port in input_view.ports]
            )
    stacked["obs"] = unflatten(policy.observation_space, [leaf[:, :-1] for leaf in obs_arrays])
    stacked["new_obs"] = unflatten(policy.observation_space, [leaf[:, 1:] for leaf in obs_arrays])
    return stacked
