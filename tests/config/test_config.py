"""Configs: fluent methods, checks at the call, frozen configs, copies and round trips."""

import ast
import collections
import copy
import dataclasses
import pickle

import gymnasium as gym
import keras
import numpy as np
import pytest

from helpers.environments import TwoArmsEnv
from helpers.quick_configs import quick_config
from tfpolicies import PG, PPO, AlgorithmConfig, DefaultCallbacks, PGConfig, PPOConfig
from tfpolicies.base.validators import NON_NEGATIVE
from tfpolicies.config.setting import Section, setting
from tfpolicies.connectors import FrameStack
from tfpolicies.errors import ConfigError, FrozenConfigError, UnknownSettingError
from tfpolicies.models.defaults import MODEL_DEFAULTS

CONFIGS = [AlgorithmConfig, PPOConfig, PGConfig]
METHODS = """
environment rollouts env_runners training framework exploration evaluation debugging reporting
checkpointing resources multi_agent fault_tolerance python_environment offline_data api_stack
rl_module experimental
"""


def make_config():
    return (
        PPOConfig()
        .environment("CartPole-v1", env_config={"a": 1, "deep": {"b": 2}})
        .rollouts(num_envs_per_worker=3, rollout_fragment_length=16)
        .training(lr=1e-3, lambda_=0.9, model={"fcnet_hiddens": [8, 8]}, train_batch_size=480)
        .framework(inference="tf")
        .evaluation(evaluation_interval=2, evaluation_config={"explore": False})
        .debugging(seed=5)
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_fluent_method_returns_the_same_object_and_may_set_nothing(kind):
    config = kind()
    before = config.to_dict()
    for name in METHODS.split():
        assert getattr(config, name)() is config
    assert config.to_dict() == before
    assert config.callbacks(DefaultCallbacks) is config


def test_a_call_changes_only_its_arguments():
    config = PPOConfig().training(lr=0.25)
    before = config.to_dict()
    config.training(gamma=0.5)
    assert config.to_dict() == {**before, "gamma": 0.5}


def test_none_is_a_value_and_not_nothing():
    config = make_config().training(grad_clip=2.0, lr_schedule=[[0, 1.0], [9, 0.0]])
    config.training(grad_clip=None, lr_schedule=None).debugging(seed=None).environment(None)
    assert (config.grad_clip, config.lr_schedule, config.seed, config.env) == (None,) * 4
    assert config.callbacks(DefaultCallbacks).callbacks(None)["callbacks"] is None


@pytest.mark.parametrize(
    ("method", "wrong", "hint"),
    [
        ("environment", "env_confg", "Did you mean 'env_config'"),
        ("rollouts", "num_envs_per_workr", "Did you mean 'num_envs_per_worker'"),
        ("env_runners", "num_envs_per_env_runer", "Did you mean 'num_envs_per_env_runner'"),
        ("training", "gama", "Did you mean 'gamma'"),
        ("training", "explore", r"`exploration\(\)`"),
        ("framework", "jit_compil", "Did you mean 'jit_compile'"),
        ("exploration", "explor", "Did you mean 'explore'"),
        ("evaluation", "evaluation_intervall", "Did you mean 'evaluation_interval'"),
        ("debugging", "sed", "Did you mean 'seed'"),
        ("reporting", "lr", r"`training\(\)`"),
        ("checkpointing", "xyz", "reset_episodes_at_checkpoint"),
        ("fault_tolerance", "recreate_failed_worker", "Did you mean 'recreate_failed_workers'"),
        ("resources", "num_gpu", "Did you mean 'num_gpus'"),
        ("offline_data", "inputs", "Did you mean 'input'"),
        ("training", "output", r"`offline_data\(\)`"),
        ("rollouts", "env_step_timeout_s", r"`fault_tolerance\(\)`"),
        ("env_runners", "lr", r"`training\(\)`"),
        ("multi_agent", "polices", "Did you mean 'policies'"),
        ("multi_agent", "policy_mapping", ""),
    ],
)
def test_an_unknown_keyword_is_a_type_error_with_a_hint(method, wrong, hint):
    config = PPOConfig()
    before = config.to_dict()
    with pytest.raises(TypeError, match=rf"{method}\(\).*'{wrong}'.*{hint}"):
        getattr(config, method)(**{wrong: 1})
    with pytest.raises(TypeError, match="positional"):
        config.multi_agent(["a"])
    assert config.to_dict() == before


REFUSED = """
-1: lr num_sgd_iter kl_coeff vf_loss_coeff entropy_coeff clip_rewards num_rollout_workers seed
    min_time_s_per_iteration evaluation_num_workers evaluation_sample_timeout_s
    delay_between_worker_restarts_s num_cpus_per_worker min_train_timesteps_per_iteration
0: grad_clip train_batch_size sgd_minibatch_size clip_param kl_target vf_clip_param
    num_envs_per_worker rollout_fragment_length evaluation_interval env_step_timeout_s
    metrics_num_episodes_for_smoothing max_requests_in_flight_per_sampler_worker
    use_worker_filter_stats
1: explore create_env_on_local_worker always_attach_evaluation_results recreate_failed_workers
    keep_per_episode_custom_metrics
2: use_critic action_space num_gpus disable_env_checking env model
1.5: gamma seed max_num_worker_restarts
1.01: lambda_
2.5: train_batch_size num_envs_per_worker rollout_fragment_length evaluation_duration
True: gamma
None: lr model shuffle_sequences clip_actions action_mask_key min_sample_timesteps_per_iteration
    enable_connectors validate_workers_after_construction ignore_worker_failures
    num_consecutive_worker_failures_tolerance num_cpus_for_local_worker
    metrics_episode_collection_timeout_s
"1": gamma worker_health_probe_timeout_s num_gpus_per_worker
"": action_mask_key
"tfe": framework
"torch": framework
"yes": use_gae normalize_actions eager_tracing reset_episodes_at_checkpoint jit_compile framework
    update_worker_filter_stats evaluation_parallel_to_training restart_failed_sub_environments
    checkpoint_trainable_policies_only lr_schedule optimizer grad_clip_by clip_rewards
    observation_space rollout_fragment_length batch_mode compress_observations inference
    evaluation_duration evaluation_duration_unit log_level callbacks custom_evaluation_function
    placement_strategy
[1.0]: lr_schedule env_config evaluation_config custom_resources_per_worker
[]: lr_schedule
[[0, 1.0], [0, 0.5]]: lr_schedule
[[5, 0.1], [2, 0.0]]: entropy_coeff_schedule
{"A": -1}: custom_resources_per_worker extra_python_environs_for_worker
{"fcnet_hidden": [3]}: model
{"fcnet_hiddens": 64}: model
{"fcnet_hiddens": [64, 0]}: model
{"fcnet_activation": 3}: model
{"vf_share_layers": "yes"}: model
{"free_log_std": 1.5}: model
{"custom_model": 5}: model
{"custom_model_config": None}: model
"""
"""Values by lines, and after the last colon the settings that refuse them."""
REFUSED_VALUES = [
    (ast.literal_eval(line.rpartition(": ")[0]), line.rpartition(": ")[2])
    for line in REFUSED.strip().replace("\n    ", " ").splitlines()
]


@pytest.mark.parametrize(
    ("value", "names"), [*REFUSED_VALUES, (float("nan"), "gamma lr worker_restore_timeout_s")]
)
def test_a_wrong_value_is_refused_at_the_call_by_name_and_changes_nothing(value, names):
    config = make_config()
    before = config.to_dict()
    for name in names.split():
        others = {} if name == "seed" else {"seed": 99}
        with pytest.raises(ConfigError, match=name.rstrip("_")):
            config.update_from_dict({**others, name: value})
        assert config.to_dict() == before, name
    assert isinstance(ConfigError("x"), ValueError)


def test_settings_are_read_as_attributes_and_items_under_both_names():
    config = make_config()
    assert config.lr == config["lr"] == 1e-3
    assert config.lambda_ == config["lambda"] == config["lambda_"] == 0.9
    assert config["num_workers"] == config.num_rollout_workers == config.num_env_runners == 0
    assert config.num_envs_per_env_runner == config["num_envs_per_worker"] == 3
    assert config["framework"] == config.framework_str == "tf2"
    assert config["num_epochs"] == config["num_sgd_iter"]
    assert config["minibatch_size"] == config.sgd_minibatch_size
    assert "lambda" in config
    assert "num_env_runners" in config
    assert "nonsense" not in config
    assert config.get("lr") == 1e-3
    assert config.get("nonsense", 7) == 7


def test_a_name_without_a_setting_is_an_attribute_and_a_key_error_with_near_matches():
    config = PPOConfig()
    for read in (
        lambda: config.gama,
        lambda: config["gama"],
        lambda: config.__setitem__("gama", 0.5),
        lambda: setattr(config, "gama", 0.5),
        lambda: config.update_from_dict({"gama": 0.5}),
    ):
        with pytest.raises(UnknownSettingError, match="Did you mean 'gamma'") as caught:
            read()
        assert isinstance(caught.value, AttributeError)
        assert isinstance(caught.value, KeyError)
        assert isinstance(caught.value, ConfigError)


def test_items_and_attributes_are_set_through_the_same_checks():
    config = PPOConfig()
    config.lr = 0.5
    config["lambda"] = 0.25
    config["callbacks"] = DefaultCallbacks
    config["num_workers"] = 0
    assert (config.lr, config.lambda_, config["callbacks"]) == (0.5, 0.25, DefaultCallbacks)
    with pytest.raises(ConfigError, match="lr"):
        config.lr = -1
    with pytest.raises(ConfigError, match="gamma"):
        config["gamma"] = 7
    with pytest.raises(ConfigError, match="vf_share_layers"):
        config.training(model={**config.model, "vf_share_layers": 0.0})  # equal to the default
    assert config.lr == 0.5


def test_a_config_is_read_like_a_dict():
    config = make_config()
    as_dict = config.to_dict()
    assert dict(config) == {**as_dict, "policies": config.policies}
    assert list(config) == list(config.keys()) == list(as_dict)
    assert list(config.values()) == list(as_dict.values())
    assert dict(config.items()) == as_dict
    assert {"lambda", "num_workers"} <= set(as_dict)
    assert "algo_class" not in as_dict


def test_model_optimizer_and_env_config_are_merged_and_others_replaced():
    config = PPOConfig().training(model={"fcnet_hiddens": [4]}, optimizer={"type": "sgd"})
    config.training(model={"fcnet_activation": "relu"}, optimizer={"momentum": 0.5})
    assert config.model["fcnet_hiddens"] == [4]
    assert config.model["fcnet_activation"] == "relu"
    assert config.model["vf_share_layers"] is False  # PPO's own default
    assert config.optimizer == {"type": "sgd", "momentum": 0.5}
    config.environment(env_config={"a": 1, "deep": {"x": 1, "y": 2}})
    config.environment(env_config={"b": 2, "deep": {"y": 3}})
    assert config.env_config == {"a": 1, "b": 2, "deep": {"x": 1, "y": 3}}


def test_the_evaluation_config_is_merged_too_and_may_be_a_config():
    config = PPOConfig().evaluation(evaluation_config={"explore": False})
    config.evaluation(evaluation_config={"seed": 3})
    assert config.evaluation_config == {"explore": False, "seed": 3}
    config.evaluation(evaluation_config=None)
    assert config.evaluation_config is None
    config.evaluation(evaluation_config=PPOConfig().exploration(explore=False))
    assert config.evaluation_config["explore"] is False


def test_a_keras_model_or_a_factory_may_stand_for_the_model_config():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    config = PPOConfig().training(model=model)
    assert config.model["custom_model"] is model
    assert config.model["fcnet_activation"] == "tanh"

    def factory(observation_space, num_outputs):
        return model

    assert PPOConfig().training(model=factory).model["custom_model"] is factory
    assert PPOConfig().update_from_dict({"model": model}).model["custom_model"] is model


def with_a_space():
    return AlgorithmConfig().environment(observation_space=gym.spaces.Box(-1, 1, (3,), np.float32))


@pytest.mark.parametrize("make", [*CONFIGS, make_config, with_a_space])
def test_a_config_survives_the_way_through_a_dict(make):
    config = make()
    restored = type(config).from_dict(config.to_dict())
    assert restored == config
    assert restored.to_dict() == config.to_dict()
    assert type(config)().update_from_dict(config.to_dict()) == config


def test_an_update_is_done_whole_or_not_at_all():
    config = make_config()
    before = config.to_dict()
    for bad in ({"gamma": 0.1, "nonsense": 1}, {"seed": 1, "gamma": 0.1, "lr": -1}):
        with pytest.raises(ConfigError):
            config.update_from_dict(bad)
        assert config.to_dict() == before
    assert config.update_from_dict({"gamma": 0.1, "seed": 1}) is config
    assert (config.gamma, config.seed) == (0.1, 1)


def test_overrides_are_a_checked_plain_dict():
    assert PPOConfig.overrides(lambda_=0.5, lr=1e-3) == {"lambda_": 0.5, "lr": 1e-3}
    assert AlgorithmConfig.overrides(framework="tf2") == {"framework": "tf2"}
    with pytest.raises(KeyError, match="Invalid property name"):
        AlgorithmConfig.overrides(clip_param=0.2)  # PPO's
    with pytest.raises(UnknownSettingError, match=r"'lambda': .* in their config, such as PPO"):
        AlgorithmConfig.overrides(**{"lambda": 0.9})
    with pytest.raises(UnknownSettingError, match=r"Did you mean 'lambda_' or 'lambda'\?"):
        PPOConfig.overrides(lambda__=0.9)
    assert PPOConfig().update_from_dict(PPOConfig.overrides(lambda_=0.5))["lambda"] == 0.5


SEARCHED = {
    "lr": {"grid_search": [1e-3, 1e-4]},
    "model": {"fcnet_hiddens": {"grid_search": [[64], [32]]}},
    "evaluation_config": {"lr": {"grid_search": [1e-3]}},
}


@pytest.mark.parametrize("name", SEARCHED)
def test_a_config_keeps_search_spaces_and_refuses_them_where_values_are_needed(name):
    config = make_config().update_from_dict({name: SEARCHED[name]})
    expected = SEARCHED[name] if name == "lr" else {**make_config()[name], **SEARCHED[name]}
    assert config[name] == config.to_dict()[name] == config.copy().to_dict()[name] == expected
    assert config != make_config()
    words = rf"^{name} has the search space .*param_space=.'{name}'.*param_space=config"
    for use in (config.validate, config.freeze, config.build, lambda: PPO(config)):
        with pytest.raises(ConfigError, match=words):
            use()
    assert not config.is_frozen


def test_a_value_takes_the_place_of_a_search_space():
    config = make_config().update_from_dict(SEARCHED)
    config.training(model={"fcnet_activation": "relu"})  # beside what is searched
    assert config.model["fcnet_hiddens"] == {"grid_search": [[64], [32]]}
    assert config.model["fcnet_activation"] == "relu"
    config.training(
        lr=make_config().lr, model={"fcnet_hiddens": [8, 8], "fcnet_activation": "tanh"}
    )
    config.evaluation_config["lr"] = 0.1
    del config.evaluation_config["lr"]
    assert config == make_config()
    config.validate()


def test_configs_are_equal_by_class_and_settings():
    assert make_config() == make_config()
    assert make_config() != make_config().training(lr=2e-3)
    assert PPOConfig() != AlgorithmConfig()
    assert PPOConfig() != PPOConfig().to_dict()
    with pytest.raises(TypeError, match="unhashable"):
        hash(PPOConfig())


def test_the_repr_shows_changed_settings():
    assert repr(PPOConfig()) == "PPOConfig()"
    text = repr(PPOConfig().training(lr=0.5, lambda_=0.9).debugging(seed=3))
    assert text == "PPOConfig(lr=0.5, lambda=0.9, seed=3)"


@pytest.mark.parametrize(
    "duplicate", [PPOConfig.copy, copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_a_copy_is_equal_and_independent(duplicate):
    config = make_config()
    twin = duplicate(config)
    for same in (twin, copy.copy(config)):
        assert same == config
        assert type(same) is PPOConfig
        assert same.algo_class is PPO
    twin.training(lr=0.5, model={"fcnet_hiddens": [1]}).environment(env_config={"a": 9})
    assert config == make_config()


def test_a_copy_is_frozen_as_its_original_unless_copy_frozen_says_otherwise():
    config = make_frozen()
    assert config.copy().is_frozen
    assert not config.copy(copy_frozen=False).is_frozen
    assert make_config().copy(copy_frozen=True).is_frozen
    assert not make_config().copy().is_frozen
    assert config.copy(copy_frozen=False).training(lr=0.5).lr == 0.5
    assert config.lr == 1e-3


def test_later_changes_of_the_callers_containers_change_nothing():
    hiddens, env_config, schedule = [8, 8], {"deep": {"b": 2}}, [[0, 1.0], [5, 0.5]]
    config = PPOConfig().training(model={"fcnet_hiddens": hiddens}, lr_schedule=schedule)
    config.environment(env_config=env_config)
    expected = config.copy()
    hiddens.append(3)
    env_config["deep"]["b"] = 7
    schedule[0][1] = 9.0
    schedule.append([6, 0.0])
    assert config.model["fcnet_hiddens"] == [8, 8]
    assert config.env_config == {"deep": {"b": 2}}
    assert config.lr_schedule == [[0, 1.0], [5, 0.5]]
    assert config == expected


@pytest.mark.parametrize("kind", CONFIGS)
def test_containers_that_are_read_cannot_reach_other_configs_or_the_defaults(kind):
    defaults = copy.deepcopy(MODEL_DEFAULTS)
    config = kind()
    config.model["fcnet_hiddens"].append(5)  # a copy
    config.to_dict()["model"]["fcnet_hiddens"].append(6)
    assert defaults == MODEL_DEFAULTS
    assert kind().model["fcnet_hiddens"] == [256, 256]
    assert config.model["fcnet_hiddens"] == [256, 256]


EVALUATED = "evaluation_config", {"seed": 1}
WRITES = {
    "set": (lambda c: c.model.__setitem__("fcnet_hiddens", [1]), "model", {"fcnet_hiddens": [1]}),
    "update": (lambda c: c["env_config"].update(a=5), "env_config", {"a": 5}),
    "setdefault": (lambda c: c.evaluation_config.setdefault("seed", 1), *EVALUATED),
    "or": (lambda c: c.env_config.__ior__({"a": 5}), "env_config", {"a": 5}),
    "deep": (lambda c: c.env_config["deep"].update(b=3), "env_config", {"deep": {"b": 3}}),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_a_dict_of_a_config_changes_the_setting(write):
    change, name, expected = WRITES[write]
    config, twin = make_config(), make_config()
    other = config.copy()
    change(config)
    assert config == twin.update_from_dict({name: expected})
    assert other == make_config()


def test_a_key_that_is_deleted_from_a_dict_of_a_config_has_its_default_again():
    config = make_config()
    config.env_config["deep"].clear()
    assert config.env_config == {"a": 1, "deep": {}}
    assert config.env_config.pop("a") == 1
    assert config.env_config.popitem() == ("deep", {})
    assert config.env_config == {}
    del config.model["fcnet_hiddens"]
    assert config.model == PPOConfig().model


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda c: c.model.__setitem__("fcnet_hidden", [1]), "Did you mean 'fcnet_hiddens'"),
        (lambda c: c.model.update(use_lstm=3), "must be True or False"),
        (lambda c: c.policies.update({"a": 3}), "policies"),
    ],
)
def test_unknown_and_wrong_settings_cannot_be_written_into_a_dict_of_a_config(write, words):
    config = make_config()
    with pytest.raises(ConfigError, match=words):
        write(config)
    assert config == make_config()


def test_mappings_other_than_plain_dicts_stay_as_they_are():
    space = gym.spaces.Dict(a=gym.spaces.Discrete(2))
    counts = collections.Counter("aab")
    inside = {"space": space, "counts": counts, "deep": {"spaces": [space]}}
    config = PPOConfig().environment(env_config=inside, observation_space=space)
    config.training(model={"custom_model_config": inside})
    config.environment(env_config={"space": space})  # laid over, and still no dict
    for read in (config, config.copy(), config.to_dict(), PPOConfig.from_dict(config.to_dict())):
        for result in (read["env_config"], read["model"]["custom_model_config"]):
            assert result["space"] is result["deep"]["spaces"][0] is space
            assert result["counts"] is counts
        assert read["observation_space"] is space


def test_a_dict_that_is_read_can_be_copied_into_a_plain_one():
    read = make_config().env_config
    for plain in (dict(read), copy.copy(read), copy.deepcopy(read), read.copy(), read | {}):
        plain["a"] = 2
        assert plain["a"] == 2
    assert pickle.loads(pickle.dumps(read)) == read
    assert make_config().env_config["a"] == 1


def make_frozen():
    return make_config().copy(copy_frozen=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c, "lr", 0.5),
        lambda c: c.__setitem__("lr", 0.5),
        lambda c: c.training(lr=0.5),
        lambda c: c.training(model={"fcnet_hiddens": [2]}),
        lambda c: c.environment("Acrobot-v1"),
        lambda c: c.environment(env_config={"a": 3}),
        lambda c: c.rollouts(num_envs_per_worker=9),
        lambda c: c.env_runners(num_env_runners=0),
        lambda c: c.framework(inference="onnx"),
        lambda c: c.exploration(explore=False),
        lambda c: c.evaluation(evaluation_config={"seed": 3}),
        lambda c: c.debugging(seed=1),
        lambda c: c.reporting(min_time_s_per_iteration=1),
        lambda c: c.checkpointing(reset_episodes_at_checkpoint=True),
        lambda c: c.callbacks(DefaultCallbacks),
        lambda c: c.fault_tolerance(recreate_failed_workers=True),
        lambda c: c.resources(num_cpus_per_worker=2),
        lambda c: c.multi_agent(policies=["a"]),
        lambda c: setattr(c, "policies_to_train", ["a"]),
        lambda c: c.rollouts(ignore_worker_failures=False),
        lambda c: c.add_custom_settings({"mood": 1}),
        lambda c: c.update_from_dict({"lr": 0.5}),
        lambda c: c.update_from_dict({"env_config": {"a": 3}}),
        lambda c: setattr(c, "algo_class", PG),
        lambda c: setattr(c, "_frozen", False),
        lambda c: delattr(c, "_frozen"),
        *(write for write, *_ in WRITES.values()),
    ],
)
def test_a_frozen_config_refuses_every_change(change):
    config = make_frozen()
    with pytest.raises(AttributeError, match=r"already frozen|_frozen") as error:
        change(config)
    assert isinstance(error.value, FrozenConfigError) or "_frozen" in str(error.value)
    assert config == make_config()
    assert config.is_frozen
    assert config.algo_class is PPO


