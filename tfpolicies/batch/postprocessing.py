"""Advantages, returns and n-step rewards of trajectories.

`compute_advantages` and `adjust_nstep` process the batch of one trajectory.
`generalized_advantages`, `discounted_returns` and `n_step_returns` process all trajectories of many
environments at once.

Generalized advantage estimation: Schulman et al. 2016, arXiv:1506.02438, equation 16:
A_t = sum over k of (gamma * lambda)^k * delta_(t+k), with
delta_t = r_t + gamma * V(s_(t+1)) - V(s_t).
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from tfpolicies.batch.leaves import map_leaves, take_rows
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import BatchError, BatchUsageError, UsageError


class Postprocessing:
    """Names of the columns that `compute_advantages` adds."""

    ADVANTAGES = "advantages"
    VALUE_TARGETS = "value_targets"


def compute_advantages(
    rollout: SampleBatch,
    last_r: float,
    gamma: float = 0.9,
    lambda_: float = 1.0,
    use_gae: bool = True,
    use_critic: bool = True,
    rewards: ArrayLike | None = None,
    vf_preds: ArrayLike | None = None,
) -> SampleBatch:
    """Adds the columns `advantages` and `value_targets`, float32 [rows], to one trajectory.

    With GAE, targets are advantages + values. Without it, advantages are discounted returns
    minus values and targets the returns; without a critic either, advantages are the returns and
    targets zero.

    Args:
        rollout: rows of one episode of one agent, with `rewards`, and `vf_preds` for a critic.
        last_r: the value after the last row: 0 where the episode terminated, otherwise
            (truncation included) the critic's value of the last `new_obs`.
        gamma: the discount per step, in [0, 1].
        lambda_: the decay of GAE, in [0, 1].
        use_gae: whether to use GAE (needs the critic).
        use_critic: whether there are values.
        rewards: used instead of the column, [rows].
        vf_preds: used instead of the column, [rows].

    Returns:
        `rollout` itself.

    Raises:
        BatchUsageError: for GAE without a critic, a critic without values, or an episode that
            ends before the last row.
        UsageError: if `gamma` or `lambda_` is not in [0, 1].
    """
    _require_unit_interval(gamma=gamma, lambda_=lambda_)
    if use_gae and not use_critic:
        raise BatchUsageError("`use_gae=True` needs `use_critic=True`. Set it, or switch GAE off.")
    if use_critic and vf_preds is None and SampleBatch.VF_PREDS not in rollout:
        raise BatchUsageError(
            f"A critic needs values, but the rollout has no {SampleBatch.VF_PREDS!r}, only "
            f"{list(rollout)}. Pass `vf_preds`, or set `use_critic=False`."
        )
    _require_single_trajectory(rollout, "compute_advantages")
    reward = _to_vector("rewards", rewards, rollout)
    if use_critic:
        value = _to_vector("vf_preds", vf_preds, rollout)
    if use_gae:
        next_value = np.append(value[1:], last_r)
        advantages = discount_cumsum(reward + gamma * next_value - value, gamma * lambda_)
        targets = advantages + value
    else:
        returns = discount_cumsum(np.append(reward, last_r), gamma)[:-1]
        advantages = returns - value if use_critic else returns
        targets = returns if use_critic else np.zeros_like(returns)
    rollout[Postprocessing.ADVANTAGES] = advantages.astype(np.float32)
    rollout[Postprocessing.VALUE_TARGETS] = targets.astype(np.float32)
    return rollout


def discount_cumsum(x: ArrayLike, gamma: float) -> np.ndarray:
    """Returns y [T] with y[t] = x[t] + gamma * y[t + 1].

    Float32 stays float32 (the sums are in double precision); other types become float64.

    >>> discount_cumsum([0.0, 1.0, 2.0], 0.5)
    array([1., 2., 2.])
    """
    array = np.asarray(x)
    dtype = array.dtype if array.dtype == np.float32 else np.float64
    reversed_sums = accumulate(reversed(array.tolist()), lambda later, now: now + gamma * later)
    return np.array(list(reversed_sums), dtype=dtype)[::-1]


def adjust_nstep(n_step: int, gamma: float, batch: SampleBatch) -> None:
    """Converts the rows of one trajectory into n-step transitions, in place.

    `rewards` become discounted sums over `n_step` rows; `new_obs`, `terminateds` and `truncateds`
    become those of the row `n_step - 1` later. Near the end, the sums have fewer terms and the
    last row is used.

    Args:
        n_step: the number of steps, from 1; 1 changes nothing.
        gamma: the discount per step, in [0, 1].
        batch: the trajectory, with `rewards` and `new_obs`; its arrays are replaced, not modified.

    Raises:
        BatchUsageError: if an episode ends before the last row, or the batch has sequences.
        UsageError: if `n_step` or `gamma` is out of range.
    """
    _require_unit_interval(gamma=gamma)
    _require_steps("n_step", n_step)
    _require_single_trajectory(batch, "adjust_nstep")
    if n_step == 1 or not batch.count:
        return
    rewards = np.asarray(batch[SampleBatch.REWARDS])
    if rewards.dtype.kind != "f":
        rewards = rewards.astype(np.float32)
    sums = rewards.copy()
    for k in range(1, min(n_step, len(rewards))):
        sums[:-k] += gamma**k * rewards[k:]
    last_rows = np.minimum(np.arange(batch.count) + n_step - 1, batch.count - 1)
    shifted = {
        name: map_leaves(lambda leaf: take_rows(leaf, last_rows), batch[name])
        for name in (SampleBatch.NEXT_OBS, SampleBatch.TERMINATEDS, SampleBatch.TRUNCATEDS)
        if name == SampleBatch.NEXT_OBS or name in batch
    }
    batch.update(shifted, rewards=sums)


def generalized_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminateds: np.ndarray,
    ends: np.ndarray,
    *,
    gamma: float,
    lambda_: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns GAE advantages and value targets for N environments and T steps at once.

    Schulman et al. 2016, arXiv:1506.02438, equation 16. A row contains trajectory pieces one after
    another. Termination cuts the bootstrap; truncation and the fragment's end keep it.

    Args:
        rewards: float32 [N, T].
        values: float32 [N, T], V of the observation before each step.
        next_values: float32 [N, T], V of the observation after each step; not read where
            `terminateds`.
        terminateds: bool [N, T].
        ends: bool [N, T], True at the last step of each piece (terminated, truncated or the
            fragment's end), so that advantages do not leak into the piece before.
        gamma: the discount per step, in [0, 1].
        lambda_: the decay, in [0, 1].

    Returns:
        Advantages, and advantages + values; both float32 [N, T], new arrays.

    Raises:
        BatchError: if the arrays are not all [N, T].
        UsageError: if `gamma` or `lambda_` is not in [0, 1].

    >>> cut = np.array([[False, True]])
    >>> ones = np.ones((1, 2), np.float32)
    >>> generalized_advantages(ones, 0 * ones, 8 * ones, cut, cut, gamma=0.5, lambda_=0.5)[0]
    array([[5.25, 1.  ]], dtype=float32)
    """
    _require_unit_interval(gamma=gamma, lambda_=lambda_)
    _require_one_shape(
        rewards=rewards, values=values, next_values=next_values, terminateds=terminateds, ends=ends
    )
    value = _to_time_major(values)
    has_next = ~_to_time_major(terminateds, bool)
    advantages = np.zeros(value.shape, np.float32)
    np.multiply(_to_time_major(next_values), gamma, out=advantages, where=has_next)
    advantages += _to_time_major(rewards)
    advantages -= value
    continues = has_next & ~_to_time_major(ends, bool)
    _add_later_rows(advantages, continues * np.float32(gamma * lambda_))
    return np.ascontiguousarray(advantages.T), np.ascontiguousarray((advantages + value).T)


