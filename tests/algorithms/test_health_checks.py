"""A run says once what is wrong with it, with number and setting; a sound one says nothing."""

import math
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import DQNConfig, MultiAgentEnv, PPOConfig
from tfpolicies.algorithms import health_checks
from tfpolicies.algorithms.health_checks import HealthChecks, PolicyStats, RunStats
from tfpolicies.algorithms.tuned_hyperparameters import get_tuned_settings
from tfpolicies.rollout.episode import RolloutMetrics

TWO = spaces.Discrete(2)
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
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.now += 1
        return np.zeros(2, np.float32), self.reward, self.now == self.length, False, {}


class Noisy(Flat):
    """Gives rewards near -10 that no action changes, in episodes of 30 steps."""

    def __init__(self):
        super().__init__(-10.0, 30)

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward + self.np_random.normal(), *rest


def ppo(env, **training):
    settings = {"train_batch_size": 128, "sgd_minibatch_size": 64, "num_sgd_iter": 2, "lr": 1e-3}
    config = PPOConfig().environment(env).debugging(seed=0)
    config.framework(inference="tf", jit_compile=False)
    model = {"fcnet_hiddens": [8]}
    return config.training(**{**settings, "model": model, **training})


def lines(caplog, config, iterations):
    """Returns what the log has after some iterations."""
    algorithm = config.build()
    for _ in range(iterations):
        algorithm.train()
    algorithm.stop()
    return [record.getMessage() for record in caplog.records]


# -- one policy, by hand-made numbers ----------------------------------------------------------


@pytest.fixture(autouse=True)
def _warnings_are_heard(caplog):
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


def told(caplog, iterations, action_space=TWO, *, sizes=(1.0, 16.0), run=None, **settings):
    """Returns the lines about a policy with these statistics, one dict per iteration.

    Args:
        caplog: keeps the lines.
        iterations: what differs from statistics of a sound policy.
        action_space: of the policy.
        sizes: of observations and rewards.
        run: what differs in the result, and as `episodes` and `first_returns`.
        **settings: of the training.
    """
    caplog.clear()
    observer, config = HealthChecks(), PPOConfig().environment("CartPole-v1")
    config.training(train_batch_size=256, **settings)
    result = {**RESULT, **(run or {})}
    episodes, first = result.pop("episodes", EPISODES), result.pop("first_returns", FIRST)
    for stats in iterations:
        one = PolicyStats("p", {**SOUND, **stats}, config.to_dict(), action_space, result, *sizes)
        observer.check(RunStats(result, config, episodes, 1, first), [one])
    return [record.getMessage() for record in caplog.records]


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
            spaces.Box(-1, 1, (2,)),
            ("times 4.5 nats",),
        ),
        ({"vf_loss": 1e9}, TWO, ("vf_loss is 1e+09", "at most 16", "larger than 1.6e+03")),
        ({"mean_q": -1e5}, TWO, ("mean value is 1e+05", "explodes", "lr (now 0.001)")),
        ({"entropy": -7.0}, spaces.Box(-1, 1, (2,)), ("-7 nats",)),
        ({"kl": 0.5}, TWO, ("KL divergence of 0.5", "kl_target=0.01", "num_sgd_iter (now 30)")),
        ({"policy_loss": 0.0}, TWO, ("policy_loss is exactly 0", "clip_rewards")),
    ],
)
def test_what_holds_for_some_iterations_is_told_once_with_number_and_setting(
    stats, space, words, caplog
):
    sound = {"entropy": 2.0}
    assert told(caplog, [stats, stats, sound, stats, stats], space) == []
    (line,) = told(caplog, [stats] * 9, space)
    assert line.startswith("Policy 'p': ")
    for each in words:
        assert each in line


