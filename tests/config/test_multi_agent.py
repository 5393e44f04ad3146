"""Multi-agent settings of configs: checks at the call, dicts, and complete specs for workers."""

import json
import logging
import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from tfpolicies import (
    DEFAULT_POLICY_ID,
    AlgorithmConfig,
    DQNConfig,
    MARWILConfig,
    MultiAgentEnv,
    PGConfig,
    PGTF2Policy,
    Policy,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
)
from tfpolicies.algorithms.algorithm_registry import find_algorithm, get_algorithm_names
from tfpolicies.config.multi_agent import default_policy_mapping
from tfpolicies.config.multi_agent_setup import UPDATE_SETTINGS, is_run_setting
from tfpolicies.config.settings_allowlist import decode_settings
from tfpolicies.errors import ConfigError, UnknownSettingError, UsageError
from tfpolicies.policy.policy_config import complete_config
from tfpolicies.storage.json_values import encode_value

LINE, PLANE, TWO, THREE = Box(-1, 1, (1,)), Box(-1, 1, (2,)), Discrete(2), Discrete(3)


def by_first_letter(agent_id, episode, worker, **kwargs):
    return f"{agent_id[0]}_policy"


class CustomPolicy(Policy):
    """A policy without TensorFlow and without a config class."""


class SharedSpaces(MultiAgentEnv):
    observation_space, action_space = PLANE, THREE
    _agent_ids = ("a1", "a2", "b1")


class EqualSpaces(SharedSpaces):
    observation_space = gym.spaces.Dict({"a1": PLANE, "a2": PLANE, "b1": PLANE})
    action_space = gym.spaces.Dict({"a1": THREE, "a2": THREE, "b1": THREE})


class SeparateSpaces(SharedSpaces):
    observation_space = gym.spaces.Dict({"a1": LINE, "a2": LINE, "b1": PLANE})
    action_space = gym.spaces.Dict({"a1": TWO, "a2": TWO, "b1": THREE})


def league():
    return PPOConfig().multi_agent(
        policies={
            "a": (PPOTF2Policy, LINE, TWO, {"gamma": 0.5, "model": {"fcnet_hiddens": [4]}}),
            "b": PolicySpec(config=PPOConfig.overrides(lr=0.25)),
            "c": PolicySpec(),
        },
        policy_mapping_fn=by_first_letter,
        policies_to_train={"a", "b"},
        policy_map_capacity=2,
        policy_states_are_swappable=True,
        count_steps_by="agent_steps",
    )


def test_the_defaults_are_one_policy_for_all_agents_that_is_trained():
    config = AlgorithmConfig()
    assert config.policies == {DEFAULT_POLICY_ID: PolicySpec()}
    assert config.policy_map_capacity == 100
    assert config.policy_mapping_fn("any", None, worker=None) == DEFAULT_POLICY_ID
    assert config.policies_to_train is None
    assert config.policy_states_are_swappable is False
    assert config.observation_fn is None
    assert config.count_steps_by == "env_steps"
    assert not config.is_multi_agent()


@pytest.mark.parametrize(
    ("kind", "order"), [(list, "ba"), (tuple, "ba"), (set, "ab"), (frozenset, "ab")]
)
def test_ids_become_specs_and_those_of_sets_are_sorted(kind, order):
    config = AlgorithmConfig().multi_agent(policies=kind("ba"))
    assert config.policies == {"a": PolicySpec(), "b": PolicySpec()}
    assert list(config.policies) == list(order)


def test_tuples_lists_and_specs_become_specs():
    values = (PGTF2Policy, LINE, TWO, {"gamma": 0.5})
    spec = PolicySpec(*values)
    config = AlgorithmConfig().multi_agent(policies={"a": values, "b": list(values), "c": spec})
    assert config.policies == {"a": spec, "b": spec, "c": spec}


def test_a_whole_config_as_overrides_gives_all_of_its_settings():
    overrides = PPOConfig().training(gamma=0.5)
    config = PPOConfig().training(lr=0.1).multi_agent(policies={"a": PolicySpec(config=overrides)})
    overrides.training(gamma=0.6)
    result = get_config(config, env=SharedSpaces())
    assert (result.gamma, result.lr) == (0.5, 5e-5)