def running_returns(
    rewards: np.ndarray, ends: np.ndarray, initial: np.ndarray, *, gamma: float
) -> np.ndarray:
    """Returns R_t = gamma R_(t-1) + r_t for N environments and T steps at once.

    Args:
        rewards: float32 [N, T].
        ends: bool [N, T], True at the last step of each trajectory piece.
        initial: float64 [N, T], read at the first step of each piece: R of the step before it, 0
            at the start of an episode.
        gamma: the discount per step, in [0, 1].

    Returns:
        Float64 [N, T], a new array.

    >>> ends = np.array([[False, True, False]])
    >>> running_returns(np.ones((1, 3)), ends, np.array([[4.0, 0.0, 0.0]]), gamma=0.5)
    array([[3. , 2.5, 1. ]])
    """
    returns = np.empty(rewards.shape)
    for t in range(rewards.shape[1]):
        continues = ~ends[:, t - 1] if t else np.zeros(len(rewards), bool)
        previous = np.where(continues, returns[:, t - 1], initial[:, t])
        returns[:, t] = gamma * previous + rewards[:, t]
    return returns


def discounted_returns(
    rewards: np.ndarray, ends: np.ndarray, last_values: np.ndarray | float, *, gamma: float
) -> np.ndarray:
    """Returns the discounted returns of N environments and T steps, for use without a critic.

    Args:
        rewards: float32 [N, T].
        ends: bool [N, T], True at the last step of each trajectory piece; the last column always
            counts as one.
        last_values: the expected return after the last step of a piece, a number for all of them or
            float32 [N, T], read only at the ends.
        gamma: the discount per step, in [0, 1].

    Returns:
        Float32 [N, T], a new array.

    Raises:
        BatchError: if the arrays are not all [N, T].
        UsageError: if `gamma` is not in [0, 1].

    >>> ends = np.array([[False, True, False]])
    >>> discounted_returns(np.ones((1, 3), np.float32), ends, 4.0, gamma=0.5)
    array([[2.5, 3. , 3. ]], dtype=float32)
    """
    _require_unit_interval(gamma=gamma)
    last: Any = last_values
    if np.ndim(last) == 0:
        last = np.full(np.shape(rewards), last, np.float32)
    _require_one_shape(rewards=rewards, ends=ends, last_values=last)
    returns = _to_time_major(rewards).copy()
    is_end = _to_time_major(ends, bool).copy()
    is_end[-1:] = True
    np.add(returns, gamma * _to_time_major(last), out=returns, where=is_end)
    _add_later_rows(returns, ~is_end * np.float32(gamma))
    return np.ascontiguousarray(returns.T)