@pytest.mark.parametrize(
    ("stats", "space"),
    [
        ({}, TWO),
        ({"entropy": 0.02}, TWO),
        ({"entropy": -5.0}, spaces.Box(-1, 1, (2,))),
        ({"kl": 0.09}, TWO),
        ({"kl": 0.0}, TWO),  # by observations that say nothing, not by the rate
        ({"kl": 0.9, "cur_kl_coeff": 0.0}, TWO),
        ({"vf_clipped": 0.5}, TWO),
        ({"entropy": math.nan, "kl": math.nan, "policy_loss": math.nan}, TWO),
        (
            {"entropy": 1.0},
            spaces.Tuple([TWO, spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(2)]),
        ),
    ],
)
def test_sound_statistics_say_nothing(stats, space, caplog):
    assert told(caplog, [stats] * 5, space) == []


OBS_LARGE = {"sizes": (2.5e5, 16.0)}


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"gamma": 0.0}, ("gamma=0 counts the next reward only", "200 steps on average")),
        ({"gamma": 0.5}, ("gamma=0.5 looks about 2 steps ahead", "gamma=0.99")),
        (OBS_LARGE, ("observations have magnitude 2.5e+05", "observation_filter=MeanStdFilter")),
    ],
)
def test_settings_and_observations_that_keep_a_run_from_learning_are_told(about, words, caplog):
    (line,) = told(caplog, [{}] * 9, **about)
    for each in words:
        assert each in line
    assert told(caplog, [{}] * 2, **about) == []


@pytest.mark.parametrize(
    "about",
    [
        {"gamma": 0.9, "run": {"episode_len_mean": 200.0}},
        {"gamma": 0.99, "run": {"episode_len_mean": 27_000.0}},
        {"gamma": 1.0},
        {"gamma": 0.0, "run": {"episode_len_mean": 1.0}},
        {"sizes": (900.0, 16.0)},
        {"sizes": (math.nan, math.nan)},
    ],
)
def test_usual_horizons_and_observations_say_nothing(about, caplog):
    assert told(caplog, [{}] * 9, **about) == []


@pytest.mark.parametrize(
    ("about", "stats", "told_first"),
    [
        ({"gamma": 0.0}, {}, "gamma=0"),
        (OBS_LARGE, {"kl": 5.0, "entropy": 1e-5}, "observations have magnitude"),
        ({}, {"kl": 1e-9, "cur_lr": 1e-7}, "nearly 0"),
        ({}, {"kl": 5.0, "entropy": 1e-5, "vf_loss": 1e12}, "far over kl_target"),
        ({}, {"entropy": 0.69, "entropy_coeff": 9.0, "kl": 1e-9}, "the entropy bonus"),
    ],
)
def test_the_line_about_a_cause_hides_those_about_what_it_explains(
    about, stats, told_first, caplog
):
    (line,) = told(caplog, [{**CLIPPED, **stats}] * 20, **about)
    assert told_first in line


def test_symptoms_wait_until_the_cause_has_had_its_time_to_show(caplog):
    same = [RolloutMetrics(200, -200.0)] * 60
    flat = {"episodes": same, "first_returns": [-200.0] * 20, "recent_returns": {"mean": -200.0}}
    assert told(caplog, [CLIPPED] * 9, run=flat) == []  # the returns may differ yet
    (line,) = told(caplog, [CLIPPED] * 9, run={**flat, "episodes": same * 2})
    assert line.startswith(
        "Environment 'CartPole-v1': the return was -200 in each of the last 120 "
    )
    never = {"episodes": [], "episodes_total": 0, "first_returns": []}
    assert told(caplog, [CLIPPED] * 9, run=never) == []  # episodes may end yet
    (line,) = told(caplog, [CLIPPED] * 9, run={**never, "num_env_steps_sampled": 10_000})
    assert line.startswith("Environment 'CartPole-v1': no episode has ended after 10,000 steps")
    assert told(caplog, [CLIPPED] * 9, run={"episodes_total": 39}) == []  # too few to judge by


@pytest.mark.parametrize("about", [{"gamma": 0.5}, OBS_LARGE])
def test_no_cause_is_named_before_forty_episodes_show_whether_the_run_learns(about, caplog):
    assert told(caplog, [{}] * 9, run={"episodes_total": 39}, **about) == []
    assert len(told(caplog, [{}] * 9, run={"episodes_total": 40}, **about)) == 1


