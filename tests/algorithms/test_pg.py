"""The policy gradient: returns of trajectories, loss and gradient by hand."""

import numpy as np
import pytest

from helpers.factories import batch_for, make, trajectory
from tfpolicies import PGConfig, PGTF2Policy, PGTFPolicy, SampleBatch


@pytest.mark.core
def test_advantages_are_discounted_returns_however_the_trajectory_ends():
    policy = make(PGTF2Policy, gamma=0.5)
    for terminated in (True, False):
        batch = trajectory(policy, 3, terminated=terminated)
        batch["rewards"] = np.array([1.0, 2.0, 4.0], np.float32)
        assert policy.postprocess_trajectory(batch) is batch
        assert batch["advantages"].tolist() == [3, 4, 4]
        assert batch["advantages"].dtype == np.float32


def test_returns_use_the_gamma_in_force():
    policy = make(PGTF2Policy, gamma=0.5)
    policy.set_hyperparameter("gamma", 0.0)
    batch = batch_for(policy, 3)
    np.testing.assert_array_equal(batch["advantages"], batch["rewards"])


@pytest.mark.core
def test_loss_and_gradient_are_those_of_reinforce():
    policy = make(PGTF2Policy, model={"fcnet_hiddens": []})
    rng = np.random.default_rng(2)
    obs = rng.normal(size=(6, 3)).astype(np.float32)
    actions = np.array([0, 1, 1, 0, 1, 0])
    returns = rng.normal(size=6).astype(np.float32)
    batch = SampleBatch(obs=obs, actions=actions, advantages=returns)
    kernel, bias = policy.get_weights().values()
    logits = obs @ kernel + bias
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    gradients, info = policy.compute_gradients(batch)
    chosen = np.log(p[np.arange(6), actions])
    assert info["learner_stats"]["policy_loss"] == pytest.approx(
        -(chosen * returns).mean(), rel=1e-5
    )
    d_logits = -returns[:, None] * (np.eye(2)[actions] - p) / 6
    np.testing.assert_allclose(gradients[0], obs.T @ d_logits, atol=1e-6)
    np.testing.assert_allclose(gradients[1], d_logits.sum(0), atol=1e-6)


def test_a_good_action_becomes_more_likely():
    policy = make(PGTF2Policy, lr=0.05)
    obs = np.ones((4, 3), np.float32)
    batch = SampleBatch(
        obs=obs, actions=np.array([0, 0, 1, 1]), advantages=np.array([1.0, 1, -1, -1], np.float32)
    )
    before = policy.compute_log_likelihoods([0] * 4, obs)
    for _ in range(3):
        stats = policy.learn_on_batch(batch)["learner_stats"]
    assert (policy.compute_log_likelihoods([0] * 4, obs) > before + 0.05).all()
    assert sorted(stats) == ["cur_lr", "policy_loss"]


def test_it_has_no_values_and_a_second_name():
    policy = make(PGTF2Policy)
    assert "vf_preds" not in policy.compute_actions(np.zeros((1, 3))).extras
    assert PGTFPolicy is PGTF2Policy


def test_defaults_are_those_of_the_contract():
    config = PGConfig()
    assert (config.lr, config.train_batch_size) == (4e-4, 200)
    assert config.rollout_fragment_length == "auto"
