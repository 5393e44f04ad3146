"""Several policies in a config: checked and translated at the call, completed for a worker."""

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
    MultiAgentEnv,
    PGConfig,
    PGTF2Policy,
    Policy,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
)
from tfpolicies.config.multi_agent import default_policy_mapping
from tfpolicies.config.settings_allowlist import decode_settings
from tfpolicies.errors import ConfigError, FrozenConfigError, UnknownSettingError, UsageError
from tfpolicies.policy.policy_config import complete_config
from tfpolicies.storage.json_values import encode_value

LINE, PLANE, TWO, THREE = Box(-1, 1, (1,)), Box(-1, 1, (2,)), Discrete(2), Discrete(3)


def by_first_letter(agent_id, episode, worker, **kwargs):
    return f"{agent_id[0]}_policy"


class ByHand(Policy):
    """A policy without TensorFlow and without a config class."""


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


# -- at the call ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("ids", [["b", "a"], ("b", "a"), {"b", "a"}, frozenset("ba")], ids=type)
def test_ids_become_specs(ids):
    config = AlgorithmConfig().multi_agent(policies=ids)
    assert config.policies == {"a": PolicySpec(), "b": PolicySpec()}
    if isinstance(ids, set | frozenset):
        assert list(config.policies) == ["a", "b"]  # whatever the hashes of this process
    else:
        assert list(config.policies) == ["b", "a"]


def test_tuples_lists_and_specs_become_specs():
    values = (PGTF2Policy, LINE, TWO, {"gamma": 0.5})
    spec = PolicySpec(*values)
    config = AlgorithmConfig().multi_agent(policies={"a": values, "b": list(values), "c": spec})
    assert config.policies == {"a": spec, "b": spec, "c": spec}


def test_a_whole_config_as_overrides_gives_all_of_its_settings():
    own = PPOConfig().training(gamma=0.5)
    config = PPOConfig().training(lr=0.1).multi_agent(policies={"a": PolicySpec(config=own)})
    own.training(gamma=0.6)
    made = config.get_multi_agent_setup(env=SharedSpaces())[0]["a"].config
    assert (made.gamma, made.lr) == (0.5, 5e-5)


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
def test_what_is_wrong_is_named_and_nothing_is_changed(settings, words):
    config = league()
    with pytest.raises(ConfigError if "policies_to_train" not in settings else UsageError) as error:
        config.multi_agent(**{"policy_map_capacity": 50, **settings})
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, AssertionError) == ("policies_to_train" in settings)
    with pytest.raises(ValueError, match=words):
        config.multi_agent(**settings)
    assert config == league()


def test_an_unknown_or_positional_argument_is_a_type_error():
    with pytest.raises(TypeError, match=r"'polices'\. Did you mean 'policies'"):
        AlgorithmConfig().multi_agent(polices={"a"})
    with pytest.raises(TypeError, match="policy_mapping"):
        AlgorithmConfig().multi_agent(policy_mapping=by_first_letter)
    with pytest.raises(TypeError, match="positional"):
        AlgorithmConfig().multi_agent(["a"])


def test_nothing_given_changes_nothing_and_minus_one_is_not_given():
    config = league()
    assert config.multi_agent() is config
    config.multi_agent(
        replay_mode=-1, policy_map_cache=-1, algorithm_config_overrides_per_module=-1
    )
    assert config == league()


def test_none_for_the_mapping_and_for_who_is_trained_are_the_defaults():
    config = league().multi_agent(policy_mapping_fn=None, policies_to_train=None)
    assert config.policy_mapping_fn is default_policy_mapping
    assert config.policies_to_train is None


@pytest.mark.parametrize("nobody", [[], set(), ()], ids=repr)
def test_nobody_to_train_is_taken_at_its_word_with_a_warning(nobody, caplog):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        config = league().multi_agent(policies_to_train=nobody)
    assert "no policy will be trained" in caplog.text
    assert config.policies_to_train == nobody
    is_trained = config.get_multi_agent_setup(env=SharedSpaces())[1]
    assert not is_trained("a")
    assert config.validate() is None


@pytest.mark.parametrize(
    ("policies", "many"),
    [({DEFAULT_POLICY_ID}, False), ({"a"}, True), ({DEFAULT_POLICY_ID, "a"}, True), ({}, True)],
)
def test_a_sole_default_policy_is_no_multi_agent_setup(policies, many):
    assert AlgorithmConfig().multi_agent(policies=policies).is_multi_agent() is many


