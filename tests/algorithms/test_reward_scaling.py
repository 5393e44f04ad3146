"""Rewards divided by the deviation of their discounted returns."""

import numpy as np
import pytest

from helpers.environments import SavedCountingEnv
from helpers.workers import make_small_config
from tfpolicies import Algorithm
from tfpolicies.models.mean_std_filters import ReturnFilter
from tfpolicies.rollout.running_returns import RunningReturns
from tfpolicies.rollout.trajectory_packing import Packing

GAMMA = 0.5


def add(returns, rewards, episodes, ends, running, packing=None, terminated=()):
    columns = {
        "terminateds": np.isin(np.arange(len(rewards)), terminated),
        "rewards": np.array(rewards, np.float32),
        "eps_id": np.array(episodes),
        "agent_index": np.zeros(len(rewards), np.int64),
    }
    ends = np.array(ends, bool)
    packing = packing or Packing.from_ends(ends)
    return returns.add(columns, ends, packing, running, gamma=GAMMA).tolist()


@pytest.mark.core
def test_returns_continue_across_fragments_and_restart_with_an_episode():
    returns = RunningReturns()
    first = add(returns, [1, 2, 4, 8], [7, 7, 9, 9], [0, 1, 0, 1], {7, 9}, Packing((2, 2)))
    assert first == [1, 2.5, 4, 10]
    # 7 ends at once and 8 begins in its place; 9 continues
    second = add(returns, [1, 1, 0, 0], [7, 8, 9, 9], [1, 1, 0, 1], {8, 9}, Packing((2, 2)))
    assert second == [2.25, 1, 5, 2.5]
    assert returns.last_returns == {(8, 0): 1.0, (9, 0): 2.5}


def test_trajectories_of_different_lengths_are_added_up_in_the_same_way():
    returns = RunningReturns()
    assert add(returns, [1, 1, 1, 2], [7, 7, 7, 8], [0, 0, 1, 1], {7}) == [1, 1.5, 1.75, 2]
    # 8 has rows that come later: its return is kept until then
    assert add(returns, [4], [7], [1], {7}) == [4.875]


def test_returns_restart_where_a_life_is_lost():
    returns = RunningReturns()
    result = add(returns, [1, 2, 4, 8], [7, 7, 7, 7], [0, 1, 0, 1], {7}, terminated=[1])
    assert result == [1, 2.5, 4, 10]
    assert add(returns, [1, 1], [7, 7], [0, 1], {7}, terminated=[1]) == [6, 4]
    assert add(returns, [1], [7], [1], {7}) == [1]


def test_running_returns_can_be_restored():
    returns = RunningReturns()
    add(returns, [1, 2], [7, 8], [1, 1], {7, 8})
    restored = RunningReturns.from_state(returns.get_state())
    assert restored.last_returns == {(7, 0): 1.0, (8, 0): 2.0}
    assert not RunningReturns.from_state(RunningReturns().get_state()).last_returns


@pytest.mark.core
def test_rewards_are_divided_by_the_deviation_of_returns_and_clipped():
    rewards = ReturnFilter()
    rewards.observe([1.0, 2.5, 4.0, 10.0])
    assert rewards([2.0]).tolist() == [2.0]  # frozen
    rewards.flush()
    deviation = np.sqrt((3.375**2 + 1.875**2 + 0.375**2 + 5.625**2) / 3)
    np.testing.assert_allclose(rewards([2.0, -1.0]), np.array([2, -1]) / deviation, rtol=1e-6)
    assert rewards([-99.0]) == [-10]


def create(context):
    lengths = [7, 5] if context.vector_index else [5, 7]
    return SavedCountingEnv(0, lengths)  # rewards are quarters, at most 4.5


def build():
    config = make_small_config(create, seed=3, num_envs_per_worker=2, train_batch_size=20)
    config.training(sgd_minibatch_size=10, num_sgd_iter=1, gamma=GAMMA)
    return config.rollouts(reward_filter="ReturnStdFilter").build()


def add_up(rewards, starts, value):
    """Returns the discounted returns after each step, by a loop."""
    results = []
    for reward, begins in zip(rewards, starts, strict=True):
        value = reward if begins else GAMMA * value + reward
        results.append(value)
    return results


@pytest.fixture(scope="module")
def run():
    algorithm = build()
    return algorithm, [algorithm.train() for _ in range(2)]


def test_a_sampler_observes_the_returns_of_each_environment():
    algorithm = build()
    observed, last = [], [0.0, 0.0]
    for _ in range(2):
        batch = algorithm.worker.sample()
        for i, rows in enumerate((slice(0, 10), slice(10, 20))):
            # nothing is flushed: rewards are those of the environment
            returns = add_up(batch["rewards"][rows], batch["t"][rows] == 0, last[i])
            observed, last[i] = observed + returns, returns[-1]
    rewards = algorithm.get_policy().reward_filter
    rewards.flush()
    assert rewards.statistics[0].count == 40
    np.testing.assert_allclose(rewards.statistics[0].std, np.std(observed, ddof=1))


def test_results_have_the_rewards_of_the_environment_and_evaluation_changes_nothing(run):
    algorithm, results = run
    assert (4 * np.array(results[1]["hist_stats"]["episode_reward"]) % 1 == 0).all()  # quarters
    before = algorithm.get_policy().reward_filter.get_state()
    algorithm.evaluate()
    np.testing.assert_equal(algorithm.get_policy().reward_filter.get_state(), before)


def test_a_resumed_run_continues_with_its_running_returns(run, tmp_path):
    algorithm, _ = run
    saved = algorithm.save(tmp_path / "checkpoint")
    resumed = Algorithm.from_checkpoint(saved, config={"env": create})
    for _ in range(2):
        left, right = (x.worker.sample()["rewards"] for x in (algorithm, resumed))
        np.testing.assert_array_equal(left, right)
        for x in (algorithm, resumed):
            x.train()
    left, right = (x.get_policy().reward_filter.get_state() for x in (algorithm, resumed))
    np.testing.assert_equal(left, right)
    np.testing.assert_equal(algorithm.get_weights(), resumed.get_weights())
