"""Rewards that are scaled by the spread of their discounted returns."""

import numpy as np
import pytest

from helpers.environments import SavedCountingEnv
from tfpolicies import Algorithm, PPOConfig
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
def test_returns_go_on_across_fragments_and_begin_anew_with_an_episode():
    returns = RunningReturns()
    first = add(returns, [1, 2, 4, 8], [7, 7, 9, 9], [0, 1, 0, 1], {7, 9}, Packing((2, 2)))
    assert first == [1, 2.5, 4, 10]
    # 7 ends at once and 8 begins in its place; 9 goes on
    second = add(returns, [1, 1, 0, 0], [7, 8, 9, 9], [1, 1, 0, 1], {8, 9}, Packing((2, 2)))
    assert second == [2.25, 1, 5, 2.5]
    assert returns.last_returns == {(8, 0): 1.0, (9, 0): 2.5}


def test_trajectories_of_different_lengths_are_added_up_alike():
    returns = RunningReturns()
    assert add(returns, [1, 1, 1, 2], [7, 7, 7, 8], [0, 0, 1, 1], {7}) == [1, 1.5, 1.75, 2]
    # 8 has rows that come later: what it has earned is kept meanwhile
    assert add(returns, [4], [7], [1], {7}) == [4.875]


def test_returns_begin_anew_where_a_life_is_lost():
    returns = RunningReturns()
    result = add(returns, [1, 2, 4, 8], [7, 7, 7, 7], [0, 1, 0, 1], {7}, terminated=[1])
    assert result == [1, 2.5, 4, 10]
    assert add(returns, [1, 1], [7, 7], [0, 1], {7}, terminated=[1]) == [6, 4]
    assert add(returns, [1], [7], [1], {7}) == [1]


def test_what_is_kept_can_be_restored():
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


def config(**settings):
    made = PPOConfig().environment(create).debugging(seed=3)
    made.rollouts(num_envs_per_worker=2, reward_filter="ReturnStdFilter")
    made.training(train_batch_size=20, sgd_minibatch_size=10, num_sgd_iter=1, gamma=GAMMA)
    made.training(model={"fcnet_hiddens": [8]}).framework(inference="tf", jit_compile=False)
    return made.update_from_dict(settings)


def returns_by_hand(rewards, starts, last):
    results = []
    for reward, begins in zip(rewards, starts, strict=True):
        last = reward if begins else GAMMA * last + reward
        results.append(last)
    return results


@pytest.fixture(scope="module")
def trained():
    algorithm = config().build()
    return algorithm, [algorithm.train() for _ in range(2)]


def test_a_sampler_observes_the_returns_of_each_environment():
    algorithm = config().build()
    observed, last = [], [0.0, 0.0]
    for _ in range(2):
        batch = algorithm.worker.sample()
        for i, rows in enumerate((slice(0, 10), slice(10, 20))):
            # nothing is flushed: rewards are those of the environment
            last_ones = returns_by_hand(batch["rewards"][rows], batch["t"][rows] == 0, last[i])
            observed, last[i] = observed + last_ones, last_ones[-1]
    rewards = algorithm.get_policy().reward_filter
    rewards.flush()
    assert rewards.statistics[0].count == 40
    np.testing.assert_allclose(rewards.statistics[0].std, np.std(observed, ddof=1))


def test_results_have_the_rewards_of_the_environment_and_evaluation_changes_nothing(trained):
    algorithm, results = trained
    assert (4 * np.array(results[1]["hist_stats"]["episode_reward"]) % 1 == 0).all()  # quarters
    before = algorithm.get_policy().reward_filter.get_state()
    algorithm.evaluate()
    after = algorithm.get_policy().reward_filter.get_state()
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_a_resumed_run_goes_on_with_its_running_returns(trained, tmp_path):
    algorithm, _ = trained
    saved = algorithm.save(tmp_path / "checkpoint")
    resumed = Algorithm.from_checkpoint(saved, config={"env": create})
    for _ in range(2):
        batches = [each.worker.sample() for each in (algorithm, resumed)]
        np.testing.assert_array_equal(batches[0]["rewards"], batches[1]["rewards"])
        for each in (algorithm, resumed):
            each.train()
    states = [each.get_policy().reward_filter.get_state() for each in (algorithm, resumed)]
    assert {k: v.tolist() for k, v in states[0].items()} == {
        k: v.tolist() for k, v in states[1].items()
    }
    weights = [each.get_policy().get_weights() for each in (algorithm, resumed)]
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])
