"""The training loop: results, counters, repeatability, learning, acting and memory."""

import gc
import json
import math
import time
import tracemalloc
import types

import gymnasium as gym
import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.environments import BoxActionEnv, CountingEnv, SeededEnv, TwoArmsEnv, counting_creator
from soak.memory import resident_megabytes
from tfpolicies import (
    PG,
    PPO,
    Algorithm,
    AlgorithmConfig,
    DefaultCallbacks,
    PGConfig,
    Policy,
    PolicySpec,
    PPOConfig,
)
from tfpolicies.algorithms.training_metrics import TrainingMetrics
from tfpolicies.errors import ConfigError, EnvError, UnknownPolicyError, UsageError
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.program.compile_mode import CompileMode
from tfpolicies.program.learn_batch import BatchReader
from tfpolicies.rollout.episode import RolloutMetrics

pytestmark = pytest.mark.usefixtures("kept_programs")


def creator(kind, *arguments):
    return lambda context: kind(*arguments)


def tiny(env=SeededEnv, kind=PPOConfig):
    config = (
        kind()
        .environment(env if isinstance(env, str) else creator(env))
        .training(model={"fcnet_hiddens": [8]}, train_batch_size=32, lr=1e-2)
        .rollouts(num_envs_per_worker=2)
        .framework(inference="tf", jit_compile=False)
        .debugging(seed=4, log_level="ERROR")
    )
    if kind is PPOConfig:
        config.training(sgd_minibatch_size=16, num_sgd_iter=2)
    return config


def test_an_algorithm_is_shown_by_its_class_environment_and_iteration():
    algorithm = tiny("CartPole-v1").build()
    algorithm.train()
    assert repr(algorithm) == "PPO(env='CartPole-v1', iteration=1)"
    assert repr(object.__new__(PPO)) == "PPO(iteration=0)"


def test_recent_returns_are_those_of_the_last_steps_and_the_first_go_to_checkpoints():
    results = TrainingMetrics(tiny().build().config)

    class Workers:
        fresh = []

        def get_metrics(self):
            return self.fresh

        def __getattr__(self, name):
            return lambda: types.SimpleNamespace(get_node_ip=lambda: "")

    def iterate(returns, length=200):
        results.begin_iteration()
        Workers.fresh = [RolloutMetrics(length, value) for value in returns]
        results.counters["num_env_steps_sampled"] += length * len(returns)
        return results.make_result(1, {}, Workers())["recent_returns"]

    few = iterate([-1200.0] * 3)
    assert few == {**few, "mean": -1200.0, "std": 0.0, "episodes": 3, "env_steps": 600}
    for _ in range(8):
        iterate([-1200.0] * 5)
    last = iterate([-150.0] * 5)  # the run has 48 episodes of 200 steps
    assert last["episodes"] == 9  # of the last fifth of 9,600 steps
    assert last["min"] == -1200.0
    assert last["mean"] == np.mean([-1200.0] * 4 + [-150.0] * 5)
    for _ in range(60):
        late = iterate([-150.0] * 5)
    assert (late["episodes"], late["env_steps"], late["mean"]) == (50, 10_000, -150.0)
    assert iterate([-100.0] * 80)["episodes"] == 80  # all of a long iteration
    assert iterate([-100.0] * 2, length=30_000)["episodes"] == 5
    again = TrainingMetrics(results._config)
    again.set_progress(json.loads(json.dumps(results.get_progress(9))))
    assert again.first_returns == [-1200.0] * 20
    old = {name: x for name, x in results.get_progress(9).items() if name != "first_returns"}
    again.set_progress(old)
    assert again.first_returns is None


# -- results ----------------------------------------------------------------------------------


