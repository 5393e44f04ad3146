"""Advantages, returns and n-step rewards, against numbers computed by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpolicies.batch.postprocessing import (
    Postprocessing,
    adjust_nstep,
    compute_advantages,
    discount_cumsum,
    discounted_returns,
    generalized_advantages,
    n_step_returns,
)
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import BatchError, UsageError

pytestmark = pytest.mark.core


def rollout(**columns):
    return SampleBatch(rewards=[1.0, 2.0, 3.0], vf_preds=[0.5, 0.4, 0.3], **columns)


def test_gae_of_one_trajectory():
    batch = rollout()
    assert compute_advantages(batch, 5.0, gamma=0.9, lambda_=0.8) is batch
    np.testing.assert_allclose(batch["advantages"], [5.93888, 7.054, 7.2], rtol=1e-6)
    np.testing.assert_allclose(batch["value_targets"], [6.43888, 7.454, 7.5], rtol=1e-6)
    assert batch[Postprocessing.ADVANTAGES].dtype == np.float32
    assert batch[Postprocessing.VALUE_TARGETS].dtype == np.float32


def test_returns_with_and_without_a_critic():
    returns = [8.0, 14.0, 24.0]  # 3 + 42 / 2 = 24, 2 + 24 / 2 = 14, 1 + 14 / 2 = 8
    critic = compute_advantages(rollout(), 42.0, gamma=0.5, use_gae=False)
    np.testing.assert_allclose(critic["advantages"], [7.5, 13.6, 23.7], rtol=1e-6)
    np.testing.assert_allclose(critic["value_targets"], returns)
    plain = compute_advantages(rollout(), 42.0, gamma=0.5, use_gae=False, use_critic=False)
    np.testing.assert_allclose(plain["advantages"], returns)
    assert plain["value_targets"].tolist() == [0, 0, 0]


def test_rewards_and_values_can_be_arguments_and_other_arguments_are_checked():
    arguments = {"rewards": [1.0, 2.0], "vf_preds": [0.0, 0.0]}
    batch = compute_advantages(SampleBatch(rewards=[0.0, 0.0]), 0.0, 0.5, **arguments)
    assert batch["advantages"].tolist() == [2, 2]
    with pytest.raises(AssertionError, match="use_critic"):
        compute_advantages(rollout(), 0.0, use_gae=True, use_critic=False)
    with pytest.raises(AssertionError, match="vf_preds"):
        compute_advantages(SampleBatch(rewards=[1.0]), 0.0)
    with pytest.raises(AssertionError, match="single trajectory"):
        compute_advantages(rollout(terminateds=[True, False, False]), 0.0)
    with pytest.raises(ValueError, match="`rewards`"):
        compute_advantages(rollout(), 0.0, rewards=[1.0])
    with pytest.raises(UsageError, match="`gamma`"):
        compute_advantages(rollout(), 0.0, gamma=1.1)


def test_discounted_sums_run_from_the_end():
    assert discount_cumsum(np.array([1, 2, 4]), 0.5).tolist() == [3, 4, 4]
    assert discount_cumsum(np.ones(2, np.float32), 0.5).dtype == np.float32
    assert discount_cumsum([], 0.5).shape == (0,)


def test_n_step_transitions():
    batch = SampleBatch(
        obs=np.arange(5),
        rewards=[10.0, 0.0, 100.0, 100.0, 100.0],
        new_obs={"a": np.arange(1, 6)},
        terminateds=[False, False, False, False, True],
        truncateds=[False] * 5,
    )
    rewards = batch["rewards"]
    adjust_nstep(3, 0.9, batch)
    np.testing.assert_allclose(batch["rewards"], [91, 171, 271, 190, 100])
    assert batch["new_obs"]["a"].tolist() == [3, 4, 5, 5, 5]
    assert batch["terminateds"].tolist() == [False, False, True, True, True]
    assert batch["truncateds"].tolist() == [False] * 5
    assert rewards.tolist() == [10, 0, 100, 100, 100]
    batch = SampleBatch(rewards=[1, 2], new_obs=[1, 2])
    adjust_nstep(1, 0.9, batch)
    assert batch["rewards"].tolist() == [1, 2]
    adjust_nstep(9, 0.5, batch)
    assert batch["rewards"].tolist() == [2, 2]
    assert batch["new_obs"].tolist() == [2, 2]
    with pytest.raises(UsageError, match="n_step"):
        adjust_nstep(0, 0.9, batch)
    with pytest.raises(AssertionError, match="single trajectory"):
        adjust_nstep(2, 0.9, SampleBatch(rewards=[1, 2], terminateds=[True, False]))


def test_termination_cuts_the_bootstrap_but_truncation_and_the_fragments_end_keep_it():
    nan = np.nan  # a value that is never read
    advantages, targets = generalized_advantages(
        rewards=np.array([[1, 1, 1, 1], [1, 1, 1, 1]], np.float32),
        values=np.array([[2, 4, 6, 8], [2, 4, 6, 8]], np.float32),
        next_values=np.array([[4, nan, 8, 10], [4, 20, 8, nan]], np.float32),
        terminateds=np.array([[0, 1, 0, 0], [0, 0, 0, 1]], bool),
        ends=np.array([[0, 1, 0, 1], [0, 1, 0, 1]], bool),
        gamma=0.5,
        lambda_=0.5,
    )
    # Row 0: terminated at 1: -3, and 1 + 2 - 2 - 3/4; fragment's end at 3: 1 + 5 - 8 = -2.
    # Row 1: truncated at 1: 1 + 10 - 4 = 7, and 1 + 7/4; terminated at 3: -7.
    expected = [[0.25, -3, -1.5, -2], [2.75, 7, -2.75, -7]]
    assert advantages.tolist() == expected
    assert targets.tolist() == np.add(expected, [2, 4, 6, 8]).tolist()
    assert advantages.dtype == targets.dtype == np.float32


@st.composite
def fragments(draw):
    n, t = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    rewards, values, bootstraps = rng.normal(size=(3, n, t)).astype(np.float32)
    terminateds = rng.random((n, t)) < 0.2
    ends = terminateds | (rng.random((n, t)) < 0.2)
    ends[:, -1] = True
    following = np.concatenate([values[:, 1:], bootstraps[:, -1:]], axis=1)
    return rewards, values, np.where(ends, bootstraps, following), terminateds, ends


def find_trajectories(ends):
    """Yields the row and the slice of each trajectory."""
    for n, row in enumerate(ends):
        stops = np.flatnonzero(row) + 1
        for start, stop in zip([0, *stops[:-1]], stops, strict=True):
            yield n, slice(start, stop)


unit = st.floats(0, 1)


@given(fragments(), unit, unit)
def test_all_trajectories_at_once_equal_one_after_another(data, gamma, lambda_):
    rewards, values, next_values, terminateds, ends = data
    advantages, targets = generalized_advantages(*data, gamma=gamma, lambda_=lambda_)
    returns = discounted_returns(rewards, ends, next_values, gamma=gamma)
    for at in find_trajectories(ends):
        batch = SampleBatch(rewards=rewards[at], vf_preds=values[at])
        reached = next_values[at][-1]
        compute_advantages(batch, 0.0 if terminateds[at][-1] else reached, gamma, lambda_)
        np.testing.assert_allclose(advantages[at], batch["advantages"], atol=1e-4)
        np.testing.assert_allclose(targets[at], batch["value_targets"], atol=1e-4)
        expected = discount_cumsum([*rewards[at], reached], gamma)[:-1]
        np.testing.assert_allclose(returns[at], expected, atol=1e-4)


def test_n_step_returns_stop_at_ends_and_discount_by_the_steps_made():
    rewards = np.array([[10, 0, 100, 100, 100], [1, 2, 4, 8, 16]], np.float32)
    ends = np.array([[0, 0, 0, 0, 1], [0, 1, 0, 0, 0]], bool)
    terminateds = np.array([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], bool)
    sums, reached, discounts = n_step_returns(rewards[:1], ends[:1], terminateds[:1], 3, 0.9)
    np.testing.assert_allclose(sums, [[91, 171, 271, 190, 100]], rtol=1e-6)
    assert reached.tolist() == [[2, 3, 4, 4, 4]]
    np.testing.assert_allclose(discounts, [[0.729, 0.729, 0, 0, 0]], rtol=1e-6)
    # Truncated at step 1; the fragment's end comes at step 4, in the midst of an episode.
    sums, reached, discounts = n_step_returns(rewards[1:], ends[1:], terminateds[1:], 3, 0.5)
    assert sums.tolist() == [[2, 2, 12, 16, 16]]
    assert reached.tolist() == [[1, 1, 4, 4, 4]]
    assert discounts.tolist() == [[0.25, 0.5, 0.125, 0.25, 0.5]]
    assert rewards.tolist() == [[10, 0, 100, 100, 100], [1, 2, 4, 8, 16]]
    with pytest.raises(UsageError, match="`n` must"):
        n_step_returns(rewards, ends, terminateds, 0, 0.5)
    with pytest.raises(BatchError, match=r"\[N, T\]"):
        n_step_returns(rewards[0], ends[0], terminateds[0], 2, 0.5)


@given(fragments(), st.integers(1, 9), st.floats(0.1, 1))
def test_n_step_returns_of_all_trajectories_equal_those_of_each(data, n, gamma):
    rewards, _, _, terminateds, ends = data
    sums, reached, discounts = n_step_returns(rewards, ends, terminateds, n, gamma)
    for at in find_trajectories(ends):
        steps = np.arange(at[1].start, at[1].stop)
        batch = SampleBatch(rewards=rewards[at], new_obs=steps, terminateds=terminateds[at])
        adjust_nstep(n, gamma, batch)
        np.testing.assert_allclose(sums[at], batch["rewards"], atol=1e-4)
        assert reached[at].tolist() == batch["new_obs"].tolist()
        exact = gamma ** (batch["new_obs"] - steps + 1.0) * ~batch["terminateds"]
        np.testing.assert_allclose(discounts[at], exact, rtol=1e-4)


def test_returns_read_last_values_only_at_ends_and_change_no_input():
    rewards = np.ones((1, 3), np.float32)
    ends = np.array([[False, True, False]])
    last = np.array([[np.nan, 4.0, 6.0]], np.float32)
    assert discounted_returns(rewards, ends, last, gamma=0.5).tolist() == [[2.5, 3, 4]]
    assert discounted_returns(rewards, ends, 0.0, gamma=0.5).tolist() == [[1.5, 1, 1]]
    assert rewards.tolist() == [[1, 1, 1]]
    assert ends.tolist() == [[False, True, False]]


def test_vectorised_input_is_checked_and_left_alone():
    for n in (1, 2):  # with N = 1, transposing makes no copy
        arrays = [np.ones((n, 3), np.float32) for _ in range(3)]
        flags = [np.zeros((n, 3), bool) for _ in range(2)]
        generalized_advantages(*arrays, *flags, gamma=0.9, lambda_=0.9)
        assert all((array == 1).all() for array in arrays)
        assert not any(flag.any() for flag in flags)
    with pytest.raises(BatchError, match=r"\[N, T\]"):
        generalized_advantages(*arrays, *[flag[:1] for flag in flags], gamma=0.9, lambda_=0.9)
    with pytest.raises(BatchError, match=r"\[N, T\]"):
        discounted_returns(np.ones(3), np.ones(3, bool), 0.0, gamma=0.9)
    with pytest.raises(UsageError, match="`lambda_`"):
        generalized_advantages(*arrays, *flags, gamma=0.9, lambda_=2.0)
