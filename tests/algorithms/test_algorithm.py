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

from helpers.custom_policies import ZeroPolicy
from helpers.environments import BoxActionEnv, CountingEnv, SeededEnv, TwoArmsEnv, counting_creator
from helpers.workers import make_small_config
from soak.memory import resident_megabytes
from tfpolicies import (
    PG,
    PPO,
    Algorithm,
    AlgorithmConfig,
    DefaultCallbacks,
    PGConfig,
    PolicySpec,
    PPOConfig,
)
from tfpolicies.algorithms.training_metrics import TrainingMetrics
from tfpolicies.errors import ConfigError, EnvError, UnknownPolicyError, UsageError
from tfpolicies.program.compile_mode import CompileMode
from tfpolicies.program.learn_batch import BatchReader
from tfpolicies.rollout.episode import RolloutMetrics

pytestmark = pytest.mark.usefixtures("kept_programs")


def tiny(env=SeededEnv, config_class=PPOConfig):
    model = {"fcnet_hiddens": [8]}
    create = env if isinstance(env, str) else lambda context: env()
    return make_small_config(
        create, config_class, seed=4, model=model, lr=1e-2, num_envs_per_worker=2
    )


def get_learner_result(result):
    return result["info"]["learner"]["default_policy"]


def test_an_algorithm_is_shown_by_its_class_environment_and_iteration():
    algorithm = tiny("CartPole-v1").build()
    algorithm.train()
    assert repr(algorithm) == "PPO(env='CartPole-v1', iteration=1)"
    assert repr(object.__new__(PPO)) == "PPO(iteration=0)"


def test_recent_returns_are_those_of_the_last_steps_and_the_first_go_to_checkpoints():
    config = tiny().build().config
    results = TrainingMetrics(config)

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
    again, progress = TrainingMetrics(config), results.get_progress(9)
    again.set_progress(json.loads(json.dumps(progress)))
    assert again.first_returns == [-1200.0] * 20
    del progress["first_returns"]  # as in older files
    again.set_progress(progress)
    assert again.first_returns is None


# -- results ----------------------------------------------------------------------------------


@pytest.mark.core
def test_an_iteration_reports_the_documented_numbers():
    algorithm = tiny().build()
    algorithm.train()
    result = algorithm.train()
    assert result["training_iteration"] == algorithm.iteration == 2
    for name in COUNTERS:
        assert result[name] == result["counters"][name] == result["info"][name] == 64
    assert result["timesteps_total"] == result["agent_timesteps_total"] == 64
    for name in ("env_steps_sampled", "env_steps_trained", "steps_trained"):
        assert result[f"num_{name}_this_iter"] == 32
    assert result["num_env_steps_sampled_throughput_per_sec"] > 0
    assert result["num_env_steps_trained_throughput_per_sec"] > 0
    assert result["episodes_total"] == 12  # 2 environments x 32 steps, five steps to an episode
    expected = {"episodes_this_iter": 6, "episode_len_mean": 5.0, "num_faulty_episodes": 0}
    expected |= {"custom_metrics": {}, "done": False, "trial_id": "default"}
    expected |= {"iterations_since_restore": 2, "node_ip": algorithm.worker.get_node_ip()}
    assert {name: result[name] for name in expected} == expected
    assert 0 <= result["episode_reward_min"] <= result["episode_reward_mean"]
    assert result["episode_reward_mean"] <= result["episode_reward_max"] <= 5.0
    assert len(result["hist_stats"]["episode_reward"]) == 12
    assert result["sampler_results"]["episode_reward_mean"] == result["episode_reward_mean"]
    assert (result["config"]["lr"], result["config"]["seed"]) == (1e-2, 4)
    assert 0 < result["time_this_iter_s"] <= result["time_total_s"]
    timers = result["timers"]
    assert 0 < timers["synch_weights_time_ms"] < timers["training_iteration_time_ms"]
    assert timers["learn_throughput"] == pytest.approx(32e3 / timers["learn_time_ms"])
    assert result["time_since_restore"] == result["time_total_s"]
    parts = timers["sample_time_ms"] + timers["load_time_ms"] + timers["learn_time_ms"]
    assert 0 < parts <= timers["training_iteration_time_ms"]
    for name in ("date", "timestamp", "pid", "hostname"):
        assert result[name]
    learner = get_learner_result(result)
    assert learner["num_agent_steps_trained"] == 32
    assert learner["num_grad_updates_lifetime"] == 8
    assert {"total_loss", "policy_loss", "vf_loss", "kl", "entropy", "cur_lr"} <= set(
        learner["learner_stats"]
    )
    assert all(math.isfinite(value) for value in learner["learner_stats"].values())