@pytest.mark.core
def test_an_iteration_reports_what_is_documented():
    algorithm = tiny().build()
    algorithm.train()
    result = algorithm.train()
    assert result["training_iteration"] == algorithm.iteration == 2
    for name in (
        "num_env_steps_sampled",
        "num_agent_steps_sampled",
        "num_env_steps_trained",
        "num_agent_steps_trained",
    ):
        assert result[name] == result["counters"][name] == result["info"][name] == 64
    assert result["timesteps_total"] == result["agent_timesteps_total"] == 64
    assert result["num_env_steps_sampled_this_iter"] == 32
    assert result["num_env_steps_trained_this_iter"] == 32
    assert result["num_steps_trained_this_iter"] == 32
    assert result["num_env_steps_sampled_throughput_per_sec"] > 0
    assert result["num_env_steps_trained_throughput_per_sec"] > 0
    assert result["episodes_total"] == 12  # 2 environments x 32 steps, five steps to an episode
    assert result["episodes_this_iter"] == 6
    assert result["episode_len_mean"] == 5.0
    assert 0 <= result["episode_reward_min"] <= result["episode_reward_mean"]
    assert result["episode_reward_mean"] <= result["episode_reward_max"] <= 5.0
    assert len(result["hist_stats"]["episode_reward"]) == 12
    assert result["sampler_results"]["episode_reward_mean"] == result["episode_reward_mean"]
    assert result["num_faulty_episodes"] == 0
    assert result["custom_metrics"] == {}
    assert result["done"] is False
    assert result["config"]["lr"] == 1e-2
    assert result["config"]["seed"] == 4
    assert 0 < result["time_this_iter_s"] <= result["time_total_s"]
    timers = result["timers"]
    assert 0 < timers["synch_weights_time_ms"] < timers["training_iteration_time_ms"]
    assert timers["learn_throughput"] == pytest.approx(32e3 / timers["learn_time_ms"])
    assert result["iterations_since_restore"] == 2
    assert result["time_since_restore"] == result["time_total_s"]
    assert result["node_ip"] == algorithm.worker.get_node_ip()
    assert result["trial_id"] == "default"
    parts = timers["sample_time_ms"] + timers["load_time_ms"] + timers["learn_time_ms"]
    assert 0 < parts <= timers["training_iteration_time_ms"]
    for name in ("date", "timestamp", "pid", "hostname"):
        assert result[name]
    learner = result["info"]["learner"]["default_policy"]
    assert learner["num_agent_steps_trained"] == 32
    assert learner["num_grad_updates_lifetime"] == 8
    assert {"total_loss", "policy_loss", "vf_loss", "kl", "entropy", "cur_lr"} <= set(
        learner["learner_stats"]
    )
    assert all(math.isfinite(value) for value in learner["learner_stats"].values())


SUMMARY = {
    "episode_reward_max",
    "episode_reward_min",
    "episode_reward_mean",
    "episode_len_mean",
    "episodes_this_iter",
    "num_faulty_episodes",
    "policy_reward_min",
    "policy_reward_max",
    "policy_reward_mean",
    "custom_metrics",
    "hist_stats",
    "sampler_perf",
    "connector_metrics",
    "episode_media",
}
COUNTERS = {
    f"num_{unit}_steps_{what}" for unit in ("env", "agent") for what in ("sampled", "trained")
}
WORKERS = {"num_healthy_workers", "num_in_flight_async_reqs", "num_remote_worker_restarts"}
TIMERS = {
    "training_iteration_time_ms",
    "sample_time_ms",
    "load_time_ms",
    "load_throughput",
    "learn_time_ms",
    "learn_throughput",
    "synch_weights_time_ms",
}