def test_the_refusal_names_the_attribute_and_copy_frozen():
    config = make_frozen()
    with pytest.raises(FrozenConfigError, match=r"attribute lr .*already frozen.*copy_frozen"):
        config.lr = 1.0
    with pytest.raises(FrozenConfigError, match="attribute policies of an already frozen"):
        config.multi_agent(policies=["x"])
    assert config.training() is config
    assert config.update_from_dict({}) is config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train_batch_size": 64, "sgd_minibatch_size": 65}, "sgd_minibatch_size=65"),
        ({"use_gae": False}, "complete_episodes"),
        ({"rollout_fragment_length": 3001}, "within 10 %"),
        ({"evaluation_duration": "auto"}, "evaluation_parallel_to_training"),
        ({"evaluation_parallel_to_training": True}, "evaluation_num_workers to 1 or more"),
        (
            {"enable_connectors": False, "agent_connectors": [FrameStack(2)]},
            "agent_connectors has 1 .* enable_connectors=False",
        ),
        ({"action_mask_key": "mask"}, "_key must be 'action_mask' unless a custom model masks"),
        ({"evaluation_config": {"explor": False}}, "Did you mean 'explore'"),
        ({"evaluation_config": {"gamma": 3}}, "gamma"),
    ],
)
def test_contradicting_settings_are_named(settings, words):
    config = PPOConfig().update_from_dict(settings)
    before = config.to_dict()
    with pytest.raises(ConfigError, match=words):
        config.validate()
    assert config.to_dict() == before


