"""Settings of RLlib's fluent methods: defaults, constants, second names and types of values."""

import ast
import dataclasses
import logging
import math

import numpy as np
import pytest

import tfpolicies
from tfpolicies import AlgorithmConfig, PPOConfig, SACConfig
from tfpolicies.algorithms.ppo import PPOTrainingSettings
from tfpolicies.base import validators
from tfpolicies.config.rllib_settings import ALIASES, DICT_NAMES, FIXED_SETTINGS
from tfpolicies.config.setting import Merge, setting
from tfpolicies.errors import ConfigError, TfPoliciesError, show_value

# The signatures of methods of RLlib's TF stack (contract of the API).
SIGNATURES = """
environment(env=None, env_config={}, observation_space=None, action_space=None, env_task_fn=None,
    render_env=False, clip_rewards=None, normalize_actions=True, clip_actions=False,
    disable_env_checking=False, is_atari=False, auto_wrap_old_gym_envs=True,
    action_mask_key="action_mask")
rollouts(num_rollout_workers=0, num_envs_per_worker=1, rollout_fragment_length=200,
    batch_mode="truncate_episodes", create_env_on_local_worker=False, enable_connectors=True,
    observation_filter="NoFilter", update_worker_filter_stats=True, use_worker_filter_stats=True,
    compress_observations=False, preprocessor_pref="deepmind", remote_worker_envs=False,
    remote_env_batch_wait_ms=0, validate_workers_after_construction=True,
    sampler_perf_stats_ema_coef=None, sample_collector=None, enable_tf1_exec_eagerly=False,
    sample_async=False)
training(gamma=0.99, lr=0.001, grad_clip=None, grad_clip_by="global_norm", train_batch_size=32,
    optimizer={}, max_requests_in_flight_per_sampler_worker=2)
framework(framework="tf2", eager_tracing=True, eager_max_retraces=20)
exploration(explore=True)
evaluation(evaluation_interval=None, evaluation_duration=10, evaluation_duration_unit="episodes",
    evaluation_sample_timeout_s=180, evaluation_parallel_to_training=False, evaluation_config=None,
    evaluation_num_workers=0, custom_evaluation_function=None,
    always_attach_evaluation_results=False, off_policy_estimation_methods={},
    ope_split_batch_by_episode=True, enable_async_evaluation=False)
debugging(logger_creator=None, logger_config=None, log_level="WARN", log_sys_usage=True,
    fake_sampler=False, seed=None)
fault_tolerance(restart_failed_sub_environments=False, recreate_failed_workers=False,
    ignore_worker_failures=False, max_num_worker_restarts=1000, delay_between_worker_restarts_s=60,
    num_consecutive_worker_failures_tolerance=100, worker_health_probe_timeout_s=60,
    worker_restore_timeout_s=1800, env_step_timeout_s=None)
resources(num_gpus=0, _fake_gpus=False, num_cpus_per_worker=1, num_gpus_per_worker=0,
    num_cpus_for_local_worker=1, custom_resources_per_worker={}, placement_strategy="PACK",
    num_learner_workers=0, num_gpus_per_learner_worker=0)
checkpointing(export_native_model_files=False, checkpoint_trainable_policies_only=False)
reporting(keep_per_episode_custom_metrics=False, metrics_episode_collection_timeout_s=60,
    metrics_num_episodes_for_smoothing=100, min_time_s_per_iteration=None,
    min_train_timesteps_per_iteration=0, min_sample_timesteps_per_iteration=0)
offline_data(input_="sampler", input_config={}, actions_in_input_normalized=False,
    postprocess_inputs=False, shuffle_buffer_size=0, output=None, output_config={},
    output_compress_columns=["obs", "new_obs"], output_max_file_size=67108864,
    offline_sampling=False)
python_environment(extra_python_environs_for_driver={}, extra_python_environs_for_worker={})
experimental(_tf_policy_handles_more_than_one_loss=False, _disable_preprocessor_api=False,
    _disable_action_flattening=False, _disable_initialize_loss_from_dummy_batch=False)
"""
DEFAULTS = {
    call.value.func.id: {part.arg: ast.literal_eval(part.value) for part in call.value.keywords}
    for call in ast.parse(SIGNATURES).body
}


@pytest.mark.parametrize("method", DEFAULTS)
def test_every_argument_has_its_default_and_accepts_it(method):
    for name, value in DEFAULTS[method].items():
        config = AlgorithmConfig()
        assert config[name] == value, name
        assert callable(getattr(config, name)) or getattr(config, name) == value, name
        assert name in config
        assert getattr(config, method)(**{name: value}) is config
        assert config == AlgorithmConfig(), name
        assert AlgorithmConfig.from_dict({name: value}) == config