@pytest.mark.core
@pytest.mark.parametrize("unit", ["env_steps", "agent_steps"])
def test_results_have_these_keys_and_no_others(unit):
    config = tiny().multi_agent(count_steps_by=unit)
    result = config.evaluation(evaluation_interval=1, evaluation_duration=1).build().train()
    assert set(result) == {
        *SUMMARY,
        *COUNTERS,
        *WORKERS,
        "sampler_results",
        "recent_returns",
        "info",
        "counters",
        "timers",
        "perf",
        "evaluation",
        f"num_{unit}_sampled_this_iter",
        f"num_{unit}_trained_this_iter",
        "num_env_steps_sampled_throughput_per_sec",
        f"num_{unit}_sampled_throughput_per_sec",
        f"num_{unit}_trained_throughput_per_sec",
        "num_steps_trained_this_iter",
        "timesteps_total",
        "agent_timesteps_total",
        "done",
        "episodes_total",
        "training_iteration",
        "trial_id",
        "date",
        "timestamp",
        "time_this_iter_s",
        "time_total_s",
        "time_since_restore",
        "iterations_since_restore",
        "pid",
        "hostname",
        "node_ip",
        "config",
    }
    speed = result["time_this_iter_s"] * result["num_env_steps_sampled_throughput_per_sec"]
    assert speed == pytest.approx(result["num_env_steps_sampled"])
    assert set(result["sampler_results"]) == SUMMARY
    assert set(result["timers"]) == TIMERS
    assert set(result["info"]) == {"learner", *COUNTERS}
    assert set(result["counters"]) == COUNTERS
    assert set(result["evaluation"]) == {
        *SUMMARY,
        *WORKERS,
        "episode_reward_std",
        "sampler_results",
        "num_agent_steps_sampled_this_iter",
        "num_env_steps_sampled_this_iter",
        "timesteps_this_iter",
    }


def test_loading_is_timed_apart_from_learning(monkeypatch):
    def slow(reader, batch):
        time.sleep(0.05)
        return read(reader, batch)

    read = BatchReader.read

    algorithm = tiny().build()
    algorithm.get_policy().load_batch_into_buffer(algorithm.worker.sample())
    monkeypatch.setattr(BatchReader, "read", slow)
    algorithm.train()
    timers = algorithm.train()["timers"]
    assert timers["load_time_ms"] >= 50
    assert timers["load_throughput"] == pytest.approx(32e3 / timers["load_time_ms"])
    parts = [timers[f"{name}_time_ms"] for name in ("sample", "load", "learn", "synch_weights")]
    assert sum(parts) <= timers["training_iteration_time_ms"]


def test_results_say_how_busy_the_machine_is_unless_told_not_to():
    perf = tiny().build().train()["perf"]
    assert set(perf) == {"cpu_util_percent", "ram_util_percent"}
    assert all(0 < percent <= 100 for percent in perf.values())
    assert tiny().debugging(log_sys_usage=False).build().train()["perf"] == {}


def test_returns_are_nan_before_the_first_episode_ended():
    class Endless(CountingEnv):
        def length(self, episode):
            return 10**6

    result = tiny(Endless).build().train()
    for name in ("episode_reward_mean", "episode_reward_min", "episode_reward_max"):
        assert math.isnan(result[name])
    assert math.isnan(result["episode_len_mean"])
    assert result["episodes_this_iter"] == result["episodes_total"] == 0


def test_returns_are_smoothed_over_the_window_or_the_iteration():
    short = tiny().reporting(metrics_num_episodes_for_smoothing=4).build()
    assert len(short.train()["hist_stats"]["episode_reward"]) == 6  # all of this iteration
    long = tiny().reporting(metrics_num_episodes_for_smoothing=9).build()
    first = long.train()["hist_stats"]["episode_reward"]
    second = long.train()["hist_stats"]["episode_reward"]
    assert (len(first), len(second)) == (6, 9)
    assert second[:3] == first[3:]


def test_an_iteration_goes_on_until_it_sampled_enough():
    algorithm = tiny().reporting(min_sample_timesteps_per_iteration=100).build()
    result = algorithm.train()
    assert result["num_env_steps_sampled_this_iter"] == 128
    assert result["num_env_steps_trained_this_iter"] == 128
    assert result["training_iteration"] == 1
    slow = tiny().reporting(min_time_s_per_iteration=0.2).build()
    assert slow.train()["time_this_iter_s"] >= 0.2


