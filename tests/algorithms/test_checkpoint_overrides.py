"""What a caller names when loading a checkpoint holds; the rest stays as it was saved."""

import copy
import logging

import numpy as np
import pytest

from helpers import factories
from tfpolicies import Algorithm, PPOConfig, PPOTF2Policy, SACConfig, TFPolicy
from tfpolicies.envs.multi_agent_env import make_multi_agent

pytestmark = pytest.mark.usefixtures("kept_programs")


def config(**training):
    settings = {"train_batch_size": 16, "sgd_minibatch_size": 16, "num_sgd_iter": 1, **training}
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .rollouts(rollout_fragment_length=16)
        .training(**settings, model={"fcnet_hiddens": [4]})
    )


def numbers(algorithm, *names, policy_id="default_policy"):
    return tuple(algorithm.get_policy(policy_id).get_hyperparameter(name) for name in names)


def learned_rate(algorithm):
    return algorithm.train()["info"]["learner"]["default_policy"]["learner_stats"]["cur_lr"]


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of lr 0.5 and gamma 0.25, whose clip_param was set to 0.125 since."""
    algorithm = config(lr=0.5, gamma=0.25, clip_param=0.75).build()
    algorithm.get_policy().set_hyperparameter("clip_param", 0.125)
    algorithm.save(tmp_path)
    algorithm.stop()
    return tmp_path


def test_hyperparameters_named_at_load_are_those_that_learn(saved):
    settings = {"lr": 0.0625, "entropy_coeff": 0.375}
    algorithm = Algorithm.from_checkpoint(saved, config=settings)
    policy = algorithm.get_policy()
    assert numbers(algorithm, "lr", "entropy_coeff", "gamma") == (0.0625, 0.375, 0.25)
    assert (policy.config["lr"], policy.config["entropy_coeff"]) == (0.0625, 0.375)
    assert algorithm.config.lr == learned_rate(algorithm) == 0.0625
    assert policy.get_hyperparameter("clip_param") == 0.125  # it was not named
    algorithm.stop()


def test_a_number_that_was_set_since_gives_way_to_the_same_number_as_in_the_config(saved):
    algorithm = Algorithm.from_checkpoint(saved, config={"clip_param": 0.75})
    assert numbers(algorithm, "clip_param") == (0.75,)
    algorithm.stop()


def test_a_number_named_at_load_replaces_the_stored_schedule(tmp_path):
    algorithm = config(lr_schedule=[[0, 0.5], [1000, 0.25]]).build()
    algorithm.save(tmp_path)
    algorithm.stop()
    algorithm = Algorithm.from_checkpoint(tmp_path, config={"lr": 0.125})
    assert algorithm.config.lr_schedule is None
    assert learned_rate(algorithm) == 0.125
    algorithm.stop()
    algorithm = Algorithm.from_checkpoint(tmp_path, config={"lr_schedule": [[0, 1.0], [32, 0.0]]})
    assert learned_rate(algorithm) == 1.0
    assert learned_rate(algorithm) == 0.5  # it learns from time step 16 on
    algorithm.stop()


def test_a_policy_alone_takes_what_is_named(saved):
    policy = TFPolicy.from_checkpoint(saved / "policies" / "default_policy", config={"gamma": 0.5})
    assert (
        policy.get_hyperparameter("gamma"),
        policy.get_hyperparameter("lr"),
        policy.config["gamma"],
    ) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("way", ["restore", "__setstate__"])
def test_an_algorithm_of_other_numbers_keeps_them(way, saved, caplog):
    caplog.set_level(logging.INFO, logger="tfpolicies.algorithms.algorithm_checkpoints")
    algorithm = config(lr=0.0625, gamma=0.5, clip_param=0.75).build()
    if way == "restore":
        algorithm.restore(saved)
        lines = [x.getMessage() for x in caplog.records if "come from the config" in x.getMessage()]
        assert lines == ["PPO: gamma, lr come from the config, not from the checkpoint."]
    else:
        other = Algorithm.from_checkpoint(saved)
        state = other.__getstate__()
        before = copy.deepcopy(state["worker"]["policy_states"]["default_policy"])
        algorithm.__setstate__(state)
        after = state["worker"]["policy_states"]["default_policy"]
        assert before["hyperparameters"] == after["hyperparameters"]
        other.stop()
    assert numbers(algorithm, "lr", "gamma", "clip_param") == (0.0625, 0.5, 0.125)
    assert learned_rate(algorithm) == 0.0625
    algorithm.stop()


def test_rates_of_networks_that_follow_lr_follow_the_one_that_is_named(tmp_path):
    made = SACConfig().environment("Pendulum-v1").training(lr=0.5, actor_lr=None, critic_lr=0.25)
    algorithm = made.build()
    algorithm.save(tmp_path)
    algorithm.stop()
    algorithm = Algorithm.from_checkpoint(tmp_path, config={"lr": 0.125})
    assert numbers(algorithm, "lr", "actor_lr", "critic_lr") == (0.125, 0.125, 0.25)
    algorithm.stop()


def halve(step):
    return 0.5 / (1 + step // 16)


def test_a_rate_that_is_a_function_goes_on_and_nothing_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="tfpolicies.algorithms.algorithm_checkpoints")
    algorithm = config(lr=halve).build()
    algorithm.train()
    algorithm.save(tmp_path)
    restored = config(lr=halve).build()
    restored.restore(tmp_path)
    assert numbers(restored, "lr") == numbers(algorithm, "lr") == (0.25,)
    assert not [x for x in caplog.records if "come from the config" in x.getMessage()]
    for each in (algorithm, restored):
        each.stop()


class OwnPolicy(PPOTF2Policy):
    pass


def own_policy_of(agent_id, *args, **kwargs):
    return "ab"[agent_id]


POLICIES = {"a": (OwnPolicy, None, None, {}), "b": (OwnPolicy, None, None, {"lr": 0.25})}


def two_policies():
    env = make_multi_agent("CartPole-v1")
    made = config(lr=0.5).environment(env, env_config={"num_agents": 2})
    return env, made.multi_agent(
        policies=POLICIES, policy_mapping_fn=own_policy_of, policies_to_train=["a"]
    )


def test_policies_that_are_given_again_are_trained_as_before(tmp_path):
    env, made = two_policies()
    algorithm = made.build()
    algorithm.save(tmp_path)
    algorithm.stop()
    settings = {"env": env, "policies": POLICIES}
    restored = Algorithm.from_checkpoint(
        str(tmp_path), policy_mapping_fn=own_policy_of, config=settings
    )
    assert list(restored.config.policies_to_train) == ["a"]
    assert restored.worker.get_policies_to_train() == {"a"}
    restored.stop()
    settings |= {"policy_mapping_fn": own_policy_of, "policies_to_train": ["b"]}
    restored = Algorithm.from_checkpoint(str(tmp_path), config=settings)
    assert restored.worker.get_policies_to_train() == {"b"}
    restored.stop()


def test_each_policy_of_several_has_its_own_numbers_or_those_that_are_named(tmp_path):
    env, made = two_policies()
    algorithm = made.build()
    algorithm.add_policy("c", OwnPolicy, config={})
    algorithm.add_policy("d", OwnPolicy, config={"lr": 0.75})
    algorithm.save(tmp_path)
    algorithm.stop()
    settings = {"env": env, "policies": POLICIES, "lr": 0.0625}
    restored = Algorithm.from_checkpoint(
        str(tmp_path), policy_mapping_fn=own_policy_of, config=settings
    )
    rates = {pid: numbers(restored, "lr", policy_id=pid)[0] for pid in "abcd"}
    assert rates == {"a": 0.0625, "b": 0.25, "c": 0.0625, "d": 0.75}
    assert {pid: restored.get_policy(pid).config["lr"] for pid in "abcd"} == rates
    restored.stop()
    env, perturbed = two_policies()
    algorithm = perturbed.training(lr=0.125).build()
    algorithm.restore(tmp_path)
    rates = {pid: numbers(algorithm, "lr", policy_id=pid)[0] for pid in "abcd"}
    assert rates == {"a": 0.125, "b": 0.25, "c": 0.125, "d": 0.75}
    algorithm.stop()


def test_copies_and_states_of_one_run_log_nothing_about_numbers(saved, caplog):
    caplog.set_level(logging.INFO)
    algorithm = Algorithm.from_checkpoint(saved)
    policy = algorithm.get_policy()
    policy.set_hyperparameter("lr", 0.125)
    policy.set_state(policy.get_state())
    algorithm.worker.set_state(algorithm.worker.get_state())
    assert not [x for x in caplog.records if "come from the config" in x.getMessage()]
    assert policy.get_hyperparameter("lr") == policy.copy().get_hyperparameter("lr") == 0.125
    algorithm.stop()


def test_a_policy_that_restores_a_state_has_all_of_it():
    first = PPOTF2Policy(factories.OBS, factories.TWO, {"lr": 0.5})
    second = PPOTF2Policy(factories.OBS, factories.TWO, {"lr": 0.25})
    second.set_state(first.get_state())
    assert second.get_hyperparameter("lr") == np.float32(0.5)