CLASSES = """
sample_collector env_runner_cls worker_cls learner_class rl_module_spec
"""
FUNCTIONS = """
env_to_module_connector module_to_env_connector learner_connector custom_async_evaluation_function
logger_creator
"""
OTHERS = {  # of those that are not the opposite of True or False
    "render_env": "human",
    "auto_wrap_old_gym_envs": None,
    "preprocessor_pref": "rllib",
    "remote_env_batch_wait_ms": 10,
    "off_policy_estimation_methods": {"is": {}},
    "logger_config": {"type": "csv"},
    "num_learner_workers": 1,
    "num_cpus_per_learner_worker": 2,
    "num_gpus_per_learner_worker": 1,
    "local_gpu_idx": 1,
    "extra_python_environs_for_driver": {"A": "b"},
    "input_": "/tmp/batches",
    "input_config": {"path": "x"},
    "shuffle_buffer_size": 5,
    "output": "logdir",
    "output_config": {"format": "json"},
    "output_compress_columns": [],
    "output_max_file_size": 1,
    "_disable_preprocessor_api": None,
    "_disable_action_flattening": None,
    "_disable_initialize_loss_from_dummy_batch": None,
    "simple_optimizer": None,
    "horizon": 100,
    "algorithm_config_overrides_per_module": {},
    "replay_mode": "lockstep",
    "policy_map_cache": None,
    **dict.fromkeys(CLASSES.split(), object),
    **dict.fromkeys(FUNCTIONS.split(), print),
}


@pytest.mark.parametrize("name", FIXED_SETTINGS)
def test_another_value_of_a_constant_is_refused_with_the_reason(name):
    constant, config = FIXED_SETTINGS[name], PPOConfig()
    other = OTHERS.get(name, not constant.value)
    with pytest.raises(ConfigError) as error:
        getattr(config, constant.method)(**{name: other})
    message = str(error.value)
    refusal = f"{name} must be {constant.value!r} here, got {other!r}: "
    if constant.method == "multi_agent":
        refusal = f"{name}={other!r} has been deprecated: "
    assert message.startswith(refusal)
    assert constant.reason in message
    with pytest.raises(ConfigError):
        config.update_from_dict({"lr": 1.0, name: other})
    assert config == PPOConfig()


def test_constants_are_read_but_are_not_in_the_dict():
    config = AlgorithmConfig()
    assert not set(FIXED_SETTINGS) & set(config.to_dict())
    config.output_compress_columns.append("rewards")
    assert config.output_compress_columns == ["obs", "new_obs"]
    assert config["input"] == config.get("input") == "sampler"
    assert AlgorithmConfig.overrides(render_env=False) == {"render_env": False}


def test_values_that_change_nothing_are_accepted():
    config = AlgorithmConfig()
    config.environment(is_atari=None, auto_wrap_old_gym_envs=False)
    config.debugging(logger_config={})
    config.experimental(_disable_action_flattening=True, _disable_preprocessor_api=True)
    config.rollouts(env_runner_cls=None).rl_module(rl_module_spec=None).framework(None)
    config.update_from_dict({"framework": None, "rl_module_spec": None, "env_runner_cls": None})
    config.offline_data(shuffle_buffer_size=0.0)
    assert config == AlgorithmConfig()
    with pytest.raises(ConfigError, match="remote_worker_envs must be False here, got 0"):
        config.rollouts(remote_worker_envs=0)


def test_rendering_is_accepted_with_a_line_that_it_shows_nothing(caplog):
    config = PPOConfig().evaluation(evaluation_config={"render_env": True})
    config.environment(render_env=True).environment(render_env=False)
    assert config.environment().render_env is False
    assert {record.getMessage() for record in caplog.records} == {
        "render_env=True has no effect: make the environment with env_config={'render_mode': ...}."
    }


def test_a_frozen_config_accepts_constants_at_their_values():
    config = PPOConfig()
    config.freeze()
    assert config.environment(render_env=False).offline_data(offline_sampling=False) is config
    config.api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    config.training(_enable_learner_api=False).rl_module(_enable_rl_module_api=False)
    assert config.experimental(_enable_new_api_stack=False) == PPOConfig()


@pytest.mark.parametrize("alias", ALIASES)
def test_both_names_are_one_setting(alias):
    name = ALIASES[alias]
    kind = PPOConfig if name in PPOConfig() else SACConfig
    config = kind()
    assert alias in config
    assert config[alias] == config[name]
    assert kind.overrides(**{alias: 1}) == {name: 1}