SUMMARY = """
episode_reward_max episode_reward_min episode_reward_mean episode_len_mean episodes_this_iter
num_faulty_episodes policy_reward_min policy_reward_max policy_reward_mean custom_metrics
hist_stats sampler_perf connector_metrics episode_media
"""
COUNTERS = {
    f"num_{unit}_steps_{what}" for unit in ("env", "agent") for what in ("sampled", "trained")
}
WORKERS = {"num_healthy_workers", "num_in_flight_async_reqs", "num_remote_worker_restarts"}
TIMERS = {
    *(f"{name}_time_ms" for name in ("training_iteration", "sample", "load", "learn")),
    *("synch_weights_time_ms", "load_throughput", "learn_throughput"),
}
EVALUATION = """
episode_reward_std sampler_results num_agent_steps_sampled_this_iter
num_env_steps_sampled_this_iter timesteps_this_iter
"""
OTHERS = """
sampler_results recent_returns policy_metrics info counters timers perf evaluation config done
trial_id
num_env_steps_sampled_throughput_per_sec num_steps_trained_this_iter timesteps_total
agent_timesteps_total episodes_total training_iteration iterations_since_restore
date timestamp time_this_iter_s time_total_s time_since_restore pid hostname node_ip
"""


@pytest.mark.core
@pytest.mark.parametrize("unit", ["env_steps", "agent_steps"])
def test_results_have_these_keys_and_no_others(unit):
    config = tiny().multi_agent(count_steps_by=unit)
    result = config.evaluation(evaluation_interval=1, evaluation_duration=1).build().train()
    summary = set(SUMMARY.split())
    rates = {
        f"num_{unit}_{what}_{rate}"
        for what in ("sampled", "trained")
        for rate in ("this_iter", "throughput_per_sec")
    }
    assert set(result) == {*summary, *COUNTERS, *WORKERS, *OTHERS.split(), *rates}
    speed = result["time_this_iter_s"] * result["num_env_steps_sampled_throughput_per_sec"]
    assert speed == pytest.approx(result["num_env_steps_sampled"])
    assert set(result["sampler_results"]) == summary
    assert set(result["timers"]) == TIMERS
    assert set(result["info"]) == {"learner", *COUNTERS}
    assert set(result["counters"]) == COUNTERS
    assert set(result["evaluation"]) == {*summary, *WORKERS, *EVALUATION.split()}


def test_loading_is_timed_apart_from_learning(monkeypatch):
    def read_slowly(reader, batch):
        time.sleep(0.05)
        return read(reader, batch)

    read, algorithm = BatchReader.read, tiny().build()
    algorithm.get_policy().load_batch_into_buffer(algorithm.worker.sample())
    monkeypatch.setattr(BatchReader, "read", read_slowly)
    algorithm.train()
    timers = algorithm.train()["timers"]
    assert timers["load_time_ms"] >= 50
    assert timers["load_throughput"] == pytest.approx(32e3 / timers["load_time_ms"])
    parts = [timers[f"{name}_time_ms"] for name in ("sample", "load", "learn", "synch_weights")]
    assert sum(parts) <= timers["training_iteration_time_ms"]


def test_results_have_the_load_of_the_machine_unless_it_is_switched_off():
    perf = tiny().build().train()["perf"]
    assert set(perf) == {"cpu_util_percent", "ram_util_percent"}
    assert all(0 < percent <= 100 for percent in perf.values())
    assert tiny().debugging(log_sys_usage=False).build().train()["perf"] == {}


def test_returns_are_nan_before_the_first_episode_ended():
    result = tiny(lambda: CountingEnv(lengths=[10**6])).build().train()
    for name in ("reward_mean", "reward_min", "reward_max", "len_mean"):
        assert math.isnan(result[f"episode_{name}"])
    assert result["episodes_this_iter"] == result["episodes_total"] == 0


