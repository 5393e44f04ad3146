"""NaN and infinity in training: errors, kept weights and checkpoints, refusals of such weights."""

import json
import logging

import numpy as np
import pytest
import tensorflow as tf

from helpers import factories
from helpers.custom_policies import ZeroPolicy
from helpers.environments import SeededEnv
from helpers.workers import make_small_config
from tfpolicies import (
    PPO,
    DQNTF2Policy,
    PGConfig,
    PGTF1Policy,
    PGTF2Policy,
    Policy,
    PPOTF2Policy,
)
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import CheckpointError, ModelImportError, NonFiniteError, WeightsError


class Explodes(SeededEnv):
    """Gives rewards that overflow the loss after the step `explode_at`, if there is one."""

    def __init__(self, config):
        self.explode_at, self.steps = config.get("explode_at", float("inf")), 0

    def step(self, action):
        self.steps += 1
        obs, _, *others = super().step(action)
        return obs, 1e25 if self.steps > self.explode_at else 1.0, *others


def exploding(explode_at, **settings):
    env_config = {"explode_at": explode_at}
    return make_small_config(
        Explodes, seed=1, env_config=env_config, vf_clip_param=float("inf"), **settings
    )


def get_variables(policy):
    state = policy.get_state()
    return {**state["weights"], **state["_optimizer_variables"]}, state["rng"]


def assert_unchanged(policy, before):
    np.testing.assert_equal(get_variables(policy), before)


class WithTerms(PGTF2Policy):
    """Its second term is a logarithm of a column."""

    def loss(self, model, dist_class, train_batch):
        dist_inputs, _ = model(train_batch)
        mask = train_batch["loss_mask"]
        self.first = tf.reduce_sum(tf.square(dist_inputs) * mask[:, None])
        self.second = tf.reduce_sum(tf.math.log(train_batch["advantages"]) * mask)
        return self.first + self.second * tf.reduce_sum(dist_inputs)

    def stats_fn(self, train_batch):
        return {"total_loss": self.first + self.second, "first": self.first, "log": self.second}


class WithTermsInGraph(WithTerms):
    runtime = "session"


def batch_with(policy, advantages):
    batch = factories.batch_for(policy, len(advantages))
    batch["advantages"] = np.asarray(advantages, np.float32)
    return batch


# -- updates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_class", [WithTerms, WithTermsInGraph])
def test_an_update_that_is_not_finite_names_the_term_and_leaves_the_policy_as_it_was(policy_class):
    policy = factories.make(policy_class)
    policy.learn_on_batch(batch_with(policy, np.ones(12)))
    before, updates = get_variables(policy), policy.num_grad_updates
    bad = batch_with(policy, [1, 2, 1, 2, 1, 2, 1, 2, 1, -3, 1, 2])

    with pytest.raises(NonFiniteError, match=r"'default_policy'.*log \(nan\) in minibatch 5 of 6"):
        policy.learn_epochs(bad, 1, 2, shuffle=False)
    with pytest.raises(FloatingPointError, match=r"log \(nan\)\. The policy is unchanged"):
        policy.learn_on_batch(bad)
    with pytest.raises(NonFiniteError) as error:
        policy.learn_epochs(bad, 3, 4)

    assert (error.value.term, error.value.iteration) == ("log (nan)", None)
    assert_unchanged(policy, before)
    assert policy.num_grad_updates == updates
    copy = policy.copy()
    good = batch_with(policy, np.ones(12))
    for x in (policy, copy):  # the variables hold the values of the state
        x.learn_on_batch(good)
    factories.assert_equal(policy.get_weights(), copy.get_weights())


def test_the_most_likely_cause_is_named():
    policy = factories.make(WithTerms)
    batch = batch_with(policy, np.ones(6))
    batch["advantages"][4] = np.nan
    with pytest.raises(NonFiniteError, match=r"train_batch\['advantages'\]\[4\] \(nan\)"):
        policy.learn_on_batch(batch)
    with policy.driver.allow_non_finite():
        weights = policy.get_weights()
        weights[next(iter(weights))][0, 1] = np.inf
        policy.set_weights(weights)
    with pytest.raises(NonFiniteError, match=r"weights\['.*'\]\[0, 1\] \(inf\)"):
        policy.learn_on_batch(batch_with(policy, np.ones(6)))