def test_new_policies_replace_all_that_were():
    config = league().multi_agent(policies=["d"])
    assert list(config.policies) == ["d"]
    assert config.policy_map_capacity == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policies": None}, "policies must be a list, set or tuple of policy ids, or a dict"),
        ({"policies": "main"}, "policies must be .* got 'main'"),
        ({"policies": ["a", "b/c"]}, "policy id must be .* got 'b/c'"),
        ({"policies": ["a", 3]}, "got 3"),
        ({"policies": [["a"]]}, r"got \['a'\]"),
        ({"policies": {"": PolicySpec()}}, "got ''"),
        ({"policies": {"a.": PolicySpec()}}, r"got 'a\.'"),
        ({"policies": {"a": (None, None, None)}}, "Policy specs must be tuples/lists"),
        ({"policies": {"a": None}}, r"Policy specs must be tuples/lists .* policies\['a'\]"),
        ({"policies": {"a": PGTF2Policy}}, "Policy specs must be tuples/lists"),
        ({"policies": {"a": PolicySpec(config=[1])}}, "must be a dict or AlgorithmConfig"),
        ({"policies": {"a": (None, None, None, 5)}}, "must be a dict or AlgorithmConfig"),
        ({"policies": {"a": ("PPO", None, None, {})}}, r"policies\['a'\].policy_class must be"),
        ({"policies": {"a": (None, 3, None, {})}}, r"policies\['a'\].observation_space must be"),
        ({"policies": {"a": (None, None, 3, {})}}, r"policies\['a'\].action_space must be"),
        ({"policies": {"a": PolicySpec(config={"gama": 1})}}, r"'a'.*Did you mean 'gamma'"),
        ({"policies": {"a": PolicySpec(config={"gamma": 7})}}, r"'a'.*gamma must be"),
        ({"policies": {"a": (PGTF2Policy, LINE, TWO, {"clip_param": 1})}}, "'clip_param'"),
        (
            {"policies": {"a": PolicySpec(config={"lr": {"grid_search": [1e-3, 1e-4]}})}},
            r"policies\['a'\].config: lr has the search space",
        ),
        ({"policy_map_capacity": 0}, "policy_map_capacity must be an integer >= 1, got 0"),
        ({"policy_map_capacity": None}, "policy_map_capacity"),
        ({"policy_mapping_fn": {"a": "b"}}, "policy_mapping_fn must be a function"),
        ({"policy_states_are_swappable": 1}, "policy_states_are_swappable must be True or False"),
        ({"observation_fn": "centralized"}, "observation_fn must be None or a function"),
        ({"count_steps_by": "steps"}, "count_steps_by must be one of .*'agent_steps'"),
        ({"count_steps_by": None}, "count_steps_by"),
        (
            {"replay_mode": "lockstep"},
            "replay_mode='lockstep' has been deprecated: .*replay_buffer",
        ),
        ({"policy_map_cache": None}, "policy_map_cache=None has been deprecated: .*map_capacity"),
        ({"algorithm_config_overrides_per_module": {}}, "has been deprecated: .*PolicySpec"),
        ({"policies_to_train": "a"}, "policies_to_train must be a list, set or tuple"),
        ({"policies_to_train": {"a": True}}, "policies_to_train must be a list, set or tuple"),
        ({"policies_to_train": [1]}, "policies_to_train must be a list, set or tuple"),
        ({"policies_to_train": 5}, "policies_to_train must be a list, set or tuple"),
    ],
    ids=lambda x: str(x)[:50],
)
def test_a_wrong_setting_is_named_and_nothing_is_changed(settings, words):
    config = league()
    with pytest.raises(ConfigError if "policies_to_train" not in settings else UsageError) as error:
        config.multi_agent(**{"policy_map_capacity": 50, **settings})
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, AssertionError) == ("policies_to_train" in settings)
    with pytest.raises(ValueError, match=words):
        config.multi_agent(**settings)
    assert config == league()


def test_a_call_without_arguments_or_with_minus_one_changes_nothing():
    config = league()
    assert config.multi_agent() is config
    config.multi_agent(
        replay_mode=-1, policy_map_cache=-1, algorithm_config_overrides_per_module=-1
    )
    assert config == league()