class NStepReturns(NamedTuple):
    """The n-step transitions of N environments and T steps; all new arrays [N, T]."""

    rewards: np.ndarray  # float32: the discounted sum of the transition's rewards
    next_obs_index: np.ndarray  # int64: the step whose new_obs and terminateds the transition has
    discounts: np.ndarray  # float32: factor of the value of that new_obs; 0 where terminated


def n_step_returns(
    rewards: np.ndarray, ends: np.ndarray, terminateds: np.ndarray, n: int, gamma: float
) -> NStepReturns:
    """Returns the n-step transitions of N environments and T steps at once.

    The target of a value is then `rewards + discounts * V(next observation)`: Sutton and Barto
    2018, equation 7.1. No sum extends beyond the end of its trajectory piece. Near the end it has
    m < n terms, and its discount is gamma^m, which makes the target exact; code that uses
    gamma^n everywhere is wrong there.

    Args:
        rewards: float32 [N, T].
        ends: bool [N, T], True at the last step of each trajectory piece; the last column always
            counts as one.
        terminateds: bool [N, T].
        n: the number of steps, from 1.
        gamma: the discount per step, in [0, 1].

    Raises:
        BatchError: if the arrays are not all [N, T].
        UsageError: if `n` or `gamma` is out of range.

    >>> rewards = np.array([[10, 0, 100, 100, 100]], np.float32)
    >>> ends = np.array([[False, False, False, False, True]])
    >>> n_step_returns(rewards, ends, ends, n=3, gamma=0.9).rewards
    array([[ 91., 171., 271., 190., 100.]], dtype=float32)
    """
    _require_unit_interval(gamma=gamma)
    _require_steps("n", n)
    _require_one_shape(rewards=rewards, ends=ends, terminateds=terminateds)
    num_steps = np.shape(rewards)[1]
    steps = np.arange(num_steps)
    end = np.where(ends, steps, num_steps - 1)  # of the piece that each step is in
    end = np.minimum.accumulate(end[:, ::-1], axis=1)[:, ::-1]
    next_obs_index = np.minimum(steps + (n - 1), end)
    reward = np.asarray(rewards, np.float32)
    sums = reward.copy()
    for k in range(1, min(n, num_steps)):
        continues = next_obs_index[:, :-k] >= steps[k:]
        np.add(
            sums[:, :-k], np.float32(gamma**k) * reward[:, k:], out=sums[:, :-k], where=continues
        )
    discounts = np.power(np.float32(gamma), (next_obs_index - steps + 1).astype(np.float32))
    discounts[np.take_along_axis(np.asarray(terminateds, bool), next_obs_index, axis=1)] = 0.0
    return NStepReturns(sums, next_obs_index, discounts)


