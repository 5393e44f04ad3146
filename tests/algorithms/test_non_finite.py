"""NaN and infinity in training: what stops, what is kept, and what such weights may still do."""

import json
import logging

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import tfpolicies
from helpers import factories
from tfpolicies import (
    DQNTF2Policy,
    PGConfig,
    PGTF1Policy,
    PGTF2Policy,
    Policy,
    PPOConfig,
    PPOTF2Policy,
)
from tfpolicies.errors import CheckpointError, ModelImportError, NonFiniteError, WeightsError
from tfpolicies.policy.policy import ActionBatch

QUICK = {"inference": "tf", "jit_compile": False}


class Explodes(gym.Env):
    """Gives rewards that overflow the loss from a step on; `explode_at=None` never."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config):
        self.explode_at, self.steps = config.get("explode_at"), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        self.left -= 1
        late = self.explode_at is not None and self.steps > self.explode_at
        obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return obs, 1e25 if late else 1.0, not self.left, False, {}


def exploding(explode_at, config=None, **debugging):
    config = config or PPOConfig().training(
        sgd_minibatch_size=16, num_sgd_iter=2, model={"fcnet_hiddens": [4]}
    )
    config.environment(Explodes, env_config={"explode_at": explode_at}).framework(**QUICK)
    if isinstance(config, PPOConfig):
        config.training(vf_clip_param=float("inf"))
    return config.training(train_batch_size=32).debugging(seed=1, log_level="ERROR", **debugging)


def everything(policy):
    state = policy.get_state()
    return {**state["weights"], **state["_optimizer_variables"]}, state["rng"]


def assert_unchanged(policy, before):
    factories.assert_equal(everything(policy)[0], before[0])
    assert everything(policy)[1] == before[1]


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


@pytest.mark.parametrize("kind", [WithTerms, WithTermsInGraph])
def test_an_update_that_is_not_finite_names_the_term_and_leaves_the_policy_as_it_was(kind):
    policy = factories.make(kind)
    policy.learn_on_batch(batch_with(policy, np.ones(12)))
    before, updates = everything(policy), policy.num_grad_updates
    bad = batch_with(policy, [1, 2, 1, 2, 1, 2, 1, 2, 1, -3, 1, 2])

    with pytest.raises(NonFiniteError, match=r"'default_policy'.*log \(nan\) in minibatch 5 of 6"):
        policy.learn_epochs(bad, 1, 2, shuffle=False)
    with pytest.raises(FloatingPointError, match=r"log \(nan\)\. The policy is unchanged"):
        policy.learn_on_batch(bad)
    with pytest.raises(NonFiniteError) as result:
        policy.learn_epochs(bad, 3, 4)

    assert (result.value.term, result.value.iteration) == ("log (nan)", None)
    assert_unchanged(policy, before)
    assert policy.num_grad_updates == updates
    twin = policy.copy()
    good = batch_with(policy, np.ones(12))
    for each in (policy, twin):  # the variables hold what the state says
        each.learn_on_batch(good)
    factories.assert_equal(policy.get_weights(), twin.get_weights())


def test_what_explains_most_is_named_first():
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


def test_weights_that_overflow_behind_a_finite_loss_are_noticed():
    class Steep(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            dist_inputs, _ = model(train_batch)
            return 1e-30 * tf.reduce_mean(dist_inputs)

        def compute_gradients_fn(self, optimizer, loss):
            return [(tf.ones_like(g), v) for g, v in optimizer.compute_gradients(loss)]

    policy = factories.make(Steep, lr=3e38, optimizer={"type": "sgd"})
    weights = policy.get_weights()
    key = next(iter(weights))
    weights[key] = np.full_like(weights[key], -3e38)
    policy.set_weights(weights)
    before = everything(policy)
    with pytest.raises(NonFiniteError, match=rf"'{key}' after the update.*-inf"):
        policy.learn_on_batch(batch_with(policy, np.ones(6)))
    assert_unchanged(policy, before)


def test_gradients_that_are_not_finite_are_neither_given_out_nor_applied():
    policy = factories.make(WithTerms)
    good, _ = policy.compute_gradients(batch_with(policy, np.ones(4)))
    before = everything(policy)
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
    before = everything(policy)
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
    config = exploding(0).training(
        model={"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 3, "max_seq_len": 4}
    )
    algorithm = config.build()
    before = everything(algorithm.get_policy())[0]
    with pytest.raises(NonFiniteError, match=r"vf_loss \(inf\)"):
        algorithm.train()
    factories.assert_equal(everything(algorithm.get_policy())[0], before)
    algorithm.stop()

    q = factories.make(DQNTF2Policy)
    transitions = factories.batch_for(q, 6)
    transitions["weights"] = np.full(6, np.inf, np.float32)
    before = everything(q)
    with pytest.raises(NonFiniteError, match="weights"):
        q.learn_on_batch(transitions)
    assert_unchanged(q, before)


def test_on_nan_warn_goes_on_and_warns_once(caplog):
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
    algorithm = exploding(100).build()
    try:
        for _ in range(2):
            algorithm.train()
        algorithm.save(tmp_path / "good")
        algorithm.train()
        weights = algorithm.get_weights()["default_policy"]
        with pytest.raises(NonFiniteError) as result:
            algorithm.train()
        factories.assert_equal(algorithm.get_weights()["default_policy"], weights)
    finally:
        algorithm.stop()
    error = result.value
    assert (error.iteration, error.checkpoint) == (4, str(tmp_path / "good"))
    assert error.policy_id == "default_policy"
    assert "vf_loss" in error.term
    assert f"iteration 4; the last good checkpoint is {str(tmp_path / 'good')!r}" in str(error)


def test_the_policy_that_fails_is_named_among_several():
    class Two(tfpolicies.MultiAgentEnv):
        def __init__(self, config=None):
            super().__init__()
            self._agent_ids = {"good", "bad"}
            self.observation_space = factories.OBS
            self.action_space = factories.TWO

        def reset(self, *, seed=None, options=None):
            self.left = 4
            return {a: np.zeros(3, np.float32) for a in ("good", "bad")}, {}

        def step(self, actions):
            self.left -= 1
            ends = {"__all__": not self.left}
            obs = {a: np.ones(3, np.float32) for a in actions}
            return obs, {"good": 1.0, "bad": 1e30}, ends, {"__all__": False}, {}

    config = PGConfig().environment(Two).framework(**QUICK).debugging(seed=0, log_level="ERROR")
    config.training(train_batch_size=16, model={"fcnet_hiddens": [4]})
    config.multi_agent(policies={"good", "bad"}, policy_mapping_fn=lambda agent, *_, **__: agent)
    algorithm = config.build()
    algorithm.get_policy("bad").set_weights(
        {k: x + 1e9 for k, x in algorithm.get_policy("bad").get_weights().items()}
    )
    with pytest.raises(NonFiniteError) as result:
        algorithm.train()
    algorithm.stop()
    assert result.value.policy_id == "bad"


class ByHand(Policy):
    """Reports a loss that is not finite."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})

    def learn_on_batch(self, samples):
        return {"learner_stats": {"total_loss": float("nan"), "entropy": float("nan")}}


