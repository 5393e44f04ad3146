"""Policies of other algorithms in a run: trained only by a training step that they learn from."""

import numpy as np
import pytest

from helpers.custom_policies import ZeroPolicy
from helpers.environments import SeededEnv
from helpers.workers import make_small_config
from tfpolicies import PPO, DQNConfig, DQNTF2Policy, PGTF2Policy, PPOConfig, PPOTF2Policy
from tfpolicies.config.policy_spec import PolicySpec
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import ConfigError

pytestmark = pytest.mark.usefixtures("kept_programs")


MODEL = {"fcnet_hiddens": [4], "vf_share_layers": True}
TwoShort = make_multi_agent(lambda config: SeededEnv())
NEEDS_REPLAY = (
    "Policy 'b' is a DQNTF2Policy, which learns from replayed rows and target networks, but the "
    "training step of PPO has only freshly sampled rows. Leave it out of `policies_to_train`"
)


def build(config_class, a, b, trained, algo_class=None):
    """Builds an algorithm whose policies "a" and "b" have these classes."""
    config = make_small_config(TwoShort, config_class, env_config={"num_agents": 2}, model=MODEL)
    config.multi_agent(
        policies={"a": PolicySpec(a), "b": PolicySpec(b)},
        policy_mapping_fn=lambda agent, *args, **kwargs: "ab"[agent],
        policies_to_train=trained,
    )
    if config_class is PPOConfig:
        config.training(train_batch_size=20, sgd_minibatch_size=10)
        config.rollouts(rollout_fragment_length=10)
    else:
        config.training(num_steps_sampled_before_learning_starts=0, train_batch_size=8)
        config.reporting(min_sample_timesteps_per_iteration=0)
    return config.build() if algo_class is None else algo_class(config)


def build_ppo(other, trained, algo_class=None):
    return build(PPOConfig, None, other, trained, algo_class)


@pytest.mark.core
@pytest.mark.parametrize("trained", [None, ["a", "b"], ["b"]])
def test_a_policy_that_the_training_step_cannot_train_is_refused_when_built(trained):
    with pytest.raises(ConfigError, match=NEEDS_REPLAY):
        build_ppo(DQNTF2Policy, trained)
    words = "which learns from only freshly sampled rows, but the training step of DQN has replay"
    with pytest.raises(ConfigError, match=f"'b' is a PPOTF2Policy, {words}"):
        build(DQNConfig, None, PPOTF2Policy, trained)


class OwnDQN(DQNTF2Policy):
    pass


class CustomPolicy(ZeroPolicy):
    def learn_on_batch(self, samples):
        return {}


class OwnStep(PPO):
    def training_step(self):
        return {}


@pytest.mark.parametrize(
    ("other", "trained", "algo_class"),
    [
        (DQNTF2Policy, ["a"], None),
        (PGTF2Policy, None, None),
        (OwnDQN, None, None),
        (CustomPolicy, None, None),
        (DQNTF2Policy, None, OwnStep),
    ],
)
def test_policies_that_are_custom_or_not_trained_are_accepted(other, trained, algo_class):
    algorithm = build_ppo(other, trained, algo_class)
    assert type(algorithm.get_policy("b")) is other


def test_a_function_that_chooses_policies_to_train_is_called_at_the_first_update():
    algorithm = build_ppo(DQNTF2Policy, lambda policy_id, batch=None: True)
    before = algorithm.get_weights(["b"])
    for _ in range(2):  # the next one is refused as well
        with pytest.raises(ConfigError, match=NEEDS_REPLAY):
            algorithm.train()
    np.testing.assert_equal(algorithm.get_weights(["b"]), before)
    algorithm = build_ppo(DQNTF2Policy, lambda policy_id, batch=None: policy_id == "a")
    assert set(algorithm.train()["info"]["learner"]) == {"a"}


@pytest.mark.core
def test_added_policies_are_checked_too():
    algorithm = build_ppo(PPOTF2Policy, None)
    with pytest.raises(ConfigError, match="Policy 'c' is a DQNTF2Policy"):
        algorithm.add_policy("c", DQNTF2Policy)
    assert "c" not in algorithm.workers.local_worker().policy_map
    added = algorithm.add_policy("c", DQNTF2Policy, policies_to_train=["a", "b"])
    assert type(added) is DQNTF2Policy
    algorithm.train()


def test_two_algorithms_side_by_side_each_train_their_own():
    ppo = build_ppo(DQNTF2Policy, ["a"])
    dqn = build(DQNConfig, PPOTF2Policy, DQNTF2Policy, ["b"])
    for _ in range(2):
        assert set(ppo.train()["info"]["learner"]) == {"a"}
        assert set(dqn.train()["info"]["learner"]) == {"b"}
        ppo.set_weights(dqn.get_weights(["b"]))
        dqn.set_weights(ppo.get_weights(["a"]))