def test_none_for_the_mapping_and_for_policies_to_train_are_the_defaults():
    config = league().multi_agent(policy_mapping_fn=None, policies_to_train=None)
    assert config.policy_mapping_fn is default_policy_mapping
    assert config.policies_to_train is None


@pytest.mark.parametrize("empty", [[], set(), ()], ids=repr)
def test_an_empty_list_of_policies_to_train_is_accepted_with_a_warning(empty, caplog):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        config = league().multi_agent(policies_to_train=empty)
    assert "no policy will be trained" in caplog.text
    assert config.policies_to_train == empty
    is_trained = config.get_multi_agent_setup(env=SharedSpaces())[1]
    assert not is_trained("a")
    assert config.validate() is None


@pytest.mark.parametrize(
    ("policies", "many"),
    [({DEFAULT_POLICY_ID}, False), ({"a"}, True), ({DEFAULT_POLICY_ID, "a"}, True), ({}, True)],
)
def test_a_sole_default_policy_is_not_a_multi_agent_setup(policies, many):
    assert AlgorithmConfig().multi_agent(policies=policies).is_multi_agent() is many


def test_policies_to_train_must_be_defined():
    config = AlgorithmConfig().multi_agent(policies=["main", "other"], policies_to_train=["mian"])
    with pytest.raises(ConfigError, match=r"'mian'\], not defined .* Did you mean 'main'"):
        config.validate()
    assert config.multi_agent(policies_to_train=["main"]).validate() is None


def with_overrides(overrides, policy_class=None):
    config = PPOConfig().multi_agent(policies={"a": PolicySpec(policy_class, config=overrides)})
    return config.training(train_batch_size=200, lr=0.5).rollouts(num_envs_per_worker=2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train_batch_size": 50}, "cannot have train_batch_size=50; .* train_batch_size=200"),
        ({"num_envs_per_worker": 1}, r"policies\['a'\].*Set num_envs_per_worker on the algorithm"),
        ({"num_workers": 3}, "num_rollout_workers=3"),
        ({"evaluation_interval": 1, "lr": 0.1}, "evaluation_interval=1; .*=None"),
        ({"clip_rewards": True}, "clip_rewards=True"),
        ({"framework": "tf"}, "framework='tf'"),
        ({"policies_to_train": ["a"]}, "policies_to_train"),
        ({"env_task_fn": print}, "env_task_fn"),
        ({"sgd_minibatch_size": 201}, "=201 must not be larger than train_batch_size=200"),
    ],
)
def test_a_policy_cannot_have_settings_of_the_whole_run(overrides, words):
    with pytest.raises(ConfigError, match=words):
        with_overrides(overrides).validate()


@pytest.mark.parametrize(
    "overrides",
    [
        {"train_batch_size": 200, "num_envs_per_worker": 2, "num_workers": 0},
        {"num_sgd_iter": 1, "sgd_minibatch_size": 200, "shuffle_sequences": False},
        {"seed": 3, "num_gpus": 1, "on_nan": "warn", "explore": False, "reward_filter": "NoFilter"},
        PPOConfig().training(gamma=0.5),  # a complete config, with the defaults of others
        with_overrides({}),
        with_overrides({}).to_dict(),
    ],
)
def test_a_policy_may_have_its_own_settings_and_those_of_the_run(overrides):
    config = with_overrides(overrides)
    config.validate()
    config.freeze()


def test_a_custom_policy_may_have_any_settings():
    class OwnPPO(PPOTF2Policy):
        """A user's class, whose methods may read all settings."""

    for policy_class in (CustomPolicy, OwnPPO):
        with_overrides({"train_batch_size": 50, "num_workers": 1}, policy_class).validate()
    with_overrides({"train_batch_size": 50, "mood": 1}, CustomPolicy).validate()


def test_recorded_rewards_are_clipped_for_each_policy():
    config = MARWILConfig().offline_data(input_="steps.parquet")
    config.multi_agent(policies={"a": PolicySpec(config={"clip_rewards": True})}).validate()