def test_weights_that_overflow_after_a_finite_loss_are_noticed():
    class Steep(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            dist_inputs, _ = model(train_batch)
            return 1e-30 * tf.reduce_mean(dist_inputs)

        def compute_gradients_fn(self, optimizer, loss):
            return [(tf.ones_like(g), v) for g, v in optimizer.compute_gradients(loss)]

    policy = factories.make(Steep, lr=3e38, optimizer={"type": "sgd"})
    key, array = next(iter(policy.get_weights().items()))
    policy.set_weights({**policy.get_weights(), key: np.full_like(array, -3e38)})
    before = get_variables(policy)
    with pytest.raises(NonFiniteError, match=rf"'{key}' after the update.*-inf"):
        policy.learn_on_batch(batch_with(policy, np.ones(6)))
    assert_unchanged(policy, before)


def test_gradients_that_are_not_finite_are_neither_returned_nor_applied():
    policy = factories.make(WithTerms)
    good, _ = policy.compute_gradients(batch_with(policy, np.ones(4)))
    before = get_variables(policy)
    with pytest.raises(NonFiniteError, match="log"):
        policy.compute_gradients(batch_with(policy, [1, -1, 1, 1]))
    good[1] = np.full_like(good[1], np.nan)
    with pytest.raises(NonFiniteError, match=r"gradients\[1\]\[0\] \(nan\)"):
        policy.apply_gradients(good)
    with pytest.raises(WeightsError, match="real numbers"):
        policy.apply_gradients([np.asarray(x, complex) for x in good])
    assert_unchanged(policy, before)


def test_a_loaded_batch_and_a_policy_that_learns_minibatch_by_minibatch_stop_too():
    class ByMinibatch(WithTerms):
        def learn_on_batch(self, samples):
            return super().learn_on_batch(samples)

    policy = factories.make(ByMinibatch)
    before = get_variables(policy)
    bad = batch_with(policy, [1, 2, 1, 2, 1, -3])
    with pytest.raises(NonFiniteError, match="minibatch 3 of 3"):
        policy.learn_epochs(bad, 1, 2, shuffle=False)
    assert_unchanged(policy, before)
    assert policy.num_grad_updates == 0
    policy.load_batch_into_buffer(bad)
    with pytest.raises(NonFiniteError, match="log"):
        policy.learn_on_loaded_batch()
    assert_unchanged(policy, before)


def test_models_with_a_memory_and_q_networks_stop_too():
    model = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 3, "max_seq_len": 4}
    algorithm = exploding(0, model=model).build()
    before = get_variables(algorithm.get_policy())[0]
    with pytest.raises(NonFiniteError, match=r"vf_loss \(inf\)"):
        algorithm.train()
    factories.assert_equal(get_variables(algorithm.get_policy())[0], before)

    q = factories.make(DQNTF2Policy)
    transitions = factories.batch_for(q, 6)
    transitions["weights"] = np.full(6, np.inf, np.float32)
    before = get_variables(q)
    with pytest.raises(NonFiniteError, match="weights"):
        q.learn_on_batch(transitions)
    assert_unchanged(q, before)


def test_on_nan_warn_continues_and_warns_once(caplog):
    policy = factories.make(WithTerms, on_nan="warn")
    bad = batch_with(policy, [1, 2, -1, 2])
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        for _ in range(3):
            policy.learn_epochs(bad, 2, 2)
    (record,) = caplog.records
    assert "log (nan)" in record.getMessage()
    assert "on_nan='warn'" in record.getMessage()
    assert policy.num_grad_updates == 12
    assert any(np.isnan(x).any() for x in policy.get_weights().values())


# -- algorithms -------------------------------------------------------------------------------


def test_a_nan_loss_stops_training_and_keeps_the_last_good_checkpoint(tmp_path):
    algorithm, good = exploding(100).build(), str(tmp_path / "good")
    for _ in range(2):
        algorithm.train()
    algorithm.save(good)
    algorithm.train()
    before = algorithm.get_weights()
    with pytest.raises(NonFiniteError) as info:
        algorithm.train()
    np.testing.assert_equal(algorithm.get_weights(), before)
    error = info.value
    assert (error.iteration, error.checkpoint, error.policy_id) == (4, good, "default_policy")
    assert "vf_loss" in error.term
    assert f"iteration 4; the last good checkpoint is {good!r}" in str(error)


def test_the_policy_that_fails_is_named_among_several():
    class LargeRewards(make_multi_agent(lambda config: SeededEnv())):
        def step(self, action_dict):
            obs, rewards, *others = super().step(action_dict)
            return obs, {**rewards, 1: 1e30}, *others

    config = make_small_config(LargeRewards, PGConfig, env_config={"num_agents": 2})
    ids = ("good", "bad")
    config.multi_agent(policies=ids, policy_mapping_fn=lambda agent, *_, **__: ids[agent])
    algorithm = config.build()
    bad = algorithm.get_policy("bad")
    bad.set_weights({name: x + 1e9 for name, x in bad.get_weights().items()})
    with pytest.raises(NonFiniteError) as error:
        algorithm.train()
    assert error.value.policy_id == "bad"


class ReportsNaN(ZeroPolicy):
    def learn_on_batch(self, samples):
        return {"learner_stats": {"total_loss": float("nan"), "entropy": float("nan")}}


