"""Health checks of runs: one line for each fault, with number and setting, none for sound runs."""

import dataclasses
import math
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.workers import make_small_config
from tfpolicies import DQNConfig, PPOConfig
from tfpolicies.algorithms import health_rules
from tfpolicies.algorithms.health_checks import HealthChecks
from tfpolicies.algorithms.health_stats import ActionFacts, PolicyStats, RunStats
from tfpolicies.algorithms.tuned_hyperparameters import get_tuned_settings
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.rollout.episode import RolloutMetrics

TWO = spaces.Discrete(2)
PLANE = spaces.Box(-1, 1, (2,))
NESTED = spaces.Tuple([TWO, spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(2)])
SOUND = {"policy_loss": -0.01, "entropy": 0.6, "kl": 0.01, "cur_kl_coeff": 0.2, "cur_lr": 1e-3}
SOUND |= {"vf_clipped": 0.1}


class Flat(gym.Env):
    """Gives the same reward in each step of episodes of `length` steps."""

    observation_space = spaces.Box(-1.0, 1.0, (2,))
    action_space = TWO

    def __init__(self, reward=0.0, length=5):
        self.reward, self.length, self.now = reward, length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = 0
        return self._observe(), {}

    def step(self, action):
        self.now += 1
        return self._observe(), self.reward, self.now == self.length, False, {}

    def _observe(self):
        return np.array([self.now % 2, 0.0], np.float32)


class Blind(Flat):
    """Observes nothing."""

    def _observe(self):
        return np.ones(2, np.float32)


class Noisy(Flat):
    """Gives rewards near -10 that no action changes, in episodes of 30 steps."""

    def __init__(self):
        super().__init__(-10.0, 30)

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward + self.np_random.normal(), *rest


def ppo(env, **training):
    config = make_small_config(env, lr=1e-3, model={"fcnet_hiddens": [8]}, log_level="WARN")
    return config.training(**{"train_batch_size": 128, "sgd_minibatch_size": 64, **training})


def dqn(env, **settings):
    config = make_small_config(env, DQNConfig, log_level="WARN", model={"fcnet_hiddens": [8]})
    learning = {"train_batch_size": 16, "num_steps_sampled_before_learning_starts": 64}
    config.training(hiddens=[8], **{**learning, **settings})
    return config.reporting(min_sample_timesteps_per_iteration=64)


def train(caplog, config, iterations):
    """Returns the lines of the log after some iterations."""
    algorithm = config.build()
    for _ in range(iterations):
        algorithm.train()
    return [record.getMessage() for record in caplog.records]


# -- one policy, by hand-made numbers ----------------------------------------------------------


@pytest.fixture(autouse=True)
def _capture_warnings(caplog):
    caplog.set_level("WARNING", "tfpolicies")


RESULT = {
    "episodes_total": 90,
    "num_env_steps_sampled": 500,
    "num_env_steps_sampled_this_iter": 256,
    "num_env_steps_trained_this_iter": 256,
    "episode_reward_mean": -1200.0,
    "episode_len_mean": 200.0,
    "recent_returns": {"mean": -1200.0},
    "hist_stats": {"episode_lengths": [200]},
    "info": {"learner": {"p": {}}},
}
EPISODES = [RolloutMetrics(200, -1100.0), RolloutMetrics(200, -1300.0)]
FIRST = [-1100.0, -1300.0]  # returns, with a mean of -1200 and a deviation of 100


def check(caplog, iterations, action_space=TWO, *, sizes=(1.0, 16.0), run=None, **settings):
    """Returns the lines about a policy with these statistics, one dict per iteration.

    Args:
        caplog: captures the lines.
        iterations: statistics that differ from those of a sound policy.
        action_space: of the policy.
        sizes: of observations and rewards.
        run: entries that differ in the result, and `episodes` and `first_returns`.
        **settings: of the training.
    """
    caplog.clear()
    observer, config = HealthChecks(), PPOConfig().environment("CartPole-v1")
    config.training(train_batch_size=256, **settings)
    result = {**RESULT, **(run or {})}
    episodes, first = result.pop("episodes", EPISODES), result.pop("first_returns", FIRST)
    metrics = {"obs_magnitude": sizes[0], "reward_magnitude": sizes[1]}
    for stats in iterations:
        run_stats = RunStats.from_result(result, config, episodes, 1, first)
        policy = make_policy_stats("p", {**SOUND, **stats}, config, action_space, result, run_stats)
        observer.check(run_stats, [dataclasses.replace(policy, metrics=metrics)])
    return [record.getMessage() for record in caplog.records]


def make_policy_stats(name, stats, config, action_space, result, run_stats):
    learner = {"info": {"learner": {name: {"learner_stats": stats}}}, "policy_metrics": {name: {}}}
    return PolicyStats.from_result(
        {**result, **learner},
        name,
        config.to_dict(),
        ActionFacts.from_space(action_space),
        run_stats,
    )