def test_a_train_batch_is_joined_from_as_many_samples_as_it_takes():
    algorithm = tiny().rollouts(rollout_fragment_length=4).build()
    batch = algorithm.sample_train_batch()["default_policy"]
    assert batch.count == algorithm._count_expected_train_batch_rows() == 32
    assert len(set(batch["unroll_id"].tolist())) >= 8


@pytest.mark.parametrize("how", [True, "bulk"])
def test_compressed_observations_train_alike(how):
    plain = tiny().rollouts(rollout_fragment_length=8).build()
    packed = tiny().rollouts(rollout_fragment_length=8, compress_observations=how).build()
    expected, actual = plain.train(), packed.train()
    assert actual["info"]["learner"] == expected["info"]["learner"]


@pytest.mark.core
def test_a_vector_environment_that_decides_its_number_shares_the_train_batch(capsys):
    config = tiny().environment(counting_creator("next_step", 4)).debugging(log_level="WARN")
    algorithm = config.rollouts(num_envs_per_worker=1).build()
    assert "4 environments x 8 steps per sample." in capsys.readouterr().out
    assert algorithm._count_expected_train_batch_rows() == 32
    assert algorithm.train()["num_env_steps_sampled"] == 32
    assert algorithm.config.rollout_fragment_length == 8


def test_a_vector_environment_that_decides_its_number_is_resumed(tmp_path):
    make = counting_creator("next_step", 3)
    config = tiny().environment(make).rollouts(num_envs_per_worker=2)
    algorithm = config.build()
    algorithm.save(tmp_path)
    resumed = Algorithm.from_checkpoint(tmp_path, config={"env": make})
    assert resumed.config.rollout_fragment_length == algorithm.config.rollout_fragment_length == 11
    assert resumed.train()["num_env_steps_sampled"] == algorithm.train()["num_env_steps_sampled"]


def test_global_time_reaches_the_policy_and_its_schedules():
    config = tiny().training(lr_schedule=[[0, 1e-2], [64, 0.0]])
    algorithm = config.build()
    assert algorithm.train()["info"]["learner"]["default_policy"]["learner_stats"]["cur_lr"] == (
        pytest.approx(1e-2)
    )
    assert algorithm.get_policy().global_timestep == 32
    assert algorithm.get_policy().get_hyperparameter("lr") == pytest.approx(5e-3)
    algorithm.train()
    assert algorithm.get_policy().get_hyperparameter("lr") == 0.0
    assert algorithm.worker.get_global_vars() == {
        "timestep": 64,
        "num_grad_updates_per_policy": {"default_policy": 8},
    }


# -- callbacks and the end --------------------------------------------------------------------


def test_callbacks_come_at_their_moments_and_may_add_results():
    calls = []

    class Noting(DefaultCallbacks):
        def on_algorithm_init(self, *, algorithm):
            calls.append(("init", type(algorithm)))

        def on_sample_end(self, *, worker, samples):
            calls.append(("sample", samples.count))

        def on_learn_on_batch(self, *, policy, train_batch, result):
            calls.append(("learn", len(train_batch["obs"])))
            result["rows_seen"] = 1

        def on_episode_end(self, *, worker, base_env, policies, episode, env_index):
            episode.custom_metrics["length"] = episode.length

        def on_train_result(self, *, algorithm, result):
            calls.append(("result", result["training_iteration"]))
            result["own"] = 7

    algorithm = tiny().callbacks(Noting).build()
    result = algorithm.train()
    minibatches = [("learn", 16)] * 4  # two epochs of two
    assert calls == [("init", PPO), ("sample", 32), *minibatches, ("result", 1)]
    assert result["own"] == 7
    assert result["custom_metrics"] == {"length_mean": 5.0, "length_min": 5.0, "length_max": 5.0}
    assert result["info"]["learner"]["default_policy"]["custom_metrics"] == {"rows_seen": 1}


