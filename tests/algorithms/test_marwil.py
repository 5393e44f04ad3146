"""MARWIL: loss, moving average and whole updates by hand; returns; states; errors."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import TwoArmsEnv
from helpers.factories import (
    PLANE,
    TWO,
    assert_close,
    assert_equal,
    batch_for,
    make,
    rows_of,
    trajectory,
)
from helpers.policy_matrix import ACTIONS
from helpers.quick_configs import quick_config
from helpers.two_policies import Staged, a_and_b, make_config
from tfpolicies import (
    MARWIL,
    MARWILConfig,
    MARWILTF1Policy,
    MARWILTF2Policy,
    Policy,
    PolicySpec,
    SampleBatch,
)
from tfpolicies.errors import ConfigError, NonFiniteError
from tfpolicies.testing import check_policy

pytestmark = pytest.mark.usefixtures("kept_programs")

AVERAGE = "advantage_norm/layer_0/average"
BOTH_RUNTIMES = pytest.mark.parametrize("policy_class", [MARWILTF2Policy, MARWILTF1Policy])


def make_linear(policy_class=MARWILTF2Policy, actions=TWO, **config):
    """Makes a policy and a critic without hidden layers, with a moving average that moves."""
    settings = {
        "model": {"fcnet_hiddens": [], "vf_share_layers": False},
        "moving_average_sqd_adv_norm_start": 4.0,
        "moving_average_sqd_adv_norm_update_rate": 0.25,
        "beta": 0.5,
        "vf_coeff": 0.75,
        "lr": 0.05,
    }
    policy = make(policy_class, actions=actions, **{**settings, **config})
    rng = np.random.default_rng(5)
    weights = {
        name: w if name == AVERAGE else 0.3 * rng.normal(size=w.shape)
        for name, w in policy.get_weights().items()
    }
    policy.set_weights(weights)
    return policy


def make_rows(rows, actions=TWO, seed=2):
    rng = np.random.default_rng(seed)
    return SampleBatch(
        obs=rng.normal(size=(rows, 3)).astype(np.float32),
        actions=rows_of(actions, rows, seed),
        advantages=(2.0 * rng.normal(size=rows) + 1.0).astype(np.float32),
    )


class Reference:
    """MARWIL in NumPy, for the policies of `make_linear`, in float64."""

    def __init__(self, policy, std_coeff=0.0):
        weights = {k: w.astype(np.float64) for k, w in policy.get_weights().items()}
        self.squared_norm = float(weights.pop(AVERAGE))
        self.weights = weights
        self.is_discrete = policy.action_space is TWO
        self.std_coeff = std_coeff
        self.first, self.second, self.steps = {}, {}, 0

    def differentiate(self, batch):
        """Returns statistics and gradients, and moves the average."""
        obs, actions, returns = (
            batch[name].astype(np.float64) for name in ("obs", "actions", "advantages")
        )
        kernel, bias, value_kernel, value_bias = self.weights.values()
        outputs, values = obs @ kernel + bias, (obs @ value_kernel + value_bias)[:, 0]
        advantages, rows = returns - values, len(obs)
        mean_square = (advantages**2).mean()
        self.squared_norm += 0.25 * (mean_square - self.squared_norm)
        weights = np.exp(0.5 * advantages / (1e-8 + np.sqrt(self.squared_norm)))
        if self.is_discrete:
            p = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
            chosen = np.eye(2)[actions.astype(int)]
            objective, d_outputs = np.log((p * chosen).sum(-1)), chosen - p
        else:
            mean, log_std = np.split(outputs, 2, axis=-1)
            z = (actions - mean) / np.exp(log_std)
            objective = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
            objective += self.std_coeff * log_std.sum(-1)
            d_outputs = np.concatenate([z / np.exp(log_std), z**2 - 1.0 + self.std_coeff], axis=-1)
        policy_loss, vf_loss = -(weights * objective).mean(), 0.5 * mean_square
        d_outputs = -weights[:, None] * d_outputs / rows
        d_values = -0.75 * advantages[:, None] / rows
        gradients = [obs.T @ d_outputs, d_outputs.sum(0), obs.T @ d_values, d_values.sum(0)]
        return {
            "policy_loss": policy_loss,
            "vf_loss": vf_loss,
            "total_loss": policy_loss + 0.75 * vf_loss,
            "vf_explained_var": max(-1.0, 1.0 - np.var(advantages) / np.var(returns)),
            "moving_average_sqd_adv_norm": self.squared_norm,
            "mean_weight": weights.mean(),
            "max_weight": weights.max(),
        }, gradients

    def update(self, batch, lr=0.05):
        """Does one update by Adam; returns the statistics."""
        stats, gradients = self.differentiate(batch)
        self.steps += 1
        rate = lr * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for (name, weight), gradient in zip(self.weights.items(), gradients, strict=True):
            first = self.first[name] = 0.9 * self.first.get(name, 0.0) + 0.1 * gradient
            second = self.second.get(name, 0.0)
            second = self.second[name] = 0.999 * second + 0.001 * gradient**2
            self.weights[name] = weight - rate * first / (np.sqrt(second) + 1e-7)
        return stats

    def assert_like(self, policy):
        weights = policy.get_weights()
        assert float(weights.pop(AVERAGE)) == pytest.approx(self.squared_norm, rel=1e-5)
        assert_close(weights, self.weights, 2e-5)


def learn_batches(policy, batch):
    """Three updates of four rows by `learn_on_batch`; returns the last statistics."""
    for first in (0, 4, 8):
        result = policy.learn_on_batch(batch[first : first + 4])
    return result["learner_stats"]


def learn_epoch(policy, batch):
    policy.learn_epochs(batch, 1, 4, shuffle=False)


def learn_loaded(policy, batch):
    policy.config["sgd_minibatch_size"] = 4
    policy.load_batch_into_buffer(batch)
    for offset in (0, 4, 8):
        result = policy.learn_on_loaded_batch(offset)
    return result["learner_stats"]


@pytest.mark.core
@BOTH_RUNTIMES
@pytest.mark.parametrize("learn", [learn_batches, learn_epoch, learn_loaded])
def test_three_updates_and_the_moving_average_are_those_of_the_paper(policy_class, learn):
    policy = make_linear(policy_class)
    reference, batch = Reference(policy), make_rows(12)
    stats = learn(policy, batch)
    for first in (0, 4, 8):
        expected = reference.update(batch[first : first + 4])
    reference.assert_like(policy)
    assert policy.num_grad_updates == 3
    if stats is not None:
        assert stats == pytest.approx({**expected, "cur_lr": 0.05}, rel=1e-4)


def test_an_update_compiled_by_xla_is_the_same():
    policy = make_linear(jit_compile=True)
    reference, batch = Reference(policy), make_rows(10)
    policy.learn_epochs(batch, 2, 4, shuffle=False)  # minibatches of 4, 4 and 2 rows
    for first in (0, 4, 8) * 2:
        reference.update(batch[first : first + 4])
    reference.assert_like(policy)


@pytest.mark.core
@BOTH_RUNTIMES
def test_gaussian_actions_and_the_term_of_their_standard_deviations(policy_class):
    policy = make_linear(policy_class, PLANE, bc_logstd_coeff=0.3)
    reference, batch = Reference(policy, std_coeff=0.3), make_rows(6, PLANE)
    expected, expected_gradients = reference.differentiate(batch)
    gradients, info = policy.compute_gradients(batch)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    assert info["learner_stats"] == pytest.approx({**expected, "cur_lr": 0.05}, rel=1e-4)
    reference = Reference(policy, std_coeff=0.3)  # computing gradients moved nothing
    assert policy.learn_on_batch(batch)["learner_stats"] == pytest.approx(
        {**reference.update(batch), "cur_lr": 0.05}, rel=1e-4
    )
    reference.assert_like(policy)


@BOTH_RUNTIMES
def test_only_updates_move_the_average(policy_class):
    policy, batch = make_linear(policy_class), make_rows(4)
    _ = policy.view_requirements  # runs postprocessing and loss on zeros
    before = policy.get_weights()
    gradients, _ = policy.compute_gradients(batch)
    policy.compute_actions(batch["obs"])
    assert_equal(policy.get_weights(), before)
    with pytest.raises(NonFiniteError):
        policy.learn_on_batch(SampleBatch({**batch, "advantages": np.full(4, 1e30, np.float32)}))
    assert_equal(policy.get_weights(), before)
    policy.apply_gradients(gradients)
    assert policy.get_weights()[AVERAGE] == before[AVERAGE] == 4.0
    policy.learn_on_batch(batch)
    assert policy.get_weights()[AVERAGE] != 4.0


@BOTH_RUNTIMES
def test_the_average_is_part_of_states_copies_and_checkpoints(policy_class, tmp_path):
    policy, batch = make_linear(policy_class), make_rows(8)
    policy.learn_on_batch(batch)
    policy.export_checkpoint(tmp_path)
    other = make_linear(policy_class)
    other.set_state(policy.get_state())
    policies = [policy, other, policy.copy(), Policy.from_checkpoint(tmp_path)]
    for one in policies:
        assert one.get_weights()[AVERAGE] not in (4.0, 0.0)
        one.learn_on_batch(batch)
    for one in policies[1:]:
        assert_equal(one.get_weights(), policy.get_weights())


def test_policies_with_different_coefficients_share_a_program():
    first, second = make_linear(), make_linear(beta=1.0, vf_coeff=0.0, lr=0.1)
    assert first.program is second.program
    assert first.program is not make_linear(beta=0.0).program
    batch = make_rows(6)
    weights = [policy.learn_on_batch(batch)["learner_stats"] for policy in (first, second)]
    assert weights[0]["max_weight"] ** 2 == pytest.approx(weights[1]["max_weight"], rel=1e-5)
    first.set_hyperparameter("beta", 0.0)
    assert first.learn_on_batch(batch)["learner_stats"]["max_weight"] == 1.0


@pytest.mark.core
@BOTH_RUNTIMES
def test_returns_are_bootstrapped_unless_the_trajectory_terminated(policy_class):
    policy = make_linear(policy_class, gamma=0.5)
    for terminated in (True, False):
        batch = trajectory(policy, 3, terminated=terminated)
        batch["rewards"] = np.array([1.0, 2.0, 4.0], np.float32)
        batch["vf_preds"] = np.full(3, np.nan, np.float32)  # values of the past are not read
        policy.postprocess_trajectory(batch)
        reached = policy.compute_actions(batch["new_obs"][-1:]).extras["vf_preds"][0]
        last = 0.0 if terminated else reached
        expected = [3.0 + last / 8, 4.0 + last / 4, 4.0 + last / 2]
        np.testing.assert_allclose(batch["advantages"], expected, rtol=1e-6)
        assert batch["advantages"].dtype == np.float32


def test_it_reads_observations_actions_and_returns_and_without_beta_no_returns():
    policy = make_linear()
    assert policy.driver.learning.select_columns({}) == ["actions", "advantages", "obs"]
    policy = make_linear(beta=0.0)
    assert policy.driver.learning.select_columns({}) == ["actions", "obs"]
    assert AVERAGE not in policy.get_weights()
    batch = SampleBatch(obs=np.zeros((2, 3), np.float32), actions=np.array([0, 1]))
    assert sorted(policy.postprocess_trajectory(batch)) == ["actions", "obs"]
    assert not {"rewards", "new_obs", "advantages"} & batch.accessed_keys
    stats = policy.learn_on_batch(batch)["learner_stats"]
    assert sorted(stats) == ["cur_lr", "policy_loss", "total_loss", "vf_loss"]
    assert stats["vf_loss"] == 0.0


def test_padded_steps_of_sequences_count_nowhere():
    model = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 3, "max_seq_len": 4}
    settings = {"model": model, "moving_average_sqd_adv_norm_update_rate": 1.0}
    policies = [make(x, **settings) for x in (MARWILTF2Policy, MARWILTF1Policy)]
    rows = make_rows(6)
    state = {f"state_in_{i}": np.zeros((2, 3), np.float32) for i in range(2)}
    batch = SampleBatch({**rows, **state}, seq_lens=np.array([2, 4], np.int32))
    values, logp = [], []
    for start, stop in ((0, 2), (2, 6)):
        memory = policies[0].get_initial_state()
        for t in range(start, stop):
            obs, states = rows["obs"][t : t + 1], [x[None] for x in memory]
            action = rows["actions"][t : t + 1]
            logp += [policies[0].compute_log_likelihoods(action, obs, states)[0]]
            _, memory, extras = policies[0].compute_actions(obs, states)
            memory = [x[0] for x in memory]
            values += [extras["vf_preds"][0]]
    advantages = rows["advantages"] - np.array(values)
    weights = np.exp(advantages / np.sqrt((advantages**2).mean()))
    for policy in policies:
        stats = policy.learn_on_batch(batch)["learner_stats"]
        assert stats["policy_loss"] == pytest.approx(-(weights * logp).mean(), rel=1e-4)
        assert policy.get_weights()[AVERAGE] == pytest.approx((advantages**2).mean(), rel=1e-5)
    assert_close(*(policy.get_weights() for policy in policies), 1e-6)


@pytest.mark.parametrize("name", ACTIONS)
def test_it_learns_actions_of_every_space(name):
    policy = make(MARWILTF2Policy, actions=ACTIONS[name], lr=0.01)
    batch = batch_for(policy, 8)
    losses = [policy.learn_on_batch(batch)["learner_stats"]["total_loss"] for _ in range(10)]
    assert losses[-1] < losses[0]


def test_the_coefficient_of_standard_deviations_is_for_gaussian_actions():
    policies = [
        make(MARWILTF2Policy, actions=ACTIONS["nested"], bc_logstd_coeff=x) for x in (0.5, 0.0)
    ]
    batch = batch_for(policies[0], 8)
    losses = [x.learn_on_batch(batch)["learner_stats"]["policy_loss"] for x in policies]
    assert losses[0] != losses[1]  # one leaf is a Box of floats
    words = r"bc_logstd_coeff must be 0 for Discrete\(2\), got 0.5: .*no standard deviation"
    with pytest.raises(ConfigError, match=words):
        make(MARWILTF2Policy, bc_logstd_coeff=0.5)
    with pytest.raises(ConfigError, match=words):
        make(MARWILTF2Policy).set_hyperparameter("bc_logstd_coeff", 0.5)


def test_actions_at_the_bounds_of_a_squashed_gaussian_have_finite_losses():
    model = {"fcnet_hiddens": [4], "custom_action_dist": "squashed_gaussian"}
    policy = make(MARWILTF2Policy, actions=PLANE, model=model)
    batch = SampleBatch({**make_rows(2), "actions": np.array([[1, -1], [-1, 0]], np.float32)})
    for _ in range(3):
        stats = policy.learn_on_batch(batch)["learner_stats"]
    assert np.isfinite(stats["policy_loss"])


def test_actions_without_likelihoods_are_refused():
    model = {"custom_action_dist": "squashed_deterministic"}
    with pytest.raises(ConfigError, match="likelihoods, but SquashedDeterministic has none"):
        make(MARWILTF2Policy, actions=PLANE, model=model)


def test_it_imitates_the_better_half_of_mixed_actions():
    policy = make(MARWILTF2Policy, lr=0.02, moving_average_sqd_adv_norm_start=1.0)
    obs, actions = np.ones((8, 3), np.float32), np.arange(8) % 2
    batch = SampleBatch(obs=obs, actions=actions, advantages=(2.0 * actions).astype(np.float32))
    for _ in range(200):
        policy.learn_on_batch(batch)
    probability = np.exp(policy.compute_log_likelihoods([1], obs[:1])[0])
    assert probability == pytest.approx(1 / (1 + np.exp(-2)), abs=0.02)  # weights e and 1/e


def test_defaults_are_those_of_rllib():
    config = MARWILConfig()
    assert (config.beta, config.vf_coeff, config.bc_logstd_coeff) == (1.0, 1.0, 0.0)
    assert config.moving_average_sqd_adv_norm_start == 100.0
    assert config.moving_average_sqd_adv_norm_update_rate == 1e-8
    assert (config.lr, config.train_batch_size, config.grad_clip) == (1e-4, 2000, None)
    assert (config.sgd_minibatch_size, config.num_sgd_iter) == (0, 1)


def test_settings_out_of_range_are_refused():
    for beta in (-0.1, 1.5, None):
        with pytest.raises(ConfigError, match=r"beta must be a number in \[0, 1\]"):
            MARWILConfig().training(beta=beta)
    with pytest.raises(ConfigError, match="sgd_minibatch_size=64 must not be larger than train_b"):
        MARWILConfig().training(sgd_minibatch_size=64, train_batch_size=32).validate()
    policy = make_linear(beta=0.0)
    with pytest.raises(ConfigError, match=r"beta of .* must stay 0, got 0.5.*Build a MARWIL pol"):
        policy.set_hyperparameter("beta", 0.5)
    policy.set_hyperparameter("beta", 0.0)


@pytest.mark.parametrize("minibatch", [0, 8])
def test_a_training_step_updates_on_the_whole_batch_or_on_its_minibatches(minibatch):
    config = quick_config(MARWILConfig, lambda context: TwoArmsEnv(), num_sgd_iter=2)
    config.training(sgd_minibatch_size=minibatch).rollouts(rollout_fragment_length=16)
    algorithm = config.build()
    assert isinstance(algorithm, MARWIL)
    stats = algorithm.train()["info"]["learner"]["default_policy"]["learner_stats"]
    assert {"total_loss", "mean_weight", "moving_average_sqd_adv_norm"} <= stats.keys()
    assert algorithm.get_policy().num_grad_updates == (4 if minibatch else 2)
    algorithm.stop()


def test_each_policy_learns_with_its_own_epochs_and_minibatches():
    overrides = {"num_sgd_iter": 3, "sgd_minibatch_size": 8}
    specs = {"left": PolicySpec(config=overrides), "right": PolicySpec()}
    algorithm = make_config(MARWILConfig, policies=specs).build()
    algorithm.train()
    # 14 rows of "left" in 2 minibatches; all rows of "right" at once
    updates = {pid: x.num_grad_updates for pid, x in algorithm.worker.policy_map.items()}
    assert updates == {"left": 6, "right": 1}
    algorithm.stop()


@pytest.mark.parametrize("framework", ["tf2", "tf"])
def test_agents_with_different_betas_learn_and_resume(framework, tmp_path):
    specs = {"left": PolicySpec(config={"beta": 0.0}), "right": PolicySpec(config={"beta": 0.5})}
    config = make_config(MARWILConfig, policies=specs).framework(framework)
    algorithm = config.training(moving_average_sqd_adv_norm_update_rate=0.1).build()
    algorithm.train()
    other = MARWIL.from_checkpoint(
        algorithm.save(tmp_path), policy_mapping_fn=a_and_b, config={"env": Staged}
    )
    for policy_id in specs:
        assert_equal(*(x.get_policy(policy_id).get_weights() for x in (algorithm, other)))
    assert AVERAGE not in other.get_policy("left").get_weights()
    average = other.get_policy("right").get_weights()[AVERAGE]
    learner = other.train()["info"]["learner"]
    assert "mean_weight" not in learner["left"]["learner_stats"]
    stats = learner["right"]["learner_stats"]
    assert stats["moving_average_sqd_adv_norm"] < average < 100.0
    algorithm.stop()
    other.stop()


def test_the_conformance_check_passes():
    check_policy(make_linear(moving_average_sqd_adv_norm_update_rate=0.5))


def test_masked_actions_are_learned():
    space = spaces.Dict(observations=spaces.Box(-1, 1, (3,)), action_mask=spaces.MultiBinary(2))
    policy = make(MARWILTF2Policy, obs=space)
    rows = make_rows(4)
    obs = {"observations": rows["obs"], "action_mask": np.array([[1, 0]] * 4, np.int8)}
    batch = SampleBatch({**rows, "obs": obs, "actions": np.zeros(4, np.int64)})
    assert policy.learn_on_batch(batch)["learner_stats"]["policy_loss"] == pytest.approx(0.0)
