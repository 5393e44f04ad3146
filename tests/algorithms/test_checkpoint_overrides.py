"""Settings that are given when a checkpoint is loaded; all others stay as they were saved."""

import copy
import logging

import numpy as np
import pytest

from helpers import factories
from helpers.workers import make_small_config
from tfpolicies import Algorithm, PPOTF2Policy, SACConfig, TFPolicy
from tfpolicies.envs.multi_agent_env import make_multi_agent

pytestmark = pytest.mark.usefixtures("kept_programs")


def config(**settings):
    config = make_small_config(rollout_fragment_length=16, log_level="WARN")
    return config.training(train_batch_size=16, num_sgd_iter=1).update_from_dict(settings)


def get_numbers(algorithm, *names):
    return tuple(algorithm.get_policy().get_hyperparameter(name) for name in names)


def get_rates(algorithm):
    return {pid: algorithm.get_policy(pid).get_hyperparameter("lr") for pid in "abcd"}


def train(algorithm):
    """Returns the learning rate of one iteration."""
    return algorithm.train()["info"]["learner"]["default_policy"]["learner_stats"]["cur_lr"]


def get_lines(caplog):
    """Returns the lines about numbers of the config."""
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if "come from the config" in line]


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of lr 0.5 and gamma 0.25, whose clip_param was set to 0.125 since."""
    algorithm = config(lr=0.5, gamma=0.25, clip_param=0.75).build()
    algorithm.get_policy().set_hyperparameter("clip_param", 0.125)
    algorithm.save(tmp_path)
    return tmp_path


def test_hyperparameters_given_at_load_are_those_that_learn(saved):
    settings = {"lr": 0.0625, "entropy_coeff": 0.375}
    algorithm = Algorithm.from_checkpoint(saved, config=settings)
    policy = algorithm.get_policy()
    assert get_numbers(algorithm, "lr", "entropy_coeff", "gamma") == (0.0625, 0.375, 0.25)
    assert (policy.config["lr"], policy.config["entropy_coeff"]) == (0.0625, 0.375)
    assert algorithm.config.lr == train(algorithm) == 0.0625
    assert policy.get_hyperparameter("clip_param") == 0.125  # it was not given


def test_a_number_that_was_set_since_gives_way_to_the_same_number_as_in_the_config(saved):
    algorithm = Algorithm.from_checkpoint(saved, config={"clip_param": 0.75})
    assert get_numbers(algorithm, "clip_param") == (0.75,)


def test_a_number_given_at_load_replaces_the_stored_schedule(tmp_path):
    config(lr_schedule=[[0, 0.5], [1000, 0.25]]).build().save(tmp_path)
    algorithm = Algorithm.from_checkpoint(tmp_path, config={"lr": 0.125})
    assert algorithm.config.lr_schedule is None
    assert train(algorithm) == 0.125
    algorithm = Algorithm.from_checkpoint(tmp_path, config={"lr_schedule": [[0, 1.0], [32, 0.0]]})
    assert train(algorithm) == 1.0
    assert train(algorithm) == 0.5  # it learns from time step 16 on


def test_a_policy_alone_has_the_given_settings(saved):
    policy = TFPolicy.from_checkpoint(saved / "policies" / "default_policy", config={"gamma": 0.5})
    assert policy.get_hyperparameter("gamma") == policy.config["gamma"] == 0.5
    assert policy.get_hyperparameter("lr") == 0.5


@pytest.mark.parametrize("way", ["restore", "__setstate__"])
def test_an_algorithm_of_other_numbers_keeps_them(way, saved, caplog):
    caplog.set_level(logging.INFO, logger="tfpolicies.algorithms.algorithm_checkpoints")
    algorithm = config(lr=0.0625, gamma=0.5, clip_param=0.75).build()
    if way == "restore":
        algorithm.restore(saved)
        expected = "PPO: gamma, lr come from the config, not from the checkpoint."
        assert get_lines(caplog) == [expected]
    else:
        other = Algorithm.from_checkpoint(saved)
        state = other.__getstate__()
        before = copy.deepcopy(state["worker"]["policy_states"]["default_policy"])
        algorithm.__setstate__(state)
        after = state["worker"]["policy_states"]["default_policy"]
        assert before["hyperparameters"] == after["hyperparameters"]
    assert get_numbers(algorithm, "lr", "gamma", "clip_param") == (0.0625, 0.5, 0.125)
    assert train(algorithm) == 0.0625


def test_rates_of_networks_that_default_to_lr_are_the_given_one(tmp_path):
    rates = {"lr": 0.5, "actor_lr": None, "critic_lr": 0.25}
    make_small_config("Pendulum-v1", SACConfig, **rates).build().save(tmp_path)
    algorithm = Algorithm.from_checkpoint(tmp_path, config={"lr": 0.125})
    assert get_numbers(algorithm, *rates) == (0.125, 0.125, 0.25)


def halve(step):
    return 0.5 / (1 + step // 16)


def test_a_rate_that_is_a_function_continues_and_nothing_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="tfpolicies.algorithms.algorithm_checkpoints")
    algorithm = config(lr=halve).build()
    algorithm.train()
    algorithm.save(tmp_path)
    restored = config(lr=halve).build()
    restored.restore(tmp_path)
    assert get_numbers(restored, "lr") == get_numbers(algorithm, "lr") == (0.25,)
    assert get_lines(caplog) == []


class OwnPolicy(PPOTF2Policy):
    pass


def map_by_index(agent_id, *args, **kwargs):
    return "ab"[agent_id]


TwoPoles = make_multi_agent("CartPole-v1")
POLICIES = {"a": (OwnPolicy, None, None, {}), "b": (OwnPolicy, None, None, {"lr": 0.25})}
UNRESOLVED = {"env": TwoPoles, "policies": POLICIES, "policy_mapping_fn": map_by_index}


def two_policies():
    settings = {**UNRESOLVED, "env_config": {"num_agents": 2}, "policies_to_train": ["a"]}
    return config(lr=0.5, **settings)


def test_policies_that_are_given_again_are_trained_as_before(tmp_path):
    two_policies().build().save(tmp_path)
    settings = {"env": TwoPoles, "policies": POLICIES}
    restored = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=map_by_index, config=settings)
    assert list(restored.config.policies_to_train) == ["a"]
    assert restored.worker.get_policies_to_train() == {"a"}
    restored = Algorithm.from_checkpoint(
        tmp_path, config={**UNRESOLVED, "policies_to_train": ["b"]}
    )
    assert restored.worker.get_policies_to_train() == {"b"}


def test_each_policy_of_several_has_its_own_numbers_or_the_given_ones(tmp_path):
    algorithm = two_policies().build()
    algorithm.add_policy("c", OwnPolicy, config={})
    algorithm.add_policy("d", OwnPolicy, config={"lr": 0.75})
    algorithm.save(tmp_path)
    restored = Algorithm.from_checkpoint(tmp_path, config={**UNRESOLVED, "lr": 0.0625})
    assert get_rates(restored) == {"a": 0.0625, "b": 0.25, "c": 0.0625, "d": 0.75}
    assert get_rates(restored) == {pid: restored.get_policy(pid).config["lr"] for pid in "abcd"}
    algorithm = two_policies().training(lr=0.125).build()
    algorithm.restore(tmp_path)
    assert get_rates(algorithm) == {"a": 0.125, "b": 0.25, "c": 0.125, "d": 0.75}


def test_copies_and_states_of_one_run_log_nothing_about_numbers(saved, caplog):
    caplog.set_level(logging.INFO)
    algorithm = Algorithm.from_checkpoint(saved)
    policy = algorithm.get_policy()
    policy.set_hyperparameter("lr", 0.125)
    policy.set_state(policy.get_state())
    algorithm.worker.set_state(algorithm.worker.get_state())
    assert get_lines(caplog) == []
    assert policy.get_hyperparameter("lr") == policy.copy().get_hyperparameter("lr") == 0.125


def test_a_policy_that_restores_a_state_has_all_of_it():
    first, second = factories.make(lr=0.5), factories.make(lr=0.25)
    second.set_state(first.get_state())
    assert second.get_hyperparameter("lr") == np.float32(0.5)