NOTES = {
    "a text": ("custom_metrics", "fast", r"custom_metrics\['x'\] must be a number, got 'fast'"),
    "nothing": (
        "custom_metrics",
        None,
        r"custom_metrics\['x'\] must be a number, got None\. Use `epi",
    ),
    "a list": ("custom_metrics", [1.0], r"custom_metrics\['x'\] must be a number, got \[1\.0\]"),
    "a number": ("hist_data", 1.0, r"hist_data\['x'\] must be a list of numbers, got 1\.0"),
    "texts": ("hist_data", ["a"], r"hist_data\['x'\] must be a list of numbers, got \['a'\]"),
}


@pytest.mark.parametrize("what", NOTES)
def test_notes_of_callbacks_that_are_no_numbers_are_named(what):
    kind, value, message = NOTES[what]

    class Noting(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            getattr(episode, kind)["x"] = value

    with pytest.raises(UsageError, match=rf"episode\.{message}"):
        tiny().callbacks(Noting).build().train()


@pytest.mark.core
def test_stop_closes_once_and_training_is_refused_afterwards():
    envs = []

    def create(context):
        envs.append(CountingEnv(context.vector_index))
        return envs[-1]

    algorithm = tiny().environment(create).build()
    algorithm.evaluate()
    algorithm.stop()
    algorithm.stop()
    assert {env.closed for env in envs} == {1}
    with pytest.raises(UsageError, match="was stopped"):
        algorithm.train()
    assert algorithm.iteration == 0


# -- building ---------------------------------------------------------------------------------


def test_an_algorithm_is_built_from_a_config_or_a_dict():
    settings = {"env": "CartPole-v1", **tiny("CartPole-v1").to_dict()}
    algorithm = PPO(settings)
    assert isinstance(algorithm.config, PPOConfig)
    assert algorithm.train()["timesteps_total"] == 32
    config = tiny("CartPole-v1")
    assert PPO(config).config is config
    assert config.is_frozen


@pytest.mark.parametrize(
    ("env", "words"), [("CartPol-v1", "CartPole-v1"), (7, "must be a name"), ("a:B", "imported")]
)
def test_a_wrong_environment_is_refused_when_building(env, words):
    with pytest.raises((EnvError, ConfigError), match=words):
        tiny().environment(env).build()


def test_contradictions_and_unknown_settings_are_refused_when_building():
    with pytest.raises(ConfigError, match="sgd_minibatch_size"):
        tiny().training(sgd_minibatch_size=64).build()
    with pytest.raises(ConfigError, match="explor"):
        tiny().evaluation(evaluation_config={"explor": False}).build()
    with pytest.raises(ConfigError, match="Did you mean 'gamma'"):
        PPO({"env": "CartPole-v1", "gama": 0.9})
    with pytest.raises(ConfigError, match="no policy class"):
        Algorithm(AlgorithmConfig().environment("CartPole-v1"))


def test_what_auto_became_is_said_in_one_line(capsys):
    tiny().debugging(log_level="WARN").build()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "PPO: acting through tf, learning through tf.function, "
        "2 environments x 16 steps per sample."
    ]
    tiny().build()
    assert capsys.readouterr().out == ""


def test_an_algorithm_of_a_hand_written_policy_runs_without_learning():
    class Zero(Policy):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})

    class Watch(Algorithm):
        @classmethod
        def get_default_policy_class(cls, config):
            return Zero

    config = {"env": creator(SeededEnv), "train_batch_size": 20, "rollout_fragment_length": 10}
    algorithm = Watch(config)
    result = algorithm.train()
    assert result["num_env_steps_sampled"] == 20
    assert result["num_env_steps_trained"] == 0
    assert result["episode_reward_mean"] == 0.0
    assert algorithm.evaluate()["evaluation"]["episodes_this_iter"] == 10
    assert algorithm.compute_single_action([0.0, 0.0]) == 0


