"""PPO apart from its loss: advantages, the KL coefficient, schedules, settings."""

import numpy as np
import pytest

from helpers.factories import batch_for, make, trajectory
from tfpolicies import PPOConfig, SampleBatch
from tfpolicies.batch.postprocessing import standardized
from tfpolicies.errors import ConfigError
from tfpolicies.policy.fragments import Fragments


def compute_advantages(rewards, values, last_value, gamma, lambda_):
    """Equation 16 of arXiv:1506.02438, as a sum."""
    next_values = [*values[1:], last_value]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, next_values, values, strict=True)]
    return [
        sum((gamma * lambda_) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


@pytest.mark.core
@pytest.mark.parametrize("ending", ["terminated", "truncated", "fragment end"])
def test_termination_cuts_the_bootstrap_but_truncation_and_the_fragments_end_keep_it(ending):
    policy = make(gamma=0.9, **{"lambda": 0.8})
    batch = trajectory(policy, 4, terminated=ending == "terminated")
    batch["truncateds"][-1] = ending == "truncated"
    reached = policy.compute_actions(batch["new_obs"][-1:]).extras["vf_preds"][0]
    last = 0.0 if ending == "terminated" else reached
    assert policy.postprocess_trajectory(batch) is batch
    values = batch["vf_preds"]
    expected = compute_advantages(batch["rewards"], values, last, 0.9, 0.8)
    np.testing.assert_allclose(batch["advantages"], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(batch["value_targets"], values + expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(batch["values_bootstrapped"], [*values[1:], last], atol=1e-7)
    assert {batch[name].dtype.name for name in ("advantages", "value_targets")} == {"float32"}


@pytest.mark.core
def test_all_trajectories_at_once_are_each_trajectory_alone():
    policy = make(gamma=0.9, **{"lambda": 0.7})
    steps, rng = 6, np.random.default_rng(0)
    new_obs = rng.normal(size=(3, steps, 3)).astype(np.float32)
    columns = {
        "rewards": rng.normal(size=(3, steps)).astype(np.float32),
        "vf_preds": rng.normal(size=(3, steps)).astype(np.float32),
        "terminateds": np.zeros((3, steps), bool),
        "truncateds": np.zeros((3, steps), bool),
    }
    columns["terminateds"][0, 2] = columns["terminateds"][2, 5] = True
    columns["truncateds"][1, 3] = True
    ends = columns["terminateds"] | columns["truncateds"]
    ends[:, -1] = True
    places = np.nonzero(ends & ~columns["terminateds"])
    fragments = Fragments(columns, ends, policy, places, [new_obs[places]])
    policy.postprocess_fragments(fragments)
    for env, pieces in enumerate([[(0, 3), (3, 6)], [(0, 4), (4, 6)], [(0, 6)]]):
        for start, stop in pieces:
            piece = {name: column[env, start:stop] for name, column in columns.items()}
            obs = new_obs[env, start:stop]
            batch = policy.postprocess_trajectory(SampleBatch(piece, obs=obs, new_obs=obs))
            for name in ("advantages", "value_targets", "values_bootstrapped"):
                actual = fragments.new_columns[name][env, start:stop]
                np.testing.assert_allclose(actual, batch[name], atol=1e-6, err_msg=name)


def test_without_gae_advantages_are_returns_minus_values():
    policy = make(gamma=0.5, use_gae=False, **{"lambda": 0.1})
    batch = batch_for(policy, 3)
    r = batch["rewards"]
    returns = [r[0] + r[1] / 2 + r[2] / 4, r[1] + r[2] / 2, r[2]]
    np.testing.assert_allclose(batch["value_targets"], returns, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(batch["advantages"], returns - batch["vf_preds"], atol=1e-6)


def test_without_a_critic_advantages_are_returns_and_there_is_no_value():
    policy = make(gamma=0.5, use_critic=False, use_gae=False)
    batch = batch_for(policy, 2)
    r = batch["rewards"]
    assert "vf_preds" not in batch
    np.testing.assert_allclose(batch["advantages"], [r[0] + r[1] / 2, r[1]], rtol=1e-6)
    stats = policy.learn_on_batch(batch)["learner_stats"]
    assert stats["vf_loss"] == 0.0


def test_advantages_use_the_gamma_and_lambda_in_force():
    policy = make(gamma=0.9, **{"lambda": 0.9})
    policy.set_hyperparameter("gamma", 0.0)
    batch = batch_for(policy, 4)
    np.testing.assert_allclose(batch["advantages"], batch["rewards"] - batch["vf_preds"], atol=1e-6)


@pytest.mark.core
def test_the_kl_coefficient_follows_its_target():
    policy = make(kl_coeff=0.2, kl_target=0.01)
    assert policy.update_kl(0.021) == pytest.approx(0.3)
    assert policy.update_kl(0.0199) == pytest.approx(0.3)
    assert policy.update_kl(0.0051) == pytest.approx(0.3)
    assert policy.update_kl(0.0049) == pytest.approx(0.15)
    stats = policy.learn_on_batch(batch_for(policy, 4))["learner_stats"]
    assert stats["cur_kl_coeff"] == pytest.approx(0.15)
    other = make(kl_coeff=0.2)
    other.set_state(policy.get_state())
    assert other.get_hyperparameter("kl_coeff") == pytest.approx(0.15)


@pytest.mark.core
def test_schedules_move_with_the_time_step_of_the_run():
    policy = make(
        lr=1.0,
        lr_schedule=[[0, 0.1], [100, 0.2], [200, 0.0]],
        entropy_coeff_schedule=[[50, 1.0], [150, 0.0]],
    )
    for timestep, *expected in (
        (None, 0.1, 1.0),
        (0, 0.1, 1.0),
        (50, 0.15, 1.0),
        (150, 0.1, 0.0),
        (1000, 0.0, 0.0),
    ):
        if timestep is not None:
            policy.on_global_var_update({"timestep": timestep})
        actual = [policy.get_hyperparameter(name) for name in ("lr", "entropy_coeff")]
        np.testing.assert_allclose(actual, expected, atol=1e-6)
    before = policy.get_weights()
    policy.learn_on_batch(batch_for(policy, 4))
    for name, values in policy.get_weights().items():
        np.testing.assert_array_equal(values, before[name])  # the step size is 0 now


@pytest.mark.core
def test_a_schedule_holds_from_the_first_update_on_and_after_a_restore(tmp_path):
    falling = {"lr": 5e-5, "lr_schedule": [[0, 0.01], [400, 0.0]]}
    policy = make(**falling)
    stats = policy.learn_on_batch(batch_for(policy, 4))["learner_stats"]
    assert stats["cur_lr"] == pytest.approx(0.01)
    policy.on_global_var_update({"timestep": 100})
    policy.export_checkpoint(tmp_path)
    other = make(**{**falling, "lr_schedule": [[0, 0.08], [400, 0.04]]})
    other.set_state(policy.get_state())
    loaded = type(policy).from_checkpoint(tmp_path)
    for each, expected in ((loaded, 0.0075), (other, 0.07), (loaded.copy(), 0.0075)):
        assert each.get_hyperparameter("lr") == pytest.approx(expected)


def test_an_integer_entropy_schedule_goes_to_zero_at_that_time_step():
    policy = make(entropy_coeff=0.4, entropy_coeff_schedule=1000)
    for timestep, expected in ((0, 0.4), (250, 0.3), (1000, 0.0), (5000, 0.0)):
        policy.on_global_var_update({"timestep": timestep})
        assert policy.get_hyperparameter("entropy_coeff") == pytest.approx(expected)


def test_learner_stats_have_the_documented_names():
    policy = make()
    stats = policy.learn_on_batch(batch_for(policy, 4))["learner_stats"]
    coefficients = {"cur_kl_coeff", "cur_lr", "entropy_coeff"}
    values = {"vf_loss", "vf_explained_var", "vf_clipped"}
    assert set(stats) == {"total_loss", "policy_loss", "kl", "entropy", *values, *coefficients}


def test_perfect_values_explain_all_of_the_variance():
    policy = make()
    batch = batch_for(policy, 8)
    batch["value_targets"] = 50 * batch["vf_preds"]
    policy.set_weights([50 * w if w.shape == (4, 1) else w for w in policy.get_weights().values()])
    stats = policy.compute_gradients(batch)[1]["learner_stats"]
    assert stats["vf_explained_var"] == pytest.approx(1.0, abs=0.05)


def test_advantages_are_standardised_even_if_all_are_equal():
    np.testing.assert_allclose(
        standardized(np.array([1.0, 2.0, 3.0])), [-1.224745, 0, 1.224745], 1e-5
    )
    assert standardized(np.full(3, 7.0)).tolist() == [0, 0, 0]


# -- the config -----------------------------------------------------------------------------------


def test_the_defaults_are_those_of_rllib():
    config = PPOConfig()
    assert (config.lr, config.gamma, config["lambda"]) == (5e-5, 0.99, 1.0)
    assert (config.train_batch_size, config.sgd_minibatch_size) == (4000, 128)
    assert (config.num_sgd_iter, config.kl_coeff, config.kl_target) == (30, 0.2, 0.01)
    assert (config.clip_param, config.vf_clip_param, config.vf_loss_coeff) == (0.3, 10.0, 1.0)
    assert (config.entropy_coeff, config.grad_clip) == (0.0, None)
    assert (config.use_gae, config.use_critic) == (True, True)
    assert config.rollout_fragment_length == "auto"
    assert config.model["vf_share_layers"] is False


@pytest.mark.core
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip_param": 0}, "clip_param must be a number > 0, got 0"),
        ({"lambda_": 1.5}, r"lambda_ must be a number in \[0, 1\]"),
        ({"gamma": -0.1}, "gamma"),
        ({"entropy_coeff": -0.1}, "entropy_coeff must be a number >= 0"),
        ({"kl_coeff": float("nan")}, "kl_coeff"),
        ({"vf_loss_coeff": "much"}, "vf_loss_coeff"),
        ({"num_sgd_iter": 0}, "num_sgd_iter"),
        ({"sgd_minibatch_size": 1.5}, "sgd_minibatch_size"),
        ({"grad_clip_by": "norms"}, "grad_clip_by"),
        ({"lr_schedule": [[10, 1.0], [5, 0.5]]}, "lr_schedule.*increasing"),
        ({"entropy_coeff_schedule": [0.5]}, "entropy_coeff_schedule"),
        ({"model": {"fcnet_hidden": [3]}}, "Did you mean 'fcnet_hiddens'"),
    ],
)
def test_a_setting_out_of_its_range_fails_at_the_call_and_changes_nothing(settings, words):
    config = PPOConfig()
    with pytest.raises(ConfigError, match=words):
        config.training(**settings)
    assert config == PPOConfig()


def test_settings_that_contradict_each_other_fail_at_validation():
    with pytest.raises(ValueError, match="sgd_minibatch_size=128 must not be larger"):
        PPOConfig().training(train_batch_size=64).validate()
    with pytest.raises(ValueError, match="complete_episodes"):
        PPOConfig().training(use_gae=False).validate()
    PPOConfig().training(use_gae=False).rollouts(batch_mode="complete_episodes").validate()
    uneven = PPOConfig().training(train_batch_size=1000)
    with pytest.raises(ValueError, match="within 10 %"):
        uneven.rollouts(rollout_fragment_length=150, num_envs_per_worker=4).validate()
    uneven.rollouts(rollout_fragment_length=125).validate()
    uneven.rollouts(rollout_fragment_length="auto").validate()


def test_an_unknown_setting_of_a_policy_is_an_error_with_near_matches():
    with pytest.raises(ConfigError, match="Did you mean 'clip_param'"):
        make(clip_parm=0.1)
    with pytest.raises(TypeError, match="Did you mean 'clip_param'"):
        PPOConfig().training(clip_parm=0.1)