@pytest.mark.parametrize(("mean", "count"), [(-1101.0, 1), (-1099.0, 0), (math.nan, 1)])
def test_a_run_whose_returns_grow_by_a_deviation_is_finite(mean, count, caplog):
    run = {"recent_returns": {"mean": mean}}
    assert len(told(caplog, [CLIPPED] * 9, run=run)) == count
    assert told(caplog, [CLIPPED] * 9, run={**run, "first_returns": None}) == []  # not known


def test_values_that_rewards_allow_are_no_explosion(caplog):
    assert told(caplog, [{"vf_loss": 4e6, "vf_explained_var": 0.5}] * 9) == []
    assert told(caplog, [{"mean_q": 4e3}] * 9) == []
    assert told(caplog, [{"mean_q": 4e3}] * 9, sizes=(1.0, 0.0)) == []  # no reward was seen
    soft = {"mean_q": 300.0, "alpha_value": 1.0, "target_entropy": -1.0}
    assert told(caplog, [soft] * 9, sizes=(1.0, 0.01)) == []  # entropy is rewarded, too
    (line,) = told(caplog, [{"vf_loss": 4e6, "vf_explained_var": 0.05}] * 9)
    assert "values are wrong by 2e+03 on average" in line
    both_ways = [{"mean_td_error": -2e3}, {"mean_td_error": 2e3}] * 5  # with replay
    (line,) = told(caplog, both_ways)
    assert "values are wrong by 2e+03 on average" in line


def test_a_policy_of_several_is_told_its_own_mean_return(caplog):
    result = {"episode_reward_mean": 0.0, "policy_reward_mean": {"cat": -7.5, "mouse": 7.5}}
    cat = PolicyStats("cat", CLIPPED, PPOConfig().to_dict(), TWO, result)
    assert "(the mean return is -7.5)" in health_checks._check_value_errors(cat)


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
    lines = told(caplog, [{}], run=run)
    assert len(lines) == count
    for line in lines:
        assert line.startswith(
            "Policy 'p': the return of its agents was 20 in each of the last 100"
        )
        assert "policy_mapping_fn" in line
    alone = {**run, "policy_reward_mean": {"p": 20.0}}
    assert told(caplog, [{}], run=alone) == []


def test_each_thing_is_told_of_one_policy_alone(caplog):
    observer, config = HealthChecks(), PPOConfig()
    result = {"num_env_steps_sampled": 1, "info": {"learner": {"p": {}}}}
    result |= {f"num_env_steps_{x}_this_iter": 1 for x in ("sampled", "trained")}
    learned = [PolicyStats(name, CLIPPED, config.to_dict(), TWO, result) for name in "abc"]
    result["episodes_total"] = 90
    for _ in range(5):
        observer.check(RunStats(result, config, EPISODES, 1), learned)
    assert len(caplog.records) == 1


# -- whole runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_sound_run_of_ppo_says_nothing(env, caplog):
    config = ppo(env, num_sgd_iter=5, vf_clip_param=float("inf"), lambda_=0.9)
    config.update_from_dict(get_tuned_settings("PPO", env)).rollouts(num_envs_per_worker=4)
    assert lines(caplog, config, 8) == []


def dqn(env, **settings):
    config = DQNConfig().environment(env).debugging(seed=0)
    config.framework(inference="tf", jit_compile=False)
    more = {"train_batch_size": 16, "num_steps_sampled_before_learning_starts": 64}
    config.training(model={"fcnet_hiddens": [8]}, hiddens=[8], **more, **settings)
    return config.reporting(min_sample_timesteps_per_iteration=64)


def test_a_sound_run_of_dqn_says_nothing(caplog):
    assert lines(caplog, dqn("CartPole-v1"), 5) == []