CLIPPED = {"vf_clipped": 0.9}


@pytest.mark.parametrize(
    ("stats", "space", "words"),
    [
        (CLIPPED, TWO, ("90%", "vf_clip_param=10", "return is -1200", "=float('inf')")),
        ({"entropy": 0.0004}, TWO, ("0.0004 nats", "entropy_coeff (now 0)", "lr (now 0.001)")),
        ({"kl": 2e-9, "cur_lr": 1e-7}, TWO, ("divergence of 2e-09, nearly 0", "lr (now 1e-07)")),
        ({"kl": None, "cur_lr": 0.3}, TWO, ("far over the usual", "Lower lr (now 0.3)")),
        ({"kl": None, "cur_lr": 1e-9}, TWO, ("rate is nearly 0", "Raise lr (now 1e-09)")),
        (
            {"entropy": 0.693, "entropy_coeff": 1.0, "policy_loss": 0.02},
            TWO,
            ("entropy_coeff=1 times 0.69 nats", "35 times as large", "Lower entropy_coeff"),
        ),
        (
            {"entropy": 4.5, "entropy_coeff": 1.0, "policy_loss": 0.02},
            PLANE,
            ("times 4.5 nats",),
        ),
        ({"vf_loss": 1e9}, TWO, ("vf_loss is 1e+09", "at most 16", "larger than 1.6e+03")),
        ({"mean_q": -1e5}, TWO, ("mean value is 1e+05", "explodes", "lr (now 0.001)")),
        ({"entropy": -7.0}, PLANE, ("-7 nats",)),
        ({"kl": 0.5}, TWO, ("KL divergence of 0.5", "kl_target=0.01", "num_sgd_iter (now 30)")),
        ({"policy_loss": 0.0}, TWO, ("policy_loss is exactly 0", "clip_rewards")),
    ],
)
def test_a_lasting_fault_is_logged_once_with_number_and_setting(stats, space, words, caplog):
    sound = {"entropy": 2.0}
    assert check(caplog, [stats, stats, sound, stats, stats], space) == []
    (line,) = check(caplog, [stats] * 9, space)
    assert line.startswith("Policy 'p': ")
    assert all(word in line for word in words)


OBS_LARGE = {"sizes": (2.5e5, 16.0)}


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"gamma": 0.0}, ("gamma=0 counts only the next reward", "200 steps on average")),
        ({"gamma": 0.5}, ("gamma=0.5 looks 1 / (1 - gamma) = 2 steps ahead", "gamma=0.99")),
        (OBS_LARGE, ("observations have magnitude 2.5e+05", "observation_filter=MeanStdFilter")),
    ],
)
def test_settings_and_observations_that_keep_a_run_from_learning_are_named(about, words, caplog):
    (line,) = check(caplog, [{}] * 9, **about)
    assert all(word in line for word in words)
    assert check(caplog, [{}] * 2, **about) == []
    run = {"episodes_total": 39}  # too few to see whether it learns
    assert check(caplog, [{}] * 9, run=run, **about) == []
    assert len(check(caplog, [{}] * 9, run={"episodes_total": 40}, **about)) == 1


@pytest.mark.parametrize(
    ("stats", "about"),
    [
        ({}, {}),
        ({"entropy": 0.02}, {}),
        ({"entropy": -5.0}, {"action_space": PLANE}),
        ({"kl": 0.09}, {}),
        ({"kl": 0.0}, {}),  # by observations without information, not by the rate
        ({"kl": 0.9, "cur_kl_coeff": 0.0}, {}),
        ({"vf_clipped": 0.5}, {}),
        ({"entropy": math.nan, "kl": math.nan, "policy_loss": math.nan}, {}),
        (types.MappingProxyType({"entropy": "high", "kl": None}), {}),
        ({"entropy": 1.0}, {"action_space": NESTED}),
        ({}, {"gamma": 0.9, "run": {"episode_len_mean": 200.0}}),
        ({}, {"gamma": 0.99, "run": {"episode_len_mean": 27_000.0}}),
        ({}, {"gamma": 1.0}),
        ({}, {"gamma": 0.0, "run": {"episode_len_mean": 1.0}}),
        ({}, {"sizes": (900.0, 16.0)}),
        ({}, {"sizes": (math.nan, math.nan)}),
    ],
)
def test_sound_statistics_horizons_and_observations_log_nothing(stats, about, caplog):
    assert check(caplog, [stats] * 9, **about) == []