def test_who_is_trained_must_be_defined():
    config = AlgorithmConfig().multi_agent(policies=["main", "other"], policies_to_train=["mian"])
    with pytest.raises(ConfigError, match=r"'mian'\], not defined .* Did you mean 'main'"):
        config.validate()
    assert config.multi_agent(policies_to_train=["main"]).validate() is None


def test_a_frozen_config_refuses_new_policies():
    config = league()
    config.freeze()
    with pytest.raises(FrozenConfigError, match="attribute policies of an already frozen"):
        config.multi_agent(policies=["x"])
    with pytest.raises(FrozenConfigError):
        config.policies_to_train = ["a"]
    assert config == league()


def test_what_the_caller_does_with_his_containers_afterwards_changes_nothing():
    overrides, trained = {"gamma": 0.5, "model": {"fcnet_hiddens": [4]}}, {"a"}
    policies = {"a": PolicySpec(config=overrides)}
    config = PPOConfig().multi_agent(policies=policies, policies_to_train=trained)
    kept = config.copy()
    overrides["gamma"] = 0.9
    overrides["model"]["fcnet_hiddens"].append(5)
    policies["b"] = PolicySpec()
    trained.add("b")
    config.policies["a"].config["gamma"] = 0.1
    config.policies_to_train.add("c")
    config.to_dict()["policies"]["a"][3]["gamma"] = 0.2
    assert config == kept
    assert config.policies["a"].config == {"gamma": 0.5, "model": {"fcnet_hiddens": [4]}}
    config.policies["c"] = PolicySpec()  # unlike what is in a copy
    assert config.policies.keys() == {"a", "c"}
    with pytest.raises(ConfigError, match="policy id must be"):
        config.policies["d/e"] = PolicySpec()
    assert config.policies.keys() == {"a", "c"}


# -- dicts ------------------------------------------------------------------------------------


def test_a_dict_has_four_tuples_and_brings_everything_back():
    config = league()
    as_dict = config.to_dict()
    overrides = {"gamma": 0.5, "model": {"fcnet_hiddens": [4]}}
    assert as_dict["policies"]["a"] == (PPOTF2Policy, LINE, TWO, overrides)
    assert as_dict["policies"]["c"] == (None, None, None, None)
    assert "multiagent" not in as_dict
    assert as_dict["count_steps_by"] == "agent_steps"
    assert PPOConfig.from_dict(as_dict) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_checkpoint_can_hold_it():
    config = league().multi_agent(policy_mapping_fn=None)
    record = json.loads(json.dumps(encode_value(config.to_dict())))
    assert PPOConfig.from_dict(decode_settings(record)) == config


def test_old_dict_configs_have_it_under_multiagent():
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


def test_multiagent_is_no_setting_of_its_own(no_extensions):
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


def test_the_settings_are_overrides_of_evaluation_too():
    config = league().evaluation(evaluation_config={"policy_mapping_fn": default_policy_mapping})
    assert config.validate() is None


# -- complete specs ---------------------------------------------------------------------------


class SharedSpaces(MultiAgentEnv):
    """All agents have the same spaces."""

    observation_space, action_space = PLANE, THREE
    _agent_ids = ("a1", "a2", "b1")

    def reset(self, *, seed=None, options=None):
        return {}, {}

    def step(self, action_dict):
        return {}, {}, {"__all__": True}, {"__all__": False}, {}


class EqualSpaces(SharedSpaces):
    """The same, said for each agent."""

    observation_space = gym.spaces.Dict({"a1": PLANE, "a2": PLANE, "b1": PLANE})
    action_space = gym.spaces.Dict({"a1": THREE, "a2": THREE, "b1": THREE})


class OwnSpaces(SharedSpaces):
    """Agents `a` are another kind than `b`."""

    observation_space = gym.spaces.Dict({"a1": LINE, "a2": LINE, "b1": PLANE})
    action_space = gym.spaces.Dict({"a1": TWO, "a2": TWO, "b1": THREE})


def spaces_of(config, **sources):
    specs, _ = config.get_multi_agent_setup(**sources)
    return {pid: (spec.observation_space, spec.action_space) for pid, spec in specs.items()}


def two():
    return AlgorithmConfig().multi_agent(
        policies=["a_policy", "b_policy"], policy_mapping_fn=by_first_letter
    )