@pytest.mark.parametrize(
    "config", [*(kind() for kind in CONFIGS), PPOConfig().rollouts(enable_connectors=False)]
)
def test_the_defaults_are_valid_without_connectors_also(config):
    assert config.validate() is None


@pytest.mark.parametrize(
    ("batch", "envs", "values", "expected"),
    [(4000, 1, "auto", 4000), (4000, 3, "auto", 1334), (10, 32, "auto", 1), (4000, 3, 50, 50)],
)
def test_an_automatic_fragment_shares_the_train_batch_among_the_environments(
    batch, envs, values, expected
):
    config = PPOConfig().training(train_batch_size=batch)
    config.rollouts(num_envs_per_worker=envs, rollout_fragment_length=values)
    assert config.get_fragment_length() == expected


def test_building_needs_an_algorithm_and_an_environment():
    with pytest.raises(ConfigError, match="has no algorithm"):
        AlgorithmConfig().environment("CartPole-v1").build()
    with pytest.raises(ConfigError, match="needs an environment"):
        PPOConfig().build()
    with pytest.raises(ConfigError, match="logger_creator"):
        PPOConfig().build("CartPole-v1", logger_creator=print)


def test_building_uses_a_copy_by_default():
    config = quick_config()
    algorithm = config.build(TwoArmsEnv)
    assert algorithm.config is not config
    assert algorithm.config.is_frozen
    assert not config.is_frozen
    assert config.env is None
    config.environment(TwoArmsEnv)
    assert config.build(use_copy=False).config is config
    assert config.is_frozen