@pytest.mark.parametrize("on_nan", ["raise", "warn"])
def test_a_loss_that_a_custom_policy_reports_is_checked(on_nan, caplog):
    config = make_small_config("CartPole-v1", PGConfig, on_nan=on_nan)
    policies = {"default_policy": (ReportsNaN, None, None, {})}
    algorithm = config.multi_agent(policies=policies).build()
    if on_nan == "raise":
        with pytest.raises(NonFiniteError, match=r"total_loss \(nan\).*has its own update method"):
            algorithm.train()
    else:
        with caplog.at_level(logging.WARNING, "tfpolicies"):
            algorithm.train()
            algorithm.train()
        assert [r.getMessage() for r in caplog.records if "total_loss (nan)" in r.getMessage()]
        assert algorithm.iteration == 2


# -- weights and checkpoints ------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1j])
def test_weights_and_slots_must_be_finite_and_real(bad):
    def spoil(arrays):
        name, array = next((k, x) for k, x in arrays.items() if x.ndim == 2)
        array = array.astype(complex if bad == 1j else array.dtype)
        array[1, 2] = bad
        return name, {**arrays, name: array}

    policy = factories.make()
    before = get_variables(policy)
    name, weights = spoil(policy.get_weights())
    words = "complex" if bad == 1j else rf"\[1, 2\] must be finite, got {bad}"
    with pytest.raises(WeightsError, match=words) as error:
        policy.set_weights(weights)
    assert name in str(error.value)
    state = policy.get_state()
    for part in ("weights", "_optimizer_variables"):
        with pytest.raises(WeightsError, match=part):
            policy.set_state({**state, part: spoil(state[part])[1]})
    with pytest.raises(WeightsError, match="lr in a state must be a number"):
        policy.set_state({**state, "hyperparameters": {"lr": float("nan")}})
    assert_unchanged(policy, before)


@pytest.mark.core
def test_text_is_refused_as_weights():
    policy = factories.make()
    texts = {key: np.full(x.shape, "1") for key, x in policy.get_weights().items()}
    with pytest.raises(WeightsError, match="dtype"):
        policy.set_weights(texts)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_weights_file_with_nan_is_refused(tmp_path):
    policy = factories.make()
    model = policy.to_keras()
    model.variables[0].assign(np.full(model.variables[0].shape, np.nan))
    model.save_weights(tmp_path / "bad.weights.h5")
    before = get_variables(policy)
    with pytest.raises(ModelImportError, match="NaN or infinite"):
        policy.import_model_from_h5(tmp_path / "bad.weights.h5")
    assert_unchanged(policy, before)


@pytest.mark.core
def test_a_checkpoint_that_is_not_finite_is_marked_and_loaded_on_request_only(tmp_path):
    algorithm = exploding(40, on_nan="warn").build()
    algorithm.save(tmp_path / "good")
    for _ in range(2):
        algorithm.train()
    algorithm.save(tmp_path / "bad")
    algorithm.get_policy().export_checkpoint(tmp_path / "policy")
    assert algorithm._last_finite_checkpoint == str(tmp_path / "good")
    for folder, name, finite in (
        ("good", "algorithm.json", True),
        ("bad", "algorithm.json", False),
        ("policy", "policy.json", False),
    ):
        assert json.loads((tmp_path / folder / name).read_text())["finite"] is finite

    settings = {"env": Explodes, "on_nan": "raise"}
    with pytest.raises(CheckpointError, match="allow_non_finite=True"):
        PPO.from_checkpoint(tmp_path / "bad", config=settings)
    with pytest.raises(CheckpointError, match=r"is not finite: weights\['"):
        Policy.from_checkpoint(tmp_path / "policy")
    with pytest.raises(CheckpointError, match="allow_non_finite=True"):
        algorithm.restore(tmp_path / "bad")

    algorithm.restore(tmp_path / "bad", allow_non_finite=True)
    loaded = Policy.from_checkpoint(
        tmp_path / "policy", config={"on_nan": "raise"}, allow_non_finite=True
    )
    built = PPO.from_checkpoint(tmp_path / "bad", config=settings, allow_non_finite=True)
    for policy in (algorithm.get_policy(), built.get_policy()):
        factories.assert_equal(policy.get_weights(), loaded.get_weights())
    with pytest.raises(WeightsError, match="finite"):
        loaded.set_weights(loaded.get_weights())


@pytest.mark.core
def test_other_states_can_be_saved_in_the_place_of_the_present_ones(tmp_path):
    algorithm = make_small_config().build()
    before = algorithm.get_policy().get_state()
    algorithm.train()
    algorithm.save(tmp_path / "best", policy_states={"default_policy": before})
    assert algorithm._last_finite_checkpoint is None
    loaded = Policy.from_checkpoint(tmp_path / "best")["default_policy"]
    factories.assert_equal(loaded.get_weights(), before["weights"])
    assert loaded.global_timestep == 0


def test_an_update_costs_no_further_trace():
    policies = [factories.make(PPOTF2Policy, lr=lr) for lr in (0.1, 0.2)]
    for policy in policies:
        policy.learn_on_batch(factories.batch_for(policy, 8))
    assert policies[0].program is policies[1].program
    assert policies[0].program.functions.traces["learn_epochs"] == 1
    assert PGTF1Policy.runtime == "session"
