"""Policies of other algorithms in a run: trained only by a training step that they learn from."""

import gymnasium as gym
import numpy as np
import pytest

from helpers import factories
from tfpolicies import (
    PPO,
    DQNConfig,
    DQNTF2Policy,
    PGTF2Policy,
    Policy,
    PPOConfig,
    PPOTF2Policy,
)
from tfpolicies.config.policy_spec import PolicySpec
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import ConfigError

pytestmark = pytest.mark.usefixtures("kept_programs")


class Short(gym.Env):
    observation_space, action_space = factories.OBS, factories.TWO

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(3, np.float32), float(action), self.t == 5, False, {}


MODEL = {"fcnet_hiddens": [4], "vf_share_layers": True}
TwoShort = make_multi_agent(lambda config: Short())
NEEDS_REPLAY = (
    "Policy 'b' is a DQNTF2Policy, which learns from replayed rows and target networks, but the "
    "training step of PPO has only freshly sampled rows. Leave it out of `policies_to_train`"
)


def run(config, other, trained, algo_class=None):
    policies = {"a": PolicySpec(), "b": PolicySpec(policy_class=other)}
    config = config.environment(TwoShort, env_config={"num_agents": 2})
    config.training(model=MODEL, train_batch_size=20)
    config.framework(inference="tf", jit_compile=False).debugging(seed=0, log_level="ERROR")
    config.rollouts(rollout_fragment_length=10)
    config.multi_agent(
        policies=policies,
        policy_mapping_fn=lambda agent, *args, **kwargs: "ab"[agent],
        policies_to_train=trained,
    )
    if isinstance(config, PPOConfig):
        config.training(sgd_minibatch_size=10)
    else:
        config.reporting(min_sample_timesteps_per_iteration=0)
    return config.build() if algo_class is None else algo_class(config)


@pytest.mark.core
@pytest.mark.parametrize("trained", [None, ["a", "b"], ["b"]])
def test_what_is_to_be_trained_and_cannot_is_refused_when_built(trained):
    with pytest.raises(ConfigError, match=NEEDS_REPLAY):
        run(PPOConfig(), DQNTF2Policy, trained)
    words = "which learns from only freshly sampled rows, but the training step of DQN has replay"
    with pytest.raises(ConfigError, match=f"'b' is a PPOTF2Policy, {words}"):
        run(DQNConfig(), PPOTF2Policy, trained)


class OwnDQN(DQNTF2Policy):
    pass


class ByHand(Policy):
    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return np.zeros(len(obs_batch), np.int64), [], {}

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
        (ByHand, None, None),
        (DQNTF2Policy, None, OwnStep),
    ],
)
def test_what_is_not_trained_or_the_users_own_passes(other, trained, algo_class):
    algorithm = run(PPOConfig(), other, trained, algo_class)
    assert type(algorithm.get_policy("b")) is other
    algorithm.stop()


def test_a_function_that_says_what_is_trained_is_asked_at_the_first_update():
    def trained(policy_id, batch=None):
        return True

    algorithm = run(PPOConfig(), DQNTF2Policy, trained)
    before = algorithm.get_policy("b").get_weights()
    for _ in range(2):  # the next one is refused as well
        with pytest.raises(ConfigError, match=NEEDS_REPLAY):
            algorithm.train()
    for key, x in algorithm.get_policy("b").get_weights().items():
        np.testing.assert_array_equal(x, before[key])
    algorithm = run(PPOConfig(), DQNTF2Policy, lambda policy_id, batch=None: policy_id == "a")
    assert set(algorithm.train()["info"]["learner"]) == {"a"}


@pytest.mark.core
def test_policies_that_are_added_are_held_to_the_same():
    algorithm = run(PPOConfig(), PPOTF2Policy, None)
    with pytest.raises(ConfigError, match="Policy 'c' is a DQNTF2Policy"):
        algorithm.add_policy("c", DQNTF2Policy)
    assert "c" not in algorithm.workers.local_worker().policy_map
    added = algorithm.add_policy("c", DQNTF2Policy, policies_to_train=["a", "b"])
    assert type(added) is DQNTF2Policy
    algorithm.train()


def test_two_algorithms_side_by_side_each_train_their_own():
    kinds = {"a": PPOTF2Policy, "b": DQNTF2Policy}
    ppo = run(PPOConfig(), DQNTF2Policy, ["a"])
    dqn = DQNConfig().environment(TwoShort, env_config={"num_agents": 2})
    dqn.training(model=MODEL, num_steps_sampled_before_learning_starts=0, train_batch_size=8)
    dqn.framework(inference="tf", jit_compile=False).debugging(seed=0, log_level="ERROR")
    dqn.reporting(min_sample_timesteps_per_iteration=0)
    dqn.multi_agent(
        policies={name: PolicySpec(policy_class=kind) for name, kind in kinds.items()},
        policy_mapping_fn=lambda agent, *args, **kwargs: "ab"[agent],
        policies_to_train=["b"],
    )
    other = dqn.build()
    for _ in range(2):
        assert set(ppo.train()["info"]["learner"]) == {"a"}
        assert set(other.train()["info"]["learner"]) == {"b"}
        ppo.set_weights(other.get_weights(["b"]))
        other.set_weights(ppo.get_weights(["a"]))