@pytest.mark.parametrize("env", [SharedSpaces(), EqualSpaces()], ids=lambda e: type(e).__name__)
def test_spaces_that_agents_share_are_those_of_all_policies(env):
    assert spaces_of(two(), env=env) == {"a_policy": (PLANE, THREE), "b_policy": (PLANE, THREE)}


def test_spaces_by_agent_go_to_the_policies_that_agents_are_mapped_to():
    assert spaces_of(two(), env=OwnSpaces()) == {
        "a_policy": (LINE, TWO),
        "b_policy": (PLANE, THREE),
    }


def test_a_policy_that_no_agent_has_yet_has_no_spaces():
    config = two().multi_agent(policies=["a_policy", "b_policy", "later"])
    assert spaces_of(config, env=OwnSpaces())["later"] == (None, None)
    assert spaces_of(config, env=EqualSpaces())["later"] == (PLANE, THREE)


def test_agents_of_one_policy_must_have_the_same_spaces():
    config = two().multi_agent(policy_mapping_fn=lambda *args, **kwargs: "a_policy")
    with pytest.raises(
        ConfigError, match="'a_policy' acts for agents with different observation_sp"
    ):
        config.get_multi_agent_setup(env=OwnSpaces())
    config.multi_agent(policies={"a_policy": (None, LINE, None, {})})
    with pytest.raises(ConfigError, match="different action_spaces"):
        config.get_multi_agent_setup(env=OwnSpaces())
    config.multi_agent(policies={"a_policy": (None, LINE, TWO, {})})
    assert spaces_of(config, env=OwnSpaces()) == {"a_policy": (LINE, TWO)}


def test_a_mapping_that_needs_an_episode_is_told_what_to_do():
    def by_episode(agent_id, episode, worker, **kwargs):
        return ["a_policy", "b_policy"][episode.episode_id % 2]

    config = two().multi_agent(policy_mapping_fn=by_episode)
    with pytest.raises(ConfigError, match=r"policy_mapping_fn\('a1', None, worker=None\) raised"):
        config.get_multi_agent_setup(env=OwnSpaces())
    assert spaces_of(config, env=EqualSpaces())["a_policy"] == (PLANE, THREE)


def test_an_environment_of_one_agent_gives_its_spaces_even_if_they_are_dicts():
    class OneAgent(gym.Env):
        observation_space = gym.spaces.Dict({"left": LINE, "right": PLANE})
        action_space = TWO

    env = OneAgent()
    expected = {DEFAULT_POLICY_ID: (env.observation_space, TWO)}
    assert spaces_of(AlgorithmConfig(), env=env) == expected


def test_of_a_vector_environment_the_single_spaces_count():
    envs = gym.make_vec("CartPole-v1", num_envs=3)
    assert spaces_of(AlgorithmConfig(), env=envs) == {
        DEFAULT_POLICY_ID: (envs.single_observation_space, envs.single_action_space)
    }
    envs.close()


def test_spaces_are_looked_for_in_the_spec_then_those_given_then_the_env_then_the_config():
    config = AlgorithmConfig().environment(observation_space=LINE, action_space=TWO)
    config.multi_agent(policies={"a": PolicySpec(observation_space=PLANE), "b": PolicySpec()})
    square = Box(0, 1, (2, 2))
    assert spaces_of(config) == {"a": (PLANE, TWO), "b": (LINE, TWO)}
    env = gym.Env()
    env.observation_space, env.action_space = square, THREE
    assert spaces_of(config, env=env) == {"a": (PLANE, THREE), "b": (square, THREE)}
    values = {"a": (LINE, TWO), "b": (None, TWO), "__env__": (PLANE, THREE)}
    assert spaces_of(config, env=env, spaces=values) == {"a": (PLANE, TWO), "b": (square, TWO)}
    assert spaces_of(config, spaces=values) == {"a": (PLANE, TWO), "b": (PLANE, TWO)}


def test_a_space_that_nobody_names_is_an_error_with_the_policys_id():
    config = AlgorithmConfig().multi_agent(policies={"main": PolicySpec(observation_space=LINE)})
    with pytest.raises(ConfigError, match="action_space not provided for policy 'main'"):
        config.get_multi_agent_setup()