def test_returns_are_smoothed_over_the_window_or_the_iteration():
    short = tiny().reporting(metrics_num_episodes_for_smoothing=4).build()
    assert len(short.train()["hist_stats"]["episode_reward"]) == 6  # all of this iteration
    long = tiny().reporting(metrics_num_episodes_for_smoothing=9).build()
    first, second = (long.train()["hist_stats"]["episode_reward"] for _ in range(2))
    assert (len(first), len(second)) == (6, 9)
    assert second[:3] == first[3:]


def test_an_iteration_continues_until_it_sampled_enough():
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
def test_compressed_observations_give_the_same_update(how):
    expected, actual = (
        tiny().rollouts(rollout_fragment_length=8, compress_observations=x).build().train()
        for x in (False, how)
    )
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
    algorithm = tiny().environment(make).rollouts(num_envs_per_worker=2).build()
    algorithm.save(tmp_path)
    resumed = Algorithm.from_checkpoint(tmp_path, config={"env": make})
    assert resumed.config.rollout_fragment_length == algorithm.config.rollout_fragment_length == 11
    assert resumed.train()["num_env_steps_sampled"] == algorithm.train()["num_env_steps_sampled"]


def test_global_time_reaches_the_policy_and_its_schedules():
    algorithm = tiny().training(lr_schedule=[[0, 1e-2], [64, 0.0]]).build()
    stats = get_learner_result(algorithm.train())["learner_stats"]
    assert stats["cur_lr"] == pytest.approx(1e-2)
    policy = algorithm.get_policy()
    assert policy.global_timestep == 32
    assert policy.get_hyperparameter("lr") == pytest.approx(5e-3)
    algorithm.train()
    assert policy.get_hyperparameter("lr") == 0.0
    updates = {"num_grad_updates_per_policy": {"default_policy": 8}}
    assert algorithm.worker.get_global_vars() == {"timestep": 64, **updates}


# -- callbacks and the end --------------------------------------------------------------------