def test_no_setting_of_the_whole_run_is_one_that_policies_read():
    for config in (find_algorithm(name).get_default_config() for name in get_algorithm_names()):
        policy_class = config._get_default_policy_class()
        names = {*policy_class.hyperparameters, *policy_class.static_keys, *UPDATE_SETTINGS}
        assert [name for name in names if is_run_setting(config, name)] == []


def test_later_changes_of_the_callers_containers_change_nothing():
    overrides, trained = {"gamma": 0.5, "model": {"fcnet_hiddens": [4]}}, {"a"}
    policies = {"a": PolicySpec(config=overrides)}
    config = PPOConfig().multi_agent(policies=policies, policies_to_train=trained)
    expected = config.copy()
    overrides["gamma"] = 0.9
    overrides["model"]["fcnet_hiddens"].append(5)
    policies["b"] = PolicySpec()
    trained.add("b")
    config.policies["a"].config["gamma"] = 0.1
    config.policies_to_train.add("c")
    config.to_dict()["policies"]["a"][3]["gamma"] = 0.2
    assert config == expected
    assert config.policies["a"].config == {"gamma": 0.5, "model": {"fcnet_hiddens": [4]}}
    config.policies["c"] = PolicySpec()  # unlike what is in a copy
    assert config.policies.keys() == {"a", "c"}
    with pytest.raises(ConfigError, match="policy id must be"):
        config.policies["d/e"] = PolicySpec()
    assert config.policies.keys() == {"a", "c"}


def test_a_dict_has_four_tuples_and_keeps_everything():
    config = league()
    as_dict = config.to_dict()
    overrides = {"gamma": 0.5, "model": {"fcnet_hiddens": [4]}}
    assert as_dict["policies"]["a"] == (PPOTF2Policy, LINE, TWO, overrides)
    assert as_dict["policies"]["c"] == (None, None, None, None)
    assert "multiagent" not in as_dict
    assert as_dict["count_steps_by"] == "agent_steps"
    assert PPOConfig.from_dict(as_dict) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_checkpoint_can_hold_multi_agent_settings():
    config = league().multi_agent(policy_mapping_fn=None)
    config.evaluation(evaluation_config={"policy_mapping_fn": default_policy_mapping})
    assert config.validate() is None
    record = json.loads(json.dumps(encode_value(config.to_dict())))
    assert PPOConfig.from_dict(decode_settings(record)) == config


def test_old_dict_configs_have_the_settings_under_multiagent():
    nested = {
        "policies": {"a": (None, LINE, TWO, {}), "b": (None, LINE, TWO, {})},
        "policy_mapping_fn": by_first_letter,
        "policies_to_train": ["a"],
        "count_steps_by": "agent_steps",
    }
    config = PPOConfig.from_dict({"lr": 0.5, "multiagent": nested})
    assert config == PPOConfig().training(lr=0.5).multi_agent(**nested)
    with pytest.raises(UnknownSettingError, match="Did you mean 'policies_to_train'"):
        config.update_from_dict({"lr": 1.0, "multiagent": {"policies_to_trian": None}})
    with pytest.raises(ConfigError, match="replay_mode='independent' has been deprecated"):
        config.update_from_dict({"lr": 1.0, "multiagent": {"replay_mode": "independent"}})
    with pytest.raises(ConfigError, match="multiagent must be a dict"):
        config.update_from_dict({"multiagent": 1})
    assert config.lr == 0.5


def test_multiagent_is_not_a_setting(no_extensions):
    config = PPOConfig()
    for read in (
        lambda: config.multiagent,
        lambda: config["multiagent"],
        lambda: config.__setitem__("multiagent", {}),
        lambda: setattr(config, "multiagent", {}),
    ):
        with pytest.raises(UnknownSettingError, match=r"config\.policies"):
            read()
    assert "multiagent" not in config
    assert config.get("multiagent") is None


def get_spaces(config, **sources):
    specs, _ = config.get_multi_agent_setup(**sources)
    return {pid: (spec.observation_space, spec.action_space) for pid, spec in specs.items()}


def get_config(config, policy_id="a", **sources):
    return config.get_multi_agent_setup(**sources)[0][policy_id].config