@pytest.mark.parametrize(
    ("about", "stats", "words"),
    [
        ({"gamma": 0.0}, {}, "gamma=0"),
        (OBS_LARGE, {"kl": 5.0, "entropy": 1e-5}, "observations have magnitude"),
        ({}, {"kl": 1e-9, "cur_lr": 1e-7}, "nearly 0"),
        ({}, {"kl": 5.0, "entropy": 1e-5, "vf_loss": 1e12}, "far over kl_target"),
        ({}, {"entropy": 0.69, "entropy_coeff": 9.0, "kl": 1e-9}, "the entropy bonus"),
    ],
)
def test_the_line_about_a_cause_hides_those_about_its_symptoms(about, stats, words, caplog):
    (line,) = check(caplog, [{**CLIPPED, **stats}] * 20, **about)
    assert words in line


def test_symptoms_wait_until_the_cause_has_had_its_time_to_show(caplog):
    same = [RolloutMetrics(200, -200.0)] * 60
    flat = {"episodes": same, "first_returns": [-200.0] * 20, "recent_returns": {"mean": -200.0}}
    assert check(caplog, [CLIPPED] * 9, run=flat) == []  # the returns may differ yet
    (line,) = check(caplog, [CLIPPED] * 9, run={**flat, "episodes": same * 2})
    assert line.startswith(
        "Environment 'CartPole-v1': the return was -200 in each of the last 120 "
    )
    never = {"episodes": [], "episodes_total": 0, "first_returns": []}
    assert check(caplog, [CLIPPED] * 9, run=never) == []  # episodes may end yet
    (line,) = check(caplog, [CLIPPED] * 9, run={**never, "num_env_steps_sampled": 10_000})
    assert line.startswith("Environment 'CartPole-v1': no episode has ended after 10,000 steps")
    assert check(caplog, [CLIPPED] * 9, run={"episodes_total": 39}) == []  # too few to judge by


@pytest.mark.parametrize(("mean", "count"), [(-1101.0, 1), (-1099.0, 0), (math.nan, 1)])
def test_a_run_whose_returns_grow_by_a_deviation_is_finite(mean, count, caplog):
    run = {"recent_returns": {"mean": mean}}
    assert len(check(caplog, [CLIPPED] * 9, run=run)) == count
    assert check(caplog, [CLIPPED] * 9, run={**run, "first_returns": None}) == []  # not known


def test_values_that_rewards_allow_are_not_an_explosion(caplog):
    assert check(caplog, [{"vf_loss": 4e6, "vf_explained_var": 0.5}] * 9) == []
    assert check(caplog, [{"mean_q": 4e3}] * 9) == []
    assert check(caplog, [{"mean_q": 4e3}] * 9, sizes=(1.0, 0.0)) == []  # no reward was seen
    soft = {"mean_q": 300.0, "alpha_value": 1.0, "target_entropy": -1.0}
    assert check(caplog, [soft] * 9, sizes=(1.0, 0.01)) == []  # entropy is rewarded, too
    (line,) = check(caplog, [{"vf_loss": 4e6, "vf_explained_var": 0.05}] * 9)
    assert "values are wrong by 2e+03 on average" in line
    both_ways = [{"mean_td_error": -2e3}, {"mean_td_error": 2e3}] * 5  # with replay
    (line,) = check(caplog, both_ways)
    assert "values are wrong by 2e+03 on average" in line


def test_the_mean_return_in_a_line_is_that_of_the_policy(caplog):
    (line,) = check(caplog, [CLIPPED] * 9, run={"policy_reward_mean": {"p": -7.5, "other": 7.5}})
    assert "(the mean return is -7.5)" in line


@pytest.mark.parametrize(
    ("returns", "total", "count"),
    [
        ([20.0] * 100, 100, 1),
        ([20.0] * 100, 149, 1),
        ([20.0] * 100, 150, 0),  # it may have learned this return
        ([20.0] * 99, 99, 0),
        ([20.0] * 99 + [19.0], 100, 0),
    ],
)
def test_a_policy_of_several_with_the_same_return_from_the_start_is_named(
    returns, total, count, caplog
):
    run = {
        "episodes_total": total,
        "policy_reward_mean": {"p": 20.0, "other": 7.0},
        "hist_stats": {"policy_p_reward": returns, "episode_lengths": [20]},
        "recent_returns": {"mean": 500.0},  # the other policy learns
    }
    lines = check(caplog, [{}], run=run)
    assert len(lines) == count
    for line in lines:
        assert line.startswith(
            "Policy 'p': the return of its agents was 20 in each of the last 100"
        )
        assert "policy_mapping_fn" in line
    alone = {**run, "policy_reward_mean": {"p": 20.0}}
    assert check(caplog, [{}], run=alone) == []