def test_callbacks_are_called_in_order_and_may_add_results():
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
    assert get_learner_result(result)["custom_metrics"] == {"rows_seen": 1}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("custom_metrics", "fast", "a number, got 'fast'"),
        ("custom_metrics", None, r"a number, got None\. Use `epi"),
        ("custom_metrics", [1.0], r"a number, got \[1\.0\]"),
        ("hist_data", 1.0, r"a list of numbers, got 1\.0"),
        ("hist_data", ["a"], r"a list of numbers, got \['a'\]"),
    ],
)
def test_metrics_of_callbacks_that_are_not_numbers_are_named(name, value, message):
    class Noting(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            getattr(episode, name)["x"] = value

    with pytest.raises(UsageError, match=rf"episode\.{name}\['x'\] must be {message}"):
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


def test_values_of_auto_are_printed_in_one_line(capsys):
    tiny().debugging(log_level="WARN").build()
    lines = capsys.readouterr().out.splitlines()
    steps = "2 environments x 16 steps per sample"
    assert lines == [f"PPO: acting through tf, learning through tf.function, {steps}."]
    tiny().build()
    assert capsys.readouterr().out == ""


def test_an_algorithm_of_a_custom_policy_runs_without_learning():
    class Watch(Algorithm):
        @classmethod
        def get_default_policy_class(cls, config):
            return ZeroPolicy

    env = {"env": lambda context: SeededEnv()}
    algorithm = Watch({**env, "train_batch_size": 20, "rollout_fragment_length": 10})
    result = algorithm.train()
    assert result["num_env_steps_sampled"] == 20
    assert result["num_env_steps_trained"] == 0
    assert result["episode_reward_mean"] == 0.0
    assert algorithm.evaluate()["evaluation"]["episodes_this_iter"] == 10
    assert algorithm.compute_single_action([0.0, 0.0]) == 0


@pytest.mark.parametrize("values", [None, {"my_number": 3}])
def test_a_training_step_without_results_of_policies_is_refused(values):
    class Own(PPO):
        def training_step(self):
            return values

    algorithm = Own(tiny())
    with pytest.raises(UsageError, match=r"Own.training_step must return .* on_train_result"):
        algorithm.train()


def test_a_custom_policy_that_returns_no_result_is_refused():
    class Forgetful(ZeroPolicy):
        def learn_on_batch(self, samples):
            pass

    algorithm = tiny().multi_agent(policies={"default_policy": PolicySpec(Forgetful)}).build()
    with pytest.raises(UsageError, match=r"Forgetful.learn_on_batch must return a dict of results"):
        algorithm.train()


def test_an_algorithm_refuses_the_config_of_another_one():
    with pytest.raises(ConfigError, match=r"PPO has settings that PG.* lacks; begin with PPOConf"):
        PPO(PGConfig().environment("CartPole-v1"))


def test_a_general_config_has_the_defaults_of_its_algorithm():
    config = AlgorithmConfig(algo_class=PPO).environment("CartPole-v1")
    config.training(lr=0.125, model={"fcnet_hiddens": [8]}).debugging(log_level="ERROR")
    algorithm = config.framework(jit_compile=False).build()
    assert type(algorithm) is PPO
    assert algorithm.config.lr == algorithm.get_policy().cur_lr == 0.125
    assert algorithm.config.train_batch_size == PPOConfig().train_batch_size == 4000
    assert algorithm.config.model["fcnet_hiddens"] == [8]


# -- repeatability ----------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("config_class", [PPOConfig, PGConfig])
@pytest.mark.parametrize("env", ["CartPole-v1", SeededEnv])
def test_one_seed_repeats_three_iterations_bit_for_bit(env, config_class):
    one, other = tiny(env, config_class).build(), tiny(env, config_class).build()
    assert type(one) is {PPOConfig: PPO, PGConfig: PG}[config_class]
    for _ in range(3):
        a, b = one.train(), other.train()
        assert a["info"]["learner"] == b["info"]["learner"]
        np.testing.assert_equal(a["hist_stats"], b["hist_stats"])
        assert a["timesteps_total"] == b["timesteps_total"]
    np.testing.assert_equal(other.get_weights(), one.get_weights())


def test_two_algorithms_side_by_side_do_not_disturb_each_other():
    alone, one = tiny().build(), tiny().build()
    other = tiny().debugging(seed=5).training(lr=0.1).build()
    for algorithm in [alone] * 3 + [one, other] * 3:
        algorithm.train()
    np.testing.assert_equal(one.get_weights(), alone.get_weights())


def test_another_seed_gives_other_weights_and_experience():
    one, other = tiny().build(), tiny().debugging(seed=5).build()
    kernels = [a.get_weights()["default_policy"]["layer_0/kernel"] for a in (one, other)]
    assert not np.array_equal(*kernels)
    assert one.train()["info"]["learner"] != other.train()["info"]["learner"]


def test_weights_are_returned_and_set_as_copies():
    one, other = tiny().build(), tiny().debugging(seed=5).build()
    weights = one.get_weights()
    other.set_weights(weights)
    for value in weights["default_policy"].values():
        value[...] = 0.0
    np.testing.assert_equal(other.get_weights(), one.get_weights())
    assert any(value.any() for value in one.get_weights()["default_policy"].values())
    assert one.get_weights(["nobody"]) == {}
    assert one.get_policy("nobody") is None


# -- learning ---------------------------------------------------------------------------------


def test_ppo_learns_to_balance_the_pole():
    config = make_small_config(seed=1, inference="auto", metrics_num_episodes_for_smoothing=20)
    config.rollouts(num_envs_per_worker=8).training(model={"fcnet_hiddens": [32, 32]}, lr=1e-3)
    config.training(train_batch_size=1024, sgd_minibatch_size=128, num_sgd_iter=8, gamma=0.98)
    config.training(lambda_=0.9, kl_coeff=0.0, clip_param=0.2, vf_clip_param=math.inf)
    algorithm = config.build()
    first = algorithm.train()["episode_reward_mean"]
    assert first < 40
    for _ in range(40):
        best = algorithm.train()["episode_reward_mean"]
        if best > 150:
            break
    assert best > 150


@pytest.mark.core
@pytest.mark.parametrize("config_class", [PPOConfig, PGConfig])
def test_a_choice_between_two_arms_is_learned(config_class):
    config = tiny(TwoArmsEnv, config_class).training(lr=0.05, train_batch_size=64)
    algorithm = config.rollouts(num_envs_per_worker=8).build()
    for _ in range(30):
        algorithm.train()
    assert algorithm.compute_single_action([1.0, 0.0], explore=False) == 0
    assert algorithm.compute_single_action([0.0, 1.0], explore=False) == 1
    assert algorithm.train()["episode_reward_mean"] > 0.9


def test_pendulum_runs_and_its_actions_stay_within_their_bounds():
    actions = []

    class Recording(gym.Wrapper):
        def step(self, action):
            actions.append(np.array(action))
            assert self.action_space.contains(action)
            return self.env.step(action)

    algorithm = tiny(lambda: Recording(gym.make("Pendulum-v1"))).build()
    actions.clear()  # those of the check of the environment
    result = [algorithm.train() for _ in range(3)][-1]
    stats = get_learner_result(result)["learner_stats"]
    assert all(math.isfinite(value) for value in stats.values())
    assert len(actions) == 96
    assert np.abs(actions).max() <= 2.0
    assert np.std(actions) > 0.1


def test_continuous_actions_approach_the_rewarded_ones():
    config = tiny(BoxActionEnv).rollouts(num_envs_per_worker=8).training(lr=0.03, num_sgd_iter=4)
    config.training(train_batch_size=160, sgd_minibatch_size=80, gamma=0.0, vf_clip_param=math.inf)
    algorithm = config.build()
    first = algorithm.train()["episode_reward_mean"]
    for _ in range(30):
        last = algorithm.train()["episode_reward_mean"]
    assert last > 0.75 * first  # a loss per episode: both are negative
    action = algorithm.compute_single_action(np.zeros(2, np.float32), explore=False)
    np.testing.assert_allclose(action, 3.0, atol=0.75)


@pytest.mark.core
def test_a_custom_keras_model_learns_in_a_custom_environment():
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    initial = [weight.copy() for weight in model.get_weights()]
    algorithm = tiny(TwoArmsEnv).training(model=model, lr=0.05, train_batch_size=64).build()
    for _ in range(30):
        result = algorithm.train()
    assert result["episode_reward_mean"] > 0.8
    trained = algorithm.get_policy().to_keras().get_weights()
    assert not all(np.array_equal(a, b) for a, b in zip(trained, initial, strict=True))
    np.testing.assert_equal(model.get_weights(), initial)  # a template, never changed


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
def test_a_continuous_action_is_mapped_to_its_space(dtype):
    algorithm = tiny(lambda: BoxActionEnv(dtype, 2.0, 6.0)).build()

    def act(**settings):
        return algorithm.compute_single_action(np.zeros(2, np.float32), explore=False, **settings)

    assert algorithm.get_policy().action_space.contains(act())
    normalised = act(unsquash_action=False, clip_action=False)
    np.testing.assert_allclose(act(), 4.0 + 2.0 * normalised, rtol=1e-6)
    np.testing.assert_array_equal(act(unsquash_action=False, clip_action=True), [2.0, 2.0])


def test_a_single_action_needs_one_observation_of_a_known_policy():
    algorithm = tiny().build()
    with pytest.raises(UnknownPolicyError, match=r"'nobody'.*default_policy"):
        algorithm.compute_single_action([0.0, 0.0], policy_id="nobody")
    for arguments in ({}, {"observation": [0.0, 0.0], "input_dict": {"obs": [0.0, 0.0]}}):
        with pytest.raises(UsageError, match="either observation or input_dict") as error:
            algorithm.compute_single_action(**arguments)
        assert isinstance(error.value, AssertionError)
    with pytest.raises(ValueError, match=r"\[B, 2\]"):
        algorithm.compute_single_action([0.0, 0.0, 0.0])


def test_acting_does_not_disturb_training_when_it_is_greedy():
    quiet, acting = tiny().build(), tiny().build()
    for _ in range(2):
        quiet.train()
        acting.train()
        acting.compute_single_action([0.5, 0.5], explore=False)
    np.testing.assert_equal(acting.get_weights(), quiet.get_weights())


# -- memory and traces -------------------------------------------------------------------------


@pytest.mark.usefixtures("new_programs")
@pytest.mark.soak
@pytest.mark.parametrize(("config_class", "iterations"), [(PPOConfig, 100), (PGConfig, 50)])
def test_many_iterations_release_their_memory(config_class, iterations):
    algorithm = tiny("CartPole-v1", config_class).build()

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