def test_each_policy_gets_a_whole_config_of_its_own():
    config = league().training(gamma=0.75)
    specs, _ = config.get_multi_agent_setup(env=SharedSpaces(), default_policy_class=PPOTF2Policy)
    assert {spec.policy_class for spec in specs.values()} == {PPOTF2Policy}
    a, b, c = (specs[x].config for x in "abc")
    assert all(type(made) is PPOConfig and not made.is_frozen for made in (a, b, c))
    assert (a.gamma, a.lr, a.model["fcnet_hiddens"]) == (0.5, 5e-5, [4])
    assert (b.gamma, b.lr, c.gamma, c.lr) == (0.75, 0.25, 0.75, 5e-5)
    assert c.training(lr=1.0).lr == 1.0
    assert (b.lr, config.lr) == (0.25, 5e-5)


def test_a_class_of_another_algorithm_gets_the_config_of_its_own():
    config = PPOConfig().training(gamma=0.5, clip_param=0.1)
    config.multi_agent(policies={"a": (PGTF2Policy, LINE, TWO, {"lr": 0.25})})
    made = config.get_multi_agent_setup()[0]["a"].config
    assert type(made) is PGConfig
    assert (made.gamma, made.lr) == (0.5, 0.25)
    general = AlgorithmConfig().multi_agent(policies={"a": (None, LINE, TWO, {"lambda": 0.5})})
    made = general.get_multi_agent_setup(default_policy_class=PPOTF2Policy)[0]["a"].config
    assert (type(made), made.lambda_) == (PPOConfig, 0.5)


def test_a_class_written_by_hand_may_have_settings_of_its_own():
    config = AlgorithmConfig().training(gamma=0.5)
    config.multi_agent(policies={"a": (ByHand, LINE, TWO, {"mood": ["calm"], "lr": 0.25})})
    made = config.get_multi_agent_setup()[0]["a"].config
    assert (made.mood, made["mood"], made.get("mood")) == (["calm"],) * 3
    assert "mood" in made
    assert "mood" not in config
    result = made.copy().to_dict()
    assert (result["mood"], result["lr"], result["gamma"]) == (["calm"], 0.25, 0.5)
    with pytest.raises(ConfigError, match=r"policies\['a'\].*lr must be"):
        config.multi_agent(policies={"a": (ByHand, LINE, TWO, {"mood": 1, "lr": -1})})


def test_policies_may_be_given_with_the_question():
    specs, _ = two().get_multi_agent_setup(policies={"x": (None, LINE, TWO, {})})
    assert list(specs) == ["x"]
    with pytest.raises(ConfigError, match=r"'x'.*'gama'.*Did you mean 'gamma'"):
        two().get_multi_agent_setup(policies={"x": (None, LINE, TWO, {"gama": 1})})


def test_who_is_trained_is_asked_by_id_and_batch():
    def question(config):
        return config.get_multi_agent_setup(env=SharedSpaces())[1]

    assert question(AlgorithmConfig()) is None
    among = pickle.loads(pickle.dumps(question(league())))  # as it goes to other processes
    assert [among("a"), among("b", batch={}), among("c")] == [True, True, False]

    def on_long_batches(policy_id, batch=None):
        return batch is not None and len(batch) > 2

    assert question(league().multi_agent(policies_to_train=on_long_batches)) is on_long_batches


# -- what policies hold -----------------------------------------------------------------------


def test_a_policy_does_not_carry_the_settings_of_all_others():
    config = league()
    for kind in (PPOConfig, PGConfig, DQNConfig):
        settings = config.settings_for(kind)
        assert not {"policies", "policy_mapping_fn", "policies_to_train"} & set(settings)
    complete, _ = complete_config(PPOTF2Policy, config)
    assert complete["policies"] == {DEFAULT_POLICY_ID: (None, None, None, None)}
    made = config.get_multi_agent_setup(env=SharedSpaces())[0]["a"].config
    assert made.policies == {DEFAULT_POLICY_ID: PolicySpec()}


def test_a_thousand_policies_are_set_up_in_steps_that_do_not_grow():
    names = [f"p{i}" for i in range(1000)]
    policies = {name: PolicySpec(config={"lr": 0.1}) for name in names}
    config = PPOConfig().multi_agent(policies=policies)
    specs, _ = config.get_multi_agent_setup(env=SharedSpaces())
    sections = {id(spec.config._sections["environment"]) for spec in specs.values()}
    assert len(specs) == 1000
    assert len(sections) == 1  # shared, and not a copy each
    assert np.isclose(specs["p7"].config.lr, 0.1)