def test_a_sum_of_returns_that_is_constant_does_not_show_whether_policies_learn(caplog):
    total = {f"episode_reward_{x}": 0.0 for x in ("mean", "min", "max")}
    run = {**total, "policy_reward_mean": {"p": 1.0, "other": -1.0}}
    assert check(caplog, [CLIPPED] * 9, run=run) == []
    assert len(check(caplog, [CLIPPED] * 9, run={**run, "episode_reward_max": 1.0})) == 1


def test_each_fault_is_logged_for_one_policy_only(caplog):
    observer, config = HealthChecks(), PPOConfig()
    run_stats = RunStats.from_result(RESULT, config, EPISODES, 1, FIRST)
    policies = [make_policy_stats(name, CLIPPED, config, TWO, RESULT, run_stats) for name in "abc"]
    for _ in range(5):
        observer.check(run_stats, policies)
    assert len(caplog.records) == 1


# -- whole runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_sound_run_of_ppo_says_nothing(env, caplog):
    config = ppo(env, num_sgd_iter=5, vf_clip_param=float("inf"), lambda_=0.9)
    config.update_from_dict(get_tuned_settings("PPO", env)).rollouts(num_envs_per_worker=4)
    assert train(caplog, config, 8) == []


def test_a_sound_run_of_dqn_says_nothing(caplog):
    assert train(caplog, dqn("CartPole-v1"), 5) == []


def test_a_replay_with_few_updates_is_named_with_the_intensity_that_helps(caplog):
    config = dqn("CartPole-v1").rollouts(num_envs_per_worker=8)
    (line,) = train(caplog, config, 6)
    assert "one update per 8 sampled steps, since 8 environments" in line
    assert "training_intensity=16" in line
    caplog.clear()
    config = dqn("CartPole-v1", training_intensity=16).rollouts(num_envs_per_worker=8)
    assert train(caplog, config, 5) == []


def test_a_run_that_ends_before_learning_starts_says_so_at_its_beginning_and_end(caplog):
    algorithm = dqn("CartPole-v1", num_steps_sampled_before_learning_starts=100).build()
    algorithm.learn(64)
    begins, ends = (record.getMessage() for record in caplog.records)
    assert begins.startswith("There will be no or hardly any updates: learning starts after ")
    assert "num_steps_sampled_before_learning_starts=100 steps, and the run has 64. Train" in begins
    assert ends.startswith("No update was done: learning starts after ")
    assert "--set num_steps_sampled_before_learning_starts=N" in ends
    caplog.clear()
    algorithm.learn(192)
    assert not caplog.records


def test_returns_that_are_too_large_for_the_clipped_value_errors_are_named(caplog):
    (line,) = train(caplog, ppo(lambda _: Noisy()), 11)
    assert "squared error is above vf_clip_param=10" in line
    assert "--set vf_clip_param=inf" in line
    assert "(the mean return is -3" in line


def test_observations_that_are_all_the_same_are_named(caplog):
    lines = train(caplog, ppo(lambda _: Blind(reward=1.0)), 4)
    assert "all observations are the same" in lines[0]
    assert lines[0].startswith("Policy 'default_policy': ")


def test_rewards_that_never_come_are_named_after_a_hundred_episodes(caplog):
    config = ppo(lambda _: Flat(), use_critic=False)
    config.training(use_gae=False).rollouts(batch_mode="complete_episodes")
    (line,) = train(caplog, config, 5)  # and none that the policy's loss is 0
    assert line.startswith("Environment '<lambda>': the return was 0 in each of the last 100 epis")


def test_rewards_of_agents_that_cancel_out_are_rewards(caplog):
    rng = np.random.default_rng(0)

    class ZeroSum(make_multi_agent(lambda config: Flat(length=1))):
        def step(self, action_dict):
            obs, _, *ends = super().step(action_dict)
            reward = 1.0 if rng.integers(2) else -1.0
            return obs, {0: reward, 1: -reward}, *ends

    config = ppo(ZeroSum).environment(env_config={"num_agents": 2})
    assert train(caplog, config, 2) == []


def test_episodes_that_never_end_are_named(caplog, monkeypatch):
    monkeypatch.setattr(health_rules, "MAX_STEPS_WITHOUT_END", 256)
    endless = ppo(lambda _: Flat(reward=0.1, length=0)).rollouts(num_envs_per_worker=2)
    assert train(caplog, endless, 3) == []
    (line,) = train(caplog, endless, 4)
    assert "no episode has ended after 256 steps of each environment" in line
    assert "TimeLimit" in line


def test_agents_without_a_policy_to_train_are_named(caplog):
    config = ppo(make_multi_agent(lambda config: Flat(1.0, length=1))).multi_agent(
        policies=["a", "b"], policy_mapping_fn=lambda *a, **k: "a", policies_to_train=["b"]
    )
    (line,) = train(caplog, config, 4)
    assert "sampled 128 steps, but updated no policy" in line
    assert "policy_mapping_fn" in line