@pytest.mark.parametrize("values", [None, {"my_number": 3}])
def test_a_training_step_that_gives_no_results_of_policies_is_told_what_to_give(values):
    class Own(PPO):
        def training_step(self):
            return values

    algorithm = Own(tiny())
    with pytest.raises(UsageError, match=r"Own.training_step must return .* on_train_result"):
        algorithm.train()
    algorithm.stop()


def test_a_policy_written_by_hand_that_forgets_its_result_is_told_to_return_it():
    class Zero(Policy):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})

        def learn_on_batch(self, samples):
            pass

    algorithm = tiny().multi_agent(policies={"default_policy": PolicySpec(Zero)}).build()
    with pytest.raises(UsageError, match=r"Zero.learn_on_batch must return a dict of results"):
        algorithm.train()
    algorithm.stop()


# -- repeatability ----------------------------------------------------------------------------


def test_an_algorithm_refuses_the_config_of_another_one():
    with pytest.raises(ConfigError, match=r"PPO has settings that PG.* lacks; begin with PPOConf"):
        PPO(PGConfig().environment("CartPole-v1"))


def test_a_general_config_builds_an_algorithm_that_has_its_own_defaults_in_the_rest():
    config = AlgorithmConfig(algo_class=PPO).environment("CartPole-v1")
    config.training(lr=0.125, model={"fcnet_hiddens": [8]}).debugging(log_level="ERROR")
    algorithm = config.framework(jit_compile=False).build()
    assert type(algorithm) is PPO
    assert algorithm.config.lr == algorithm.get_policy().cur_lr == 0.125
    assert algorithm.config.train_batch_size == PPOConfig().train_batch_size == 4000
    assert algorithm.config.model["fcnet_hiddens"] == [8]
    algorithm.stop()


@pytest.mark.core
@pytest.mark.parametrize("kind", [PPOConfig, PGConfig])
@pytest.mark.parametrize("env", ["CartPole-v1", SeededEnv])
def test_one_seed_repeats_three_iterations_bit_for_bit(env, kind):
    one, other = tiny(env, kind).build(), tiny(env, kind).build()
    for _ in range(3):
        a, b = one.train(), other.train()
        assert a["info"]["learner"] == b["info"]["learner"]
        np.testing.assert_equal(a["hist_stats"], b["hist_stats"])
        assert a["timesteps_total"] == b["timesteps_total"]
    for key, value in one.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(other.get_weights()["default_policy"][key], value)


def test_two_algorithms_side_by_side_do_not_disturb_each_other():
    alone = tiny().build()
    for _ in range(3):
        alone.train()
    one, other = tiny().build(), tiny().debugging(seed=5).training(lr=0.1).build()
    for _ in range(3):
        one.train()
        other.train()
    for key, value in alone.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(one.get_weights()["default_policy"][key], value)


def test_another_seed_gives_other_weights_and_experience():
    one, other = tiny().build(), tiny().debugging(seed=5).build()
    kernels = [a.get_weights()["default_policy"]["layer_0/kernel"] for a in (one, other)]
    assert not np.array_equal(*kernels)
    assert one.train()["info"]["learner"] != other.train()["info"]["learner"]


def test_weights_are_given_as_copies_and_taken_over():
    one, other = tiny().build(), tiny().debugging(seed=5).build()
    weights = one.get_weights()
    other.set_weights(weights)
    for value in weights["default_policy"].values():
        value[...] = 0.0
    for key, value in other.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(value, one.get_weights()["default_policy"][key])
    assert any(value.any() for value in one.get_weights()["default_policy"].values())
    assert one.get_weights(["nobody"]) == {}
    assert one.get_policy("nobody") is None


# -- learning ---------------------------------------------------------------------------------