def with_two_policies(*more, mapping=by_first_letter):
    ids = ["a_policy", "b_policy", *more]
    return AlgorithmConfig().multi_agent(policies=ids, policy_mapping_fn=mapping)


class DictSpace(gym.Env):
    observation_space, action_space = gym.spaces.Dict({"left": LINE, "right": PLANE}), TWO


@pytest.mark.parametrize(
    ("config", "env", "expected"),
    [
        (with_two_policies("new"), SharedSpaces(), dict.fromkeys("abn", (PLANE, THREE))),
        (with_two_policies("new"), EqualSpaces(), dict.fromkeys("abn", (PLANE, THREE))),
        (
            with_two_policies("new"),
            SeparateSpaces(),
            {"a": (LINE, TWO), "b": (PLANE, THREE), "n": (None, None)},  # no agent is mapped to it
        ),
        (AlgorithmConfig(), DictSpace(), {"d": (DictSpace.observation_space, TWO)}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_policies_get_the_spaces_of_the_agents_that_are_mapped_to_them(config, env, expected):
    assert {pid[0]: pair for pid, pair in get_spaces(config, env=env).items()} == expected


def test_agents_of_one_policy_must_have_the_same_spaces():
    config, env = with_two_policies(mapping=lambda *args, **kwargs: "a_policy"), SeparateSpaces()
    words = "'a_policy' acts for agents with different observation_spaces"
    with pytest.raises(ConfigError, match=words):
        config.get_multi_agent_setup(env=env)
    config.multi_agent(policies={"a_policy": (None, LINE, None, {})})
    with pytest.raises(ConfigError, match="different action_spaces"):
        config.get_multi_agent_setup(env=env)
    config.multi_agent(policies={"a_policy": (None, LINE, TWO, {})})
    assert get_spaces(config, env=env) == {"a_policy": (LINE, TWO)}


def test_a_mapping_that_needs_an_episode_is_refused_with_a_hint():
    def by_episode(agent_id, episode, worker, **kwargs):
        return ["a_policy", "b_policy"][episode.episode_id % 2]

    config = with_two_policies(mapping=by_episode)
    with pytest.raises(ConfigError, match=r"policy_mapping_fn\('a1', None, worker=None\) raised"):
        config.get_multi_agent_setup(env=SeparateSpaces())
    assert get_spaces(config, env=EqualSpaces())["a_policy"] == (PLANE, THREE)


def test_a_vector_environment_gives_its_single_spaces():
    envs = gym.make_vec("CartPole-v1", num_envs=3)
    expected = {DEFAULT_POLICY_ID: (envs.single_observation_space, envs.single_action_space)}
    assert get_spaces(AlgorithmConfig(), env=envs) == expected
    envs.close()


def test_spaces_are_searched_in_the_spec_the_arguments_the_env_and_the_config():
    config = AlgorithmConfig().environment(observation_space=LINE, action_space=TWO)
    config.multi_agent(policies={"a": PolicySpec(observation_space=PLANE), "b": PolicySpec()})
    square = Box(0, 1, (2, 2))
    assert get_spaces(config) == {"a": (PLANE, TWO), "b": (LINE, TWO)}
    env = gym.Env()
    env.observation_space, env.action_space = square, THREE
    assert get_spaces(config, env=env) == {"a": (PLANE, THREE), "b": (square, THREE)}
    values = {"a": (LINE, TWO), "b": (None, TWO), "__env__": (PLANE, THREE)}
    assert get_spaces(config, env=env, spaces=values) == {"a": (PLANE, TWO), "b": (square, TWO)}
    assert get_spaces(config, spaces=values) == {"a": (PLANE, TWO), "b": (PLANE, TWO)}


def test_a_missing_space_is_an_error_with_the_policys_id():
    config = AlgorithmConfig().multi_agent(policies={"main": PolicySpec(observation_space=LINE)})
    with pytest.raises(ConfigError, match="action_space not provided for policy 'main'"):
        config.get_multi_agent_setup()


def test_each_policy_gets_a_complete_config():
    config = league().training(gamma=0.75)
    specs, _ = config.get_multi_agent_setup(env=SharedSpaces(), default_policy_class=PPOTF2Policy)
    assert {spec.policy_class for spec in specs.values()} == {PPOTF2Policy}
    a, b, c = (specs[x].config for x in "abc")
    assert all(type(each) is PPOConfig and not each.is_frozen for each in (a, b, c))
    assert (a.gamma, a.lr, a.model["fcnet_hiddens"]) == (0.5, 5e-5, [4])
    assert (b.gamma, b.lr, c.gamma, c.lr) == (0.75, 0.25, 0.75, 5e-5)
    assert c.training(lr=1.0).lr == 1.0
    assert (b.lr, config.lr) == (0.25, 5e-5)


def test_a_policy_class_of_another_algorithm_gets_a_config_of_that_algorithm():
    config = PPOConfig().training(gamma=0.5, clip_param=0.1)
    result = get_config(config.multi_agent(policies={"a": (PGTF2Policy, LINE, TWO, {"lr": 0.25})}))
    assert (type(result), result.gamma, result.lr) == (PGConfig, 0.5, 0.25)
    config = AlgorithmConfig().multi_agent(policies={"a": (None, LINE, TWO, {"lambda": 0.5})})
    result = get_config(config, default_policy_class=PPOTF2Policy)
    assert (type(result), result.lambda_) == (PPOConfig, 0.5)


def test_a_custom_policy_may_have_custom_settings():
    config = AlgorithmConfig().training(gamma=0.5)
    config.multi_agent(policies={"a": (CustomPolicy, LINE, TWO, {"mood": ["calm"], "lr": 0.25})})
    result = get_config(config)
    assert (result.mood, result["mood"], result.get("mood")) == (["calm"],) * 3
    assert "mood" in result
    assert "mood" not in config
    settings = result.copy().to_dict()
    assert (settings["mood"], settings["lr"], settings["gamma"]) == (["calm"], 0.25, 0.5)
    with pytest.raises(ConfigError, match=r"policies\['a'\].*lr must be"):
        config.multi_agent(policies={"a": (CustomPolicy, LINE, TWO, {"mood": 1, "lr": -1})})


def test_policies_may_be_an_argument_of_the_setup():
    config = with_two_policies()
    specs, _ = config.get_multi_agent_setup(policies={"x": (None, LINE, TWO, {})})
    assert list(specs) == ["x"]
    with pytest.raises(ConfigError, match=r"'x'.*'gama'.*Did you mean 'gamma'"):
        config.get_multi_agent_setup(policies={"x": (None, LINE, TWO, {"gama": 1})})


def test_policies_to_train_become_a_predicate_of_id_and_batch():
    def get_predicate(config):
        return config.get_multi_agent_setup(env=SharedSpaces())[1]

    assert get_predicate(AlgorithmConfig()) is None
    is_trained = pickle.loads(pickle.dumps(get_predicate(league())))  # as other processes get it
    assert [is_trained("a"), is_trained("b", batch={}), is_trained("c")] == [True, True, False]

    def on_long_batches(policy_id, batch=None):
        return batch is not None and len(batch) > 2

    assert get_predicate(league().multi_agent(policies_to_train=on_long_batches)) is on_long_batches


def test_a_policy_does_not_hold_the_settings_of_all_others():
    config = league()
    for kind in (PPOConfig, PGConfig, DQNConfig):
        settings = config.settings_for(kind)
        assert not {"policies", "policy_mapping_fn", "policies_to_train"} & set(settings)
    complete, _ = complete_config(PPOTF2Policy, config)
    assert complete["policies"] == {DEFAULT_POLICY_ID: (None, None, None, None)}
    result = get_config(config, env=SharedSpaces())
    assert result.policies == {DEFAULT_POLICY_ID: PolicySpec()}


def test_a_thousand_policies_share_the_sections_that_they_do_not_change():
    policies = {f"p{i}": PolicySpec(config={"lr": 0.1}) for i in range(1000)}
    config = PPOConfig().multi_agent(policies=policies)
    specs, _ = config.get_multi_agent_setup(env=SharedSpaces())
    sections = {id(spec.config._sections["environment"]) for spec in specs.values()}
    assert (len(specs), len(sections)) == (1000, 1)
    assert np.isclose(specs["p7"].config.lr, 0.1)