@pytest.mark.parametrize("on_nan", ["raise", "warn"])
def test_a_loss_that_a_policy_written_by_hand_reports_is_looked_at(on_nan, caplog):
    config = exploding(None, PGConfig(), on_nan=on_nan)
    algorithm = config.multi_agent(policies={"default_policy": (ByHand, None, None, {})}).build()
    if on_nan == "raise":
        with pytest.raises(NonFiniteError, match=r"total_loss \(nan\).*has its own update method"):
            algorithm.train()
    else:
        with caplog.at_level(logging.WARNING, "tfpolicies"):
            algorithm.train()
            algorithm.train()
        assert [r.getMessage() for r in caplog.records if "total_loss (nan)" in r.getMessage()]
        assert algorithm.iteration == 2
    algorithm.stop()


# -- weights and checkpoints ------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1j])
def test_weights_and_slots_must_be_finite_and_real(bad):
    policy = factories.make()
    before = everything(policy)
    key, array = next((k, x) for k, x in policy.get_weights().items() if x.ndim == 2)
    array = array.astype(type(bad) if isinstance(bad, complex) else array.dtype)
    array[1, 2] = bad
    words = "complex" if isinstance(bad, complex) else rf"\[1, 2\] must be finite, got {bad}"
    with pytest.raises(WeightsError, match=words) as result:
        policy.set_weights({**policy.get_weights(), key: array})
    assert key in str(result.value)
    state = policy.get_state()
    for part in ("weights", "_optimizer_variables"):
        wrong = dict(state[part])
        name = next(k for k, x in wrong.items() if x.ndim == 2)
        wrong[name] = wrong[name].astype(array.dtype)
        wrong[name][1, 2] = bad
        with pytest.raises(WeightsError, match=part):
            policy.set_state({**state, part: wrong})
    with pytest.raises(WeightsError, match="lr in a state must be a number"):
        policy.set_state({**state, "hyperparameters": {"lr": float("nan")}})
    assert_unchanged(policy, before)


@pytest.mark.core
def test_text_is_no_weight():
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
    before = everything(policy)
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

    config = {"env": Explodes}
    kind = type(algorithm)
    with pytest.raises(CheckpointError, match="allow_non_finite=True"):
        kind.from_checkpoint(tmp_path / "bad", config=config)
    with pytest.raises(CheckpointError, match=r"is not finite: weights\['"):
        Policy.from_checkpoint(tmp_path / "policy")
    with pytest.raises(CheckpointError, match="allow_non_finite=True"):
        algorithm.restore(tmp_path / "bad")

    algorithm.restore(tmp_path / "bad", allow_non_finite=True)
    loaded = Policy.from_checkpoint(
        tmp_path / "policy", config={"on_nan": "raise"}, allow_non_finite=True
    )
    factories.assert_equal(loaded.get_weights(), algorithm.get_policy().get_weights())
    settings = {**config, "on_nan": "raise"}
    built = kind.from_checkpoint(tmp_path / "bad", config=settings, allow_non_finite=True)
    factories.assert_equal(built.get_policy().get_weights(), loaded.get_weights())
    with pytest.raises(WeightsError, match="finite"):
        loaded.set_weights(loaded.get_weights())
    for each in (algorithm, built):
        each.stop()


@pytest.mark.core
def test_other_states_can_be_saved_in_the_place_of_the_present_ones(tmp_path):
    algorithm = exploding(None).build()
    before = algorithm.get_policy().get_state()
    algorithm.train()
    algorithm.save(tmp_path / "best", policy_states={"default_policy": before})
    assert algorithm._last_finite_checkpoint is None
    loaded = Policy.from_checkpoint(tmp_path / "best")["default_policy"]
    factories.assert_equal(loaded.get_weights(), before["weights"])
    assert loaded.global_timestep == 0
    algorithm.stop()


def test_an_update_costs_no_further_trace():
    policies = [factories.make(PPOTF2Policy, lr=lr) for lr in (0.1, 0.2)]
    for policy in policies:
        policy.learn_on_batch(factories.batch_for(policy, 8))
    assert policies[0].program is policies[1].program
    assert policies[0].program.functions.traces["learn_epochs"] == 1
    assert PGTF1Policy.runtime == "session"