def test_ppo_learns_to_balance_the_pole():
    algorithm = (
        PPOConfig()
        .environment("CartPole-v1")
        .rollouts(num_envs_per_worker=8)
        .training(
            model={"fcnet_hiddens": [32, 32]},
            train_batch_size=1024,
            sgd_minibatch_size=128,
            num_sgd_iter=8,
            lr=1e-3,
            gamma=0.98,
            lambda_=0.9,
            kl_coeff=0.0,
            clip_param=0.2,
            vf_clip_param=math.inf,
        )
        .framework(jit_compile=False)
        .debugging(seed=1, log_level="ERROR")
        .reporting(metrics_num_episodes_for_smoothing=20)
        .build()
    )
    first = algorithm.train()["episode_reward_mean"]
    assert first < 40
    for _ in range(40):
        best = algorithm.train()["episode_reward_mean"]
        if best > 150:
            break
    assert best > 150


@pytest.mark.core
@pytest.mark.parametrize("kind", [PPOConfig, PGConfig])
def test_a_choice_between_two_arms_is_learned(kind):
    config = tiny(TwoArmsEnv, kind).training(lr=0.05, train_batch_size=64)
    algorithm = config.rollouts(num_envs_per_worker=8).build()
    for _ in range(30):
        algorithm.train()
    assert algorithm.compute_single_action([1.0, 0.0], explore=False) == 0
    assert algorithm.compute_single_action([0.0, 1.0], explore=False) == 1
    assert algorithm.train()["episode_reward_mean"] > 0.9


def test_pendulum_runs_and_its_actions_stay_within_their_bounds():
    watched = []

    class Watching(gym.Wrapper):
        def step(self, action):
            watched.append(np.array(action))
            assert self.action_space.contains(action)
            return self.env.step(action)

    config = tiny().environment(lambda context: Watching(gym.make("Pendulum-v1")))
    algorithm = config.build()
    watched.clear()  # of what checked the environment
    result = [algorithm.train() for _ in range(3)][-1]
    stats = result["info"]["learner"]["default_policy"]["learner_stats"]
    assert all(math.isfinite(value) for value in stats.values())
    assert len(watched) == 96
    assert np.abs(watched).max() <= 2.0
    assert np.std(watched) > 0.1


def test_continuous_actions_approach_what_is_rewarded():
    config = tiny(BoxActionEnv).training(
        lr=0.03, train_batch_size=160, sgd_minibatch_size=80, num_sgd_iter=4, gamma=0.0
    )
    algorithm = config.rollouts(num_envs_per_worker=8).training(vf_clip_param=math.inf).build()
    first = algorithm.train()["episode_reward_mean"]
    for _ in range(30):
        last = algorithm.train()["episode_reward_mean"]
    assert last > 0.75 * first  # a loss per episode: both are negative
    action = algorithm.compute_single_action(np.zeros(2, np.float32), explore=False)
    np.testing.assert_allclose(action, 3.0, atol=0.75)


@pytest.mark.core
def test_a_keras_model_of_ones_own_learns_in_an_environment_of_ones_own():
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    initial = [weight.copy() for weight in model.get_weights()]
    config = tiny(TwoArmsEnv).training(model=model, lr=0.05, train_batch_size=64)
    algorithm = config.build()
    for _ in range(30):
        result = algorithm.train()
    assert result["episode_reward_mean"] > 0.8
    trained = algorithm.get_policy().to_keras()
    assert any(
        not np.array_equal(a, b) for a, b in zip(trained.get_weights(), initial, strict=True)
    )
    for own, kept in zip(model.get_weights(), initial, strict=True):
        np.testing.assert_array_equal(own, kept)  # a template, never changed


# -- acting -----------------------------------------------------------------------------------