def _add_later_rows(rows: np.ndarray, decays: np.ndarray) -> None:
    """Adds `decays[t] * rows[t + 1]` to `rows[t]`, from the last row to the first, in place."""
    scratch = np.empty(rows.shape[1], rows.dtype)
    pairs = zip(reversed(rows[:-1]), reversed(rows[1:]), reversed(decays[:-1]), strict=True)
    for row, next_row, decay in pairs:
        np.multiply(decay, next_row, out=scratch)
        row += scratch


def _to_time_major(array: ArrayLike, dtype: DTypeLike = np.float32) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array).T, dtype=dtype)


def _to_vector(name: str, column: ArrayLike | None, rollout: SampleBatch) -> np.ndarray:
    vector = np.asarray(rollout[name] if column is None else column, dtype=np.float64)
    if vector.shape != (rollout.count,):
        raise BatchUsageError(
            f"`{name}` must have the shape ({rollout.count},), one number per row, but has "
            f"{vector.shape}. Squeeze or cut it."
        )
    return vector


def _require_single_trajectory(batch: SampleBatch, function: str) -> None:
    has_dones = SampleBatch.TERMINATEDS in batch or SampleBatch.TRUNCATEDS in batch
    if has_dones and not batch.is_single_trajectory():
        raise BatchUsageError(
            f"`{function}` takes a single trajectory, but an episode ends before the last of the "
            f"{batch.count} rows. Call it on each piece of `batch.split_by_episode()`."
        )


def _require_unit_interval(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            raise UsageError(f"`{name}` must be from 0 to 1, but got {number!r}.")


def _require_steps(name: str, number: int) -> None:
    if number < 1:
        raise UsageError(f"`{name}` must be at least 1, but got {number}.")


def _require_one_shape(**arrays: ArrayLike) -> None:
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1 or len(next(iter(shapes.values()))) != 2:
        raise BatchError(
            f"All arrays must be [N, T] (environments, steps), but their shapes are {shapes}."
        )


def standardized(column: np.ndarray) -> np.ndarray:
    """Returns a column scaled to mean 0 and standard deviation 1, float32.

    >>> standardized(np.array([1.0, 3.0])).tolist()
    [-1.0, 1.0]
    """
    with np.errstate(over="ignore", invalid="ignore"):  # the update reports non-finite values
        centred = column - column.mean()
        return (centred / max(1e-4, float(column.std()))).astype(np.float32)