def test_a_config_of_another_algorithm_class_builds_that_class():
    class MyPPO(PPO):
        pass

    config = PPOConfig(algo_class=MyPPO).update_from_dict(quick_config().to_dict())
    assert type(config.build(TwoArmsEnv)) is MyPPO
    assert type(config.copy().build(TwoArmsEnv)) is MyPPO


def test_a_write_into_a_copy_is_in_no_other_config():
    first = PPOConfig().training(model={"fcnet_hiddens": [8, 8]})
    twin = first.copy()
    twin.model["fcnet_hiddens"] = [4]
    twin.env_config["size"] = 3
    twin.to_dict()["model"]["fcnet_hiddens"].append(1)
    settings = twin.settings_for(PPOConfig)
    settings["model"]["fcnet_hiddens"].append(1)
    settings["tf_session_args"]["gpu_options"]["allow_growth"] = False
    assert first.model["fcnet_hiddens"] == [8, 8]
    assert twin.model["fcnet_hiddens"] == [4]
    assert first.env_config == PPOConfig().env_config == {}
    assert PPOConfig().tf_session_args["gpu_options"] == {"allow_growth": True}


def test_an_invalid_default_of_a_section_is_refused_each_time():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wrong(Section):
        rate: float = setting(-1.0, NON_NEGATIVE)

    for _ in range(2):
        with pytest.raises(ConfigError, match=r"rate must be a number >= 0, got -1\.0"):
            Wrong()


@pytest.mark.parametrize("source", ["d4rl.hopper-v0", {"d4rl.hopper-v0": 0.5, "sampler": 0.5}])
def test_inputs_of_d4rl_name_minari(source):
    with pytest.raises(ConfigError, match=r"'d4rl\.hopper-v0' is not supported.*Minari"):
        PPOConfig().offline_data(input_=source)


@pytest.mark.parametrize("weights", [{"sampler": 0.5, "logs": 0.6}, {"sampler": 1.5, "logs": -0.5}])
def test_weights_of_inputs_sum_to_1(weights):
    with pytest.raises(ConfigError, match=r"input_ must be weights .* sum to 1 \(their sum is"):
        PPOConfig().offline_data(input_=weights)