def test_a_single_action_is_ready_for_the_environment():
    algorithm = tiny("CartPole-v1").build()
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    action = algorithm.compute_single_action(obs)
    assert env.action_space.contains(action)
    env.step(action)
    same, states, extras = algorithm.compute_single_action(obs, explore=False, full_fetch=True)
    assert same == algorithm.compute_single_action(input_dict={"obs": obs}, explore=False)
    assert states == []
    assert extras["action_dist_inputs"].shape == (2,)
    assert same == extras["action_dist_inputs"].argmax()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_continuous_action_is_mapped_as_asked(dtype):
    algorithm = tiny().environment(creator(BoxActionEnv, dtype, 2.0, 6.0)).build()
    space = algorithm.get_policy().action_space
    obs = np.zeros(2, np.float32)
    ready = algorithm.compute_single_action(obs, explore=False)
    normalised = algorithm.compute_single_action(
        obs, explore=False, unsquash_action=False, clip_action=False
    )
    assert space.contains(ready)
    np.testing.assert_allclose(ready, 4.0 + 2.0 * normalised, rtol=1e-6)
    clipped = algorithm.compute_single_action(
        obs, explore=False, unsquash_action=False, clip_action=True
    )
    np.testing.assert_array_equal(clipped, [2.0, 2.0])


def test_a_single_action_needs_one_observation_of_a_known_policy():
    algorithm = tiny().build()
    with pytest.raises(UnknownPolicyError, match=r"'nobody'.*default_policy"):
        algorithm.compute_single_action([0.0, 0.0], policy_id="nobody")
    for arguments in ({}, {"observation": [0.0, 0.0], "input_dict": {"obs": [0.0, 0.0]}}):
        with pytest.raises(UsageError, match="either observation or input_dict") as caught:
            algorithm.compute_single_action(**arguments)
        assert isinstance(caught.value, AssertionError)
    with pytest.raises(ValueError, match=r"\[B, 2\]"):
        algorithm.compute_single_action([0.0, 0.0, 0.0])


def test_acting_does_not_disturb_training_when_it_is_greedy():
    quiet, asked = tiny().build(), tiny().build()
    for _ in range(2):
        quiet.train()
        asked.train()
        asked.compute_single_action([0.5, 0.5], explore=False)
    for key, value in quiet.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(asked.get_weights()["default_policy"][key], value)


# -- memory -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("new_programs")
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "iterations"), [(PPOConfig, 100), (PGConfig, 50)])
def test_many_iterations_leave_no_memory_behind(kind, iterations):
    algorithm = tiny("CartPole-v1", kind).build()

    def run(iterations):
        for _ in range(iterations):
            algorithm.train()
        gc.collect()

    run(20)
    resident = resident_megabytes()
    run(iterations)
    assert resident_megabytes() - resident < 12.0
    tracemalloc.start()
    try:
        run(3)
        traced = tracemalloc.get_traced_memory()[0]
        run(10)
        assert tracemalloc.get_traced_memory()[0] - traced < 2**18
    finally:
        tracemalloc.stop()


def test_the_algorithm_classes_say_what_they_build():
    assert type(tiny(kind=PGConfig).build()) is PG
    assert type(tiny().build()) is PPO


# -- traces -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("new_programs")
def test_a_whole_run_traces_each_function_once_and_compiles_the_update_at_most_twice(monkeypatch):
    config = tiny(env="CartPole-v1").framework(inference="auto", jit_compile=True)
    config.rollouts(batch_mode="complete_episodes").training(train_batch_size=64)
    config.evaluation(evaluation_duration=3, evaluation_config={"explore": False})
    algorithm = config.build()
    program = algorithm.get_policy().program
    key = CompileMode.LOOP, False, False
    learner, shapes, rows = program.updates._compiler._learn_functions[key], set(), set()

    def spy(state, columns, *rest, **kw):
        shapes.add(str([np.shape(x) for x in tf.nest.flatten([columns, rest])]))
        return learner(state, columns, *rest, **kw)

    monkeypatch.setitem(program.updates._compiler._learn_functions, key, spy)
    for _ in range(12):
        rows.add(algorithm.train()["num_env_steps_sampled_this_iter"])
        algorithm.evaluate()
    observation, _ = gym.make("CartPole-v1").reset(seed=0)
    algorithm.compute_single_action(observation)
    assert len(rows) > 3  # batches of whole episodes differ in length
    assert len(shapes) <= 2
    assert dict(program.functions.traces) == dict.fromkeys(program.functions.traces, 1)
    algorithm.stop()