def test_dicts_have_the_names_of_old_dict_configs():
    as_dict = PPOConfig().to_dict()
    assert set(DICT_NAMES.values()) <= set(as_dict)
    assert not set(DICT_NAMES) & set(as_dict)
    names = "num_workers lambda create_env_on_driver custom_eval_function num_cpus_for_driver"
    assert sorted(DICT_NAMES.values()) == sorted(names.split())


def test_env_runners_accept_settings_that_moved_there_later():
    config = PPOConfig().env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=4,
        num_cpus_per_env_runner=2,
        num_gpus_per_env_runner=0.5,
        custom_resources_per_env_runner={"arm": 1},
        max_requests_in_flight_per_env_runner=3,
        explore=False,
        exploration_config={"type": "Random"},
    )
    expected = PPOConfig().rollouts(num_rollout_workers=0, num_envs_per_worker=4)
    expected.resources(num_cpus_per_worker=2, num_gpus_per_worker=0.5)
    expected.resources(custom_resources_per_worker={"arm": 1})
    expected.training(max_requests_in_flight_per_sampler_worker=3)
    expected.exploration(explore=False, exploration_config={"type": "Random"})
    assert config == expected
    with pytest.raises(ConfigError, match="explore must be"):
        config.env_runners(num_envs_per_env_runner=9, explore=3)
    assert config == expected  # all or nothing, over sections too
    for count in (4, 6):  # 4 is its present value
        with pytest.raises(TypeError, match="under two names"):
            config.env_runners(num_envs_per_env_runner=count, num_envs_per_worker=5)
    assert config == expected


def test_rollouts_accept_settings_of_fault_tolerance_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        config = PPOConfig().rollouts(recreate_failed_workers=True, num_envs_per_worker=2)
    assert "recreate_failed_workers: now a setting of `fault_tolerance()`" in caplog.text
    expected = PPOConfig().fault_tolerance(recreate_failed_workers=True)
    assert config == expected.rollouts(num_envs_per_worker=2)
    later = PPOConfig().fault_tolerance(restart_failed_env_runners=True)
    later.fault_tolerance(env_runner_restore_timeout_s=5, max_num_env_runner_restarts=3)
    assert (later.recreate_failed_workers, later.worker_restore_timeout_s) == (True, 5)
    assert later.max_num_worker_restarts == 3


def test_evaluation_workers_sample_one_episode_at_a_time():
    config = PPOConfig().training(gamma=0.5).evaluation(evaluation_config={"explore": False})
    result = config.get_evaluation_config_object()
    assert (result.explore, result.gamma, result.in_evaluation) == (False, 0.5, True)
    assert (result.batch_mode, result.rollout_fragment_length) == ("complete_episodes", 1)
    assert result.evaluation_config is None
    assert (config.explore, config.in_evaluation) == (True, False)


@pytest.mark.parametrize(
    ("duration", "workers", "rows"), [(100, 0, 100), (100, 3, 34), ("auto", 2, 10)]
)
def test_evaluation_by_time_steps_is_shared_by_the_workers(duration, workers, rows):
    config = PPOConfig().evaluation(evaluation_duration=duration, evaluation_num_workers=workers)
    config.evaluation(evaluation_duration_unit="timesteps")
    result = config.get_evaluation_config_object()
    assert (result.batch_mode, result.rollout_fragment_length) == ("truncate_episodes", rows)


def test_evaluation_workers_without_an_interval_are_warned_about(caplog):
    config = PPOConfig().evaluation(evaluation_num_workers=2)
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        config.validate()
    assert "evaluation_interval is None" in caplog.text


def test_a_custom_model_may_mask_by_another_key():
    config = PPOConfig().environment(action_mask_key="mask").multi_agent(policies={"p"})
    with pytest.raises(ConfigError, match="got 'mask'"):
        config.validate()
    model = {"custom_model": lambda observation_space, num_outputs: None}
    policies = {"p": (None, None, None, {"model": model})}
    assert config.multi_agent(policies=policies).validate() is None
    config = PPOConfig().environment(action_mask_key="mask").training(model=model)
    assert config.validate() is None


