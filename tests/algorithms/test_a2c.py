"""Advantage actor-critic: advantages, loss and gradient by hand; both modes; a run."""

import numpy as np
import pytest

from helpers.factories import TWO, assert_close, make, trajectory
from tfpolicies import A2CConfig, A2CTF1Policy, A2CTF2Policy, SampleBatch
from tfpolicies.errors import ConfigError
from tfpolicies.testing import check_policy

pytestmark = pytest.mark.usefixtures("kept_programs")

SPLIT = {"fcnet_hiddens": [], "vf_share_layers": False}


@pytest.mark.core
def test_advantages_are_those_of_n_steps():
    policy = make(A2CTF2Policy, gamma=0.5)
    batch = trajectory(policy, 3, terminated=True)
    batch["rewards"] = np.array([1.0, 2.0, 4.0], np.float32)
    batch["vf_preds"] = np.array([0.5, 1.0, 2.0], np.float32)
    policy.postprocess_trajectory(batch)
    assert batch["value_targets"].tolist() == [3.0, 4.0, 4.0]
    assert batch["advantages"].tolist() == [2.5, 3.0, 2.0]


def test_a_trajectory_that_continues_is_bootstrapped_with_the_value_reached():
    policy = make(A2CTF2Policy, gamma=0.5)
    batch = trajectory(policy, 2, terminated=False)
    batch["rewards"] = np.zeros(2, np.float32)
    policy.postprocess_trajectory(batch)
    reached = policy.compute_actions(batch["new_obs"]).extras["vf_preds"][-1]
    np.testing.assert_allclose(batch["value_targets"], [0.25 * reached, 0.5 * reached], rtol=1e-5)


@pytest.mark.core
def test_loss_and_gradient_are_those_of_the_paper():
    policy = make(A2CTF2Policy, model=SPLIT, vf_loss_coeff=0.5, entropy_coeff=0.1, grad_clip=None)
    rng = np.random.default_rng(2)
    obs = rng.normal(size=(6, 3)).astype(np.float32)
    actions = np.array([0, 1, 1, 0, 1, 0])
    advantages, targets = rng.normal(size=(2, 6)).astype(np.float32)
    batch = SampleBatch(obs=obs, actions=actions, advantages=advantages, value_targets=targets)
    weights = policy.get_weights()
    (kernel, bias), (value_kernel, value_bias) = (
        [x for x in weights.values() if x.shape[-1] == width] for width in (2, 1)
    )
    logits, values = obs @ kernel + bias, (obs @ value_kernel + value_bias)[:, 0]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    entropies = -(p * np.log(p)).sum(-1)
    gradients, info = policy.compute_gradients(batch)
    stats = info["learner_stats"]
    chosen = np.log(p[np.arange(6), actions])
    assert stats["policy_loss"] == pytest.approx(-(chosen * advantages).mean(), rel=1e-4)
    assert stats["vf_loss"] == pytest.approx(0.5 * ((values - targets) ** 2).mean(), rel=1e-4)
    assert stats["policy_entropy"] == pytest.approx(entropies.mean(), rel=1e-4)
    d_entropy = -p * (np.log(p) + entropies[:, None])
    d_logits = (-advantages[:, None] * (np.eye(2)[actions] - p) - 0.1 * d_entropy) / 6
    d_values = 0.5 * (values - targets)[:, None] / 6
    by_shape = {x.shape: x for x in gradients}
    np.testing.assert_allclose(by_shape[3, 2], obs.T @ d_logits, atol=1e-5)
    np.testing.assert_allclose(by_shape[3, 1], obs.T @ d_values, atol=1e-5)


def test_both_modes_learn_alike():
    policies = [make(kind, lr=0.01) for kind in (A2CTF2Policy, A2CTF1Policy)]
    batch = trajectory(policies[0], 16)
    policies[0].postprocess_trajectory(batch)
    results = [policy.learn_on_batch(batch)["learner_stats"] for policy in policies]
    assert results[0].keys() == results[1].keys()
    assert {"policy_loss", "policy_entropy", "vf_loss", "vf_explained_var"} <= results[0].keys()
    assert_close(*(policy.get_weights() for policy in policies), 1e-6)


def test_defaults_and_contradictions():
    config = A2CConfig()
    assert (config.lr, config.grad_clip, config.lambda_) == (1e-4, 40.0, 1.0)
    assert (config.vf_loss_coeff, config.entropy_coeff) == (0.5, 0.01)
    with pytest.raises(ConfigError, match="use_gae=False needs complete episodes"):
        A2CConfig().environment("CartPole-v1").training(use_gae=False).build()


def test_the_conformance_check_passes():
    check_policy(make(A2CTF2Policy))


def test_it_learns_an_obvious_choice():
    config = A2CConfig().environment("CartPole-v1").debugging(seed=0)
    config.framework(inference="tf", jit_compile=False).rollouts(num_envs_per_worker=8)
    config.training(lr=5e-3, model={"fcnet_hiddens": [16]}, train_batch_size=320)
    algorithm = config.build()
    first = algorithm.train()["episode_reward_mean"]
    for _ in range(60):
        last = algorithm.train()["episode_reward_mean"]
    assert algorithm.get_policy().action_space == TWO
    assert last > 2 * first
