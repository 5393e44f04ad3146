"""Behaviour cloning: loss and gradient by hand; what it reads; that it imitates."""

import numpy as np
import pytest

from helpers.environments import TwoArmsEnv
from helpers.factories import PLANE, assert_close, make, rows_of
from helpers.quick_configs import quick_config
from tfpolicies import BC, MARWIL, BCConfig, BCTF1Policy, BCTF2Policy, MARWILConfig, SampleBatch
from tfpolicies.errors import ConfigError
from tfpolicies.testing import check_policy

pytestmark = pytest.mark.usefixtures("kept_programs")

BOTH_RUNTIMES = pytest.mark.parametrize("policy_class", [BCTF2Policy, BCTF1Policy])


def make_rows(actions):
    return SampleBatch(obs=rows_of(PLANE, len(actions), 3) @ np.ones((2, 3)), actions=actions)


@pytest.mark.core
@BOTH_RUNTIMES
def test_an_update_by_sgd_is_one_of_maximum_likelihood(policy_class):
    settings = {"optimizer": {"type": "sgd"}, "lr": 0.5, "model": {"fcnet_hiddens": []}}
    policy, batch = make(policy_class, **settings), make_rows(np.array([0, 1, 1, 0, 1, 1]))
    kernel, bias = policy.get_weights().values()
    logits = batch["obs"] @ kernel + bias
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.eye(2)[batch["actions"]]
    stats = policy.learn_on_batch(batch)["learner_stats"]
    loss = -np.log((p * chosen).sum(-1)).mean()
    expected = {"policy_loss": loss, "total_loss": loss, "vf_loss": 0.0, "cur_lr": 0.5}
    assert stats == pytest.approx(expected, rel=1e-5)
    d_logits = (p - chosen) / 6
    new_weights = [kernel - 0.5 * batch["obs"].T @ d_logits, bias - 0.5 * d_logits.sum(0)]
    names = policy.get_weights().keys()
    assert_close(policy.get_weights(), dict(zip(names, new_weights, strict=True)), 1e-6)


def test_it_reads_nothing_but_observations_and_actions():
    policy = make(BCTF2Policy)
    assert policy.driver.learning.select_columns({}) == ["actions", "obs"]
    batch = make_rows(np.array([0, 1]))
    assert sorted(policy.postprocess_trajectory(batch)) == ["actions", "obs"]
    assert "new_obs" not in policy.view_requirements
    assert "vf_preds" not in policy.compute_actions(np.zeros((1, 3))).extras


def test_gaussian_actions_are_imitated_and_their_deviation_can_be_kept_large():
    actions = np.array([[0.5, -0.5]] * 16, np.float32)
    policies = [make(BCTF2Policy, actions=PLANE, lr=0.02, bc_logstd_coeff=x) for x in (0.0, 0.5)]
    batch = make_rows(actions)
    for policy in policies:
        for _ in range(150):
            policy.learn_on_batch(batch)
        result = policy.compute_actions(batch["obs"], explore=False)
        np.testing.assert_allclose(result.actions, actions, atol=0.1)
    log_stds = [
        policy.compute_actions(batch["obs"]).extras["action_dist_inputs"][:, 2:].mean()
        for policy in policies
    ]
    assert log_stds[1] > log_stds[0] + 0.2


def test_beta_is_0():
    config = BCConfig()
    assert isinstance(config, MARWILConfig)
    assert (config.beta, config.lr, config.train_batch_size) == (0.0, 1e-4, 2000)
    assert config.training(beta=0.0).beta == 0.0
    with pytest.raises(ConfigError, match=r"beta must be 0 .*use MARWILConfig.*, got 0.5"):
        config.training(beta=0.5)
    with pytest.raises(ConfigError, match=r"beta of .* must stay 0, got 1.0: .*MARWIL"):
        make(BCTF2Policy).set_hyperparameter("beta", 1.0)


def test_it_trains_by_minibatches():
    config = quick_config(BCConfig, lambda context: TwoArmsEnv(), sgd_minibatch_size=4)
    algorithm = config.rollouts(rollout_fragment_length=16).build()
    assert isinstance(algorithm, BC)
    assert isinstance(algorithm, MARWIL)
    algorithm.train()
    assert algorithm.get_policy().num_grad_updates == 4
    algorithm.stop()


def test_the_conformance_check_passes():
    check_policy(make(BCTF2Policy, actions=PLANE))