def test_a_setting_is_a_field_with_a_validator_and_a_way_to_merge_dicts():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Training(PPOTrainingSettings):
        lr: float = 0.5  # another default: the validator is that of the base
        bonus: float = setting(0.0, validators.NON_NEGATIVE)
        whole: dict = setting({"a": {"x": 1}}, validators.DICT)
        keyed: dict = setting({"a": {"x": 1}}, validators.DICT, merge=Merge.KEYS)
        deep: dict = setting({"a": {"x": 1}}, validators.DICT, merge=Merge.DEEP)
        typed: dict = setting({"type": "A", "x": 1}, validators.DICT, merge=Merge.TYPED)

    class Config(PPOConfig):
        training_section = Training

    values = {"a": {"y": 2}, "b": 3}
    config = Config().training(whole=values, keyed=values, deep=values, typed={"y": 2})
    assert config.whole == config.keyed == values
    assert config.deep == {"a": {"x": 1, "y": 2}, "b": 3}
    assert config.typed == {"type": "A", "x": 1, "y": 2}
    assert config.training(typed={"type": "B"}).typed == {"type": "B"}
    assert config.training(keyed={"c": 4}).keyed == {**values, "c": 4}
    assert Config().keyed == {"a": {"x": 1}}
    assert (config.lr, config.to_dict()["bonus"]) == (0.5, 0.0)
    for name, rule in (("lr", "a number >= 0"), ("bonus", "a number >= 0"), ("whole", "a dict")):
        with pytest.raises(ConfigError, match=f"{name} must be {rule}.*, got -1"):
            config.training(**{name: -1})


@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "PG", "DQN", "SAC", "TD3", "MARWIL", "BC"])
def test_any_value_of_a_setting_is_accepted_or_refused_in_a_short_message(algorithm):
    config_class = getattr(tfpolicies, f"{algorithm}Config")
    array, messages = np.array([1.0, 2.0]), []
    values = [10**400, -(10**400), 10**5000, array, [array], [[0, 10**400]], {"type": array}]
    values += [np.array(["a", "b"]), "x" * 5000, "\ud800", [[["x"]]], math.nan, math.inf, object()]
    names = [name for name in config_class().to_dict() if name != "model"]
    inputs = [{name: value} for name in names for value in values]
    inputs += [{"model": {key: value}} for key in config_class().model for value in values]
    for settings in inputs:
        try:
            config_class().update_from_dict(settings)
        except TfPoliciesError as error:
            messages.append(str(error))
    assert len(messages) > len(inputs) / 2
    assert max(map(len, messages)) < 1000


def test_a_value_that_cannot_be_shown_is_described():
    class Shy:
        def __repr__(self):
            raise RuntimeError("not now")

    assert show_value(Shy()) == "a Shy that cannot be shown (not now)"
    assert show_value(10**5000).startswith("a int that cannot be shown")
    assert show_value("x" * 300) == "'" + "x" * 196 + "..."
    assert show_value([1, "a"]) == "[1, 'a']"


def test_valid_numbers_fit_into_floats_and_arrays_are_not_choices():
    names = ("NON_NEGATIVE", "POSITIVE", "FRACTION", "FINITE")
    for rule in (getattr(validators, name) for name in names):
        assert rule.is_valid(0.5)
        assert not any(map(rule.is_valid, (10**400, -(10**400), math.nan, True, "0.5", np.ones(2))))
    assert validators.is_number(10**300)
    assert validators.is_number(math.inf)
    assert not validators.is_finite(math.inf)
    choice = validators.one_of("a", None, 2)
    assert all(map(choice.is_valid, ("a", None, 2)))
    assert not any(map(choice.is_valid, (np.array(["a", "b"]), ["a"], {"a": 1}, "b")))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("seed", np.int64(3), 3),
        ("lr", np.float32(0.5), 0.5),
        ("train_batch_size", np.int32(256), 256),
        ("train_batch_size", 256.0, 256),
        ("train_batch_size", np.float64(256), 256),
        ("num_envs_per_worker", 2.0, 2),
        ("evaluation_interval", 4.0, 4),
        ("gamma", 1.0, 1.0),
        ("use_gae", np.bool_(False), False),
        ("lr_schedule", [[np.int64(0), np.float32(0.5)]], [[0, 0.5]]),
    ],
)
def test_numbers_of_numpy_and_whole_floats_are_numbers(name, values, expected):
    for read in (PPOConfig().update_from_dict, PPOConfig.from_dict):
        actual = read({name: values})[name]
        assert (actual, type(actual)) == (expected, type(expected))


def test_numbers_in_the_dict_of_a_model_become_pythons_and_those_of_an_environment_stay():
    config = PPOConfig().training(model={"fcnet_hiddens": [np.int64(8)], "max_seq_len": np.int8(7)})
    assert config.model["fcnet_hiddens"] == [8]
    assert {type(config.model["max_seq_len"]), type(config.model["fcnet_hiddens"][0])} == {int}
    config.environment(env_config={"size": np.int64(3)})
    assert type(config.env_config["size"]) is np.int64
    for wrong in (256.5, np.float32(0.5), "256", np.array([256])):
        with pytest.raises(ConfigError, match="train_batch_size must be an integer >= 1"):
            config.training(train_batch_size=wrong)