def test_a_replay_that_hardly_updates_is_told_the_intensity_that_helps(caplog):
    config = dqn("CartPole-v1").rollouts(num_envs_per_worker=8)
    (line,) = lines(caplog, config, 6)
    assert "one update per 8 sampled steps, since 8 environments" in line
    assert "training_intensity=16" in line
    caplog.clear()
    config = dqn("CartPole-v1", training_intensity=16).rollouts(num_envs_per_worker=8)
    assert lines(caplog, config, 5) == []


def test_a_run_that_ends_before_learning_starts_says_so_at_its_beginning_and_end(caplog):
    config = dqn("CartPole-v1")
    config.training(num_steps_sampled_before_learning_starts=100)
    algorithm = config.build()
    algorithm.learn(64)
    begins, ends = (record.getMessage() for record in caplog.records)
    assert begins.startswith("There will be no or hardly any updates: learning starts after ")
    assert "num_steps_sampled_before_learning_starts=100 steps, and the run has 64. Train" in begins
    assert ends.startswith("No update was done: learning starts after ")
    assert "--set num_steps_sampled_before_learning_starts=N" in ends
    caplog.clear()
    algorithm.learn(192)
    algorithm.stop()
    assert not caplog.records


def test_returns_that_are_too_large_for_the_clipped_value_errors_are_told(caplog):
    (line,) = lines(caplog, ppo(lambda _: Noisy()), 11)
    assert "squared error is above vf_clip_param=10" in line
    assert "--set vf_clip_param=inf" in line
    assert "(the mean return is -3" in line


def test_rewards_that_never_come_are_told_after_a_hundred_episodes(caplog):
    config = ppo(lambda _: Flat(), use_critic=False)
    config.training(use_gae=False).rollouts(batch_mode="complete_episodes")
    (line,) = lines(caplog, config, 5)  # and none that the policy's loss is 0
    assert line.startswith("Environment '<lambda>': the return was 0 in each of the last 100 epis")


def test_rewards_of_agents_that_cancel_out_are_rewards(caplog):
    rng = np.random.default_rng(0)

    class Zero(MultiAgentEnv):
        observation_space, action_space = Flat.observation_space, TWO
        _agent_ids = frozenset(("left", "right"))

        def reset(self, *, seed=None, options=None):
            return dict.fromkeys(self._agent_ids, np.zeros(2, np.float32)), {}

        def step(self, action_dict):
            obs = dict.fromkeys(self._agent_ids, np.zeros(2, np.float32))
            left = 1.0 if rng.integers(2) else -1.0
            rewards = {"left": left, "right": -left}
            return obs, rewards, {"__all__": True}, {"__all__": False}, {}

    assert lines(caplog, ppo(Zero), 2) == []


def test_episodes_that_never_end_are_told_and_why_the_mean_is_nan(caplog, monkeypatch):
    monkeypatch.setattr(health_checks, "_MAX_STEPS_WITHOUT_END", 256)
    endless = ppo(lambda _: Flat(reward=0.1, length=0)).rollouts(num_envs_per_worker=2)
    assert lines(caplog, endless, 3) == []
    (line,) = lines(caplog, endless, 4)
    assert "no episode has ended after 256 steps of each environment" in line
    assert "TimeLimit" in line


def test_agents_without_a_policy_to_train_are_told(caplog):
    class One(MultiAgentEnv):
        observation_space, action_space = Flat.observation_space, TWO
        _agent_ids = frozenset(("only",))

        def reset(self, *, seed=None, options=None):
            return {"only": np.zeros(2, np.float32)}, {}

        def step(self, action_dict):
            obs = {"only": np.zeros(2, np.float32)}
            return obs, {"only": 1.0}, {"__all__": True}, {"__all__": False}, {}

    config = ppo(One).multi_agent(
        policies=["a", "b"], policy_mapping_fn=lambda *a, **k: "a", policies_to_train=["b"]
    )
    (line,) = lines(caplog, config, 4)
    assert "sampled 128 steps, but updated no policy" in line
    assert "policy_mapping_fn" in line


def test_a_policy_without_numbers_of_its_own_is_no_trouble(caplog):
    stats = types.MappingProxyType({"entropy": "high", "kl": None})
    assert told(caplog, [stats] * 9) == []
