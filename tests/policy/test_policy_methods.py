"""Every method of the Policy page on `PPOTF2Policy` and `PPOTF1Policy`: one test each.

`python -m tools.policy_page` runs this file and prints the table.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers import factories
from tfpolicies import PPOTF1Policy, PPOTF2Policy
from tfpolicies.connectors import AgentConnectorPipeline, ClipReward, FrameStack
from tfpolicies.errors import BatchError, CheckpointError, ObservationError, WeightsError

pytestmark = [
    pytest.mark.parametrize(
        "policy_class", [PPOTF2Policy, PPOTF1Policy], ids=lambda cls: cls.__name__
    ),
    pytest.mark.usefixtures("kept_programs"),
]
OBS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
LSTM = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [3], "max_seq_len": 4}


def make(policy_class, **config):
    return factories.make(policy_class, **config)


def same(one, two):
    return all(np.array_equal(one[key], two[key]) for key in one) and set(one) == set(two)


def test___init__(policy_class):
    policy = make(policy_class, lr=0.5)
    assert policy.observation_space == factories.OBS
    assert policy.config["lr"] == 0.5
    assert policy.framework == ("tf" if policy_class is PPOTF1Policy else "tf2")
    assert tf.executing_eagerly()
    with pytest.raises(ValueError, match="Did you mean 'gamma'"):
        make(policy_class, gama=0.5)


def test_apply(policy_class):
    policy = make(policy_class)
    result = policy.apply(lambda own, number, scale=1: (own, number * scale), 3, scale=2)
    assert result == (policy, 6)


def test_compute_actions(policy_class):
    policy = make(policy_class)
    actions, states, extras = policy.compute_actions(OBS, explore=False)
    assert (actions.dtype, actions.shape, states) == (np.int64, (4,), [])
    assert set(extras) == {"action_logp", "action_prob", "action_dist_inputs", "vf_preds"}
    np.testing.assert_array_equal(actions, extras["action_dist_inputs"].argmax(axis=1))
    assert policy.global_timestep == 4
    with pytest.raises(ObservationError, match=r"\[B, 3\]"):
        policy.compute_actions(OBS[:, :2])


def test_compute_actions_from_input_dict(policy_class):
    policy = make(policy_class)
    one = policy.compute_actions_from_input_dict({"obs": OBS}, explore=False)
    two = policy.compute_actions(OBS, explore=False)
    np.testing.assert_array_equal(one.actions, two.actions)
    with pytest.raises(KeyError, match="obs"):
        policy.compute_actions_from_input_dict({"rewards": OBS})


def test_compute_single_action(policy_class):
    policy = make(policy_class)
    action, states, extras = policy.compute_single_action(OBS[1], explore=False)
    assert action == policy.compute_actions(OBS, explore=False).actions[1]
    assert states == []
    assert extras["vf_preds"].shape == ()


def test_compute_log_likelihoods(policy_class):
    policy = make(policy_class)
    actions, _, extras = policy.compute_actions(OBS)
    result = policy.compute_log_likelihoods(actions, OBS)
    np.testing.assert_allclose(result, extras["action_logp"], atol=1e-6)
    with pytest.raises(BatchError, match="Got 3 actions for 4"):
        policy.compute_log_likelihoods(actions[:3], OBS)


def test_compute_gradients(policy_class):
    policy = make(policy_class)
    before = policy.get_weights()
    gradients, info = policy.compute_gradients(factories.batch_for(policy, 6))
    shapes = [w.shape for w in before.values()]
    assert [g.shape for g in gradients] == shapes
    assert "policy_loss" in info["learner_stats"]
    assert same(before, policy.get_weights())
    assert policy.num_grad_updates == 0


def test_apply_gradients(policy_class):
    policy = make(policy_class, lr=0.1, optimizer={"type": "sgd"})
    before = policy.get_weights()
    gradients = [np.ones_like(w) for w in before.values()]
    policy.apply_gradients([*gradients[:-1], None])
    after = policy.get_weights()
    *changed, last = before
    for key in changed:
        np.testing.assert_allclose(after[key], before[key] - 0.1, atol=1e-6)
    np.testing.assert_array_equal(after[last], before[last])
    with pytest.raises(ValueError, match="Unexpected number of gradients"):
        policy.apply_gradients(gradients[:-1])


def test_export_checkpoint(policy_class, tmp_path):
    policy = make(policy_class)
    assert policy.export_checkpoint(tmp_path / "here") is None
    assert (tmp_path / "here" / "policy.json").exists()
    with pytest.raises(ValueError, match="checkpoint_format"):
        policy.export_checkpoint(tmp_path, checkpoint_format="cloudpickle")


def test_from_checkpoint(policy_class, tmp_path):
    policy = make(policy_class)
    policy.learn_on_batch(factories.batch_for(policy, 6))
    policy.export_checkpoint(tmp_path)
    again = policy_class.from_checkpoint(tmp_path)
    assert type(again) is policy_class
    assert same(policy.get_weights(), again.get_weights())
    batch = factories.batch_for(policy, 6, seed=1)
    for each in (policy, again):  # the optimizer's state too
        each.learn_on_batch(batch)
    assert same(policy.get_weights(), again.get_weights())
    with pytest.raises(CheckpointError, match="not found"):
        policy_class.from_checkpoint(tmp_path / "nowhere")


def test_export_model(policy_class, tmp_path):
    policy = make(policy_class)
    result = policy.export_model(tmp_path)
    served = tf.saved_model.load(str(result.path)).signatures["serving_default"](
        obs=tf.constant(OBS)
    )
    expected = policy.compute_actions(OBS, explore=False)
    np.testing.assert_array_equal(served["actions"].numpy(), expected.actions)
    assert result.parity.largest_difference <= 1e-5


def test_from_state(policy_class):
    policy = make(policy_class)
    again = policy_class.from_state(policy.get_state())
    assert type(again) is policy_class
    assert same(policy.get_weights(), again.get_weights())
    with pytest.raises(ValueError, match="No `policy_spec` key"):
        policy_class.from_state({"weights": {}})


def test_get_connector_metrics(policy_class):
    policy = make(policy_class)
    assert policy.get_connector_metrics() == {}
    policy.agent_connectors = AgentConnectorPipeline([ClipReward(sign=True)])
    metrics = policy.get_connector_metrics()
    assert metrics == {"agent_connectors": {"ClipReward_ms": 0.0}, "action_connectors": {}}


def test_reset_connectors(policy_class):
    policy = make(policy_class)
    policy.reset_connectors(0)  # nothing to forget
    policy.agent_connectors = AgentConnectorPipeline([FrameStack(2)])
    policy.agent_connectors.connect(factories.OBS)
    policy.reset_connectors(0)
    assert len(policy.agent_connectors) == 1


def test_restore_connectors(policy_class):
    policy, other = make(policy_class), make(policy_class)
    policy.agent_connectors = AgentConnectorPipeline([FrameStack(3)])
    other.restore_connectors(policy.get_state())
    assert other.agent_connectors.to_state() == policy.agent_connectors.to_state()
    other.restore_connectors({})
    assert other.agent_connectors is not None


def test_get_exploration_state(policy_class):
    assert make(policy_class).get_exploration_state() == {}
    greedy = make(policy_class, exploration_config={"type": "EpsilonGreedy"})
    assert greedy.get_exploration_state() == {"cur_epsilon": 1.0, "last_timestep": 0}


def test_get_host(policy_class):
    assert make(policy_class).get_host() != ""


def test_get_initial_state(policy_class):
    assert make(policy_class).get_initial_state() == []
    states = make(policy_class, model=LSTM).get_initial_state()
    assert [s.shape for s in states] == [(4,), (4,)]
    assert not np.any(states)


def test_is_recurrent(policy_class):
    assert not make(policy_class).is_recurrent()
    assert make(policy_class, model=LSTM).is_recurrent()


def test_num_state_tensors(policy_class):
    assert make(policy_class).num_state_tensors() == 0
    assert make(policy_class, model=LSTM).num_state_tensors() == 2


def test_load_batch_into_buffer(policy_class):
    policy = make(policy_class)
    assert policy.load_batch_into_buffer(factories.batch_for(policy, 6)) == 6


def test_get_num_samples_loaded_into_buffer(policy_class):
    policy = make(policy_class)
    assert policy.get_num_samples_loaded_into_buffer() == 0
    policy.load_batch_into_buffer(factories.batch_for(policy, 5), buffer_index=1)
    assert policy.get_num_samples_loaded_into_buffer(1) == 5


def test_learn_on_loaded_batch(policy_class):
    policy = make(policy_class, sgd_minibatch_size=2)
    with pytest.raises(ValueError, match="must call load_batch_into_buffer"):
        policy.learn_on_loaded_batch()
    policy.load_batch_into_buffer(factories.batch_for(policy, 6))
    result = policy.learn_on_loaded_batch(offset=4)
    assert result["num_agent_steps_trained"] == 2
    assert policy.num_grad_updates == 1


def test_learn_on_batch(policy_class):
    policy = make(policy_class, lr=0.1)
    before = policy.get_weights()
    result = policy.learn_on_batch(factories.batch_for(policy, 6))
    assert result["num_agent_steps_trained"] == 6
    assert np.isfinite(result["learner_stats"]["total_loss"])
    assert not same(before, policy.get_weights())
    assert policy.num_grad_updates == 1


def test_learn_on_batch_from_replay_buffer(policy_class):
    policy = make(policy_class)

    class Actor:
        def __init__(self, batch):
            self.batch = batch

        def replay(self, policy_id=None):
            return self.batch

    assert policy.learn_on_batch_from_replay_buffer(Actor(None), "default_policy") == {}
    result = policy.learn_on_batch_from_replay_buffer(
        Actor(factories.batch_for(policy, 6)), "default_policy"
    )
    assert result["num_agent_steps_trained"] == 6


def test_loss(policy_class):
    seen = []

    class Squared(policy_class):
        def loss(self, model, dist_class, train_batch):
            dist_inputs, _ = model(train_batch)
            seen.append(self.config["lr"])
            return tf.reduce_mean(tf.square(dist_inputs))

        def stats_fn(self, train_batch):
            return {}

    policy = make(Squared, lr=1e-4)
    batch = {"obs": OBS}
    norms = []
    for _ in range(3):
        policy.learn_on_batch(batch)
        norms.append(np.square(policy.compute_actions(OBS)[2]["action_dist_inputs"]).mean())
    assert norms[2] < norms[1] < norms[0]
    assert all(tf.is_tensor(lr) for lr in seen)


def test_make_rl_module(policy_class):
    assert isinstance(make(policy_class).make_rl_module(), keras.Model)


def test_maybe_add_time_dimension(policy_class):
    batch = {"obs": OBS}
    assert make(policy_class).maybe_add_time_dimension(batch, np.array([4])) is batch


def test_maybe_remove_time_dimension(policy_class):
    batch = {"obs": OBS}
    assert make(policy_class).maybe_remove_time_dimension(batch) is batch


def test_init_view_requirements(policy_class):
    policy = make(policy_class)
    policy.init_view_requirements()
    assert {"obs", "new_obs", "actions", "rewards"} <= set(policy.view_requirements)


def test_on_global_var_update(policy_class):
    policy = make(policy_class, lr=1.0, lr_schedule=[[0, 1.0], [100, 0.0]])
    policy.on_global_var_update({"timestep": 50, "num_grad_updates": 7})
    assert (policy.global_timestep, policy.num_grad_updates) == (50, 7)
    assert policy.get_hyperparameter("lr") == pytest.approx(0.5)
    with pytest.raises(KeyError, match="timestep"):
        policy.on_global_var_update({})


def test_postprocess_trajectory(policy_class):
    policy = make(policy_class)
    batch = factories.trajectory(policy, 5)
    assert policy.postprocess_trajectory(batch) is batch
    assert batch["advantages"].shape == batch["value_targets"].shape == (5,)
    assert batch["values_bootstrapped"][-1] == 0.0  # the last step terminated


def test_get_session(policy_class):
    session = make(policy_class).get_session()
    if policy_class is PPOTF2Policy:
        assert session is None
    else:
        assert isinstance(session, tf.compat.v1.Session)


def test_get_state(policy_class):
    policy = make(policy_class)
    state = policy.get_state()
    assert {"weights", "global_timestep", "num_grad_updates", "policy_spec"} <= set(state)
    next(iter(state["weights"].values()))[...] = 9.0
    assert not same(state["weights"], policy.get_weights())


def test_set_state(policy_class):
    policy, other = make(policy_class), make(policy_class, seed=1)
    policy.learn_on_batch(factories.batch_for(policy, 6))
    other.set_state(policy.get_state())
    assert same(policy.get_weights(), other.get_weights())
    assert other.num_grad_updates == 1
    with pytest.raises(KeyError, match="global_timestep"):
        other.set_state({"weights": policy.get_weights()})


def test_get_weights(policy_class):
    policy = make(policy_class)
    weights = policy.get_weights()
    assert list(weights)[:2] == ["layer_0/kernel", "layer_0/bias"]
    next(iter(weights.values()))[...] = 9.0
    assert not same(weights, policy.get_weights())


def test_set_weights(policy_class):
    policy, other = make(policy_class), make(policy_class, seed=1)
    other.set_weights(policy.get_weights())
    assert same(policy.get_weights(), other.get_weights())
    other.set_weights([w + 1 for w in policy.get_weights().values()])
    np.testing.assert_array_equal(
        other.compute_actions(OBS, explore=False)[2]["vf_preds"].shape, (4,)
    )
    with pytest.raises(WeightsError, match="must have shape"):
        other.set_weights([w[..., None] for w in policy.get_weights().values()])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
def test_import_model_from_h5(policy_class, tmp_path):
    def network():
        inputs = keras.Input((3,))
        hidden = keras.layers.Dense(4, activation="relu", name="body")(inputs)
        outputs = [keras.layers.Dense(2, name="logits")(hidden)]
        return keras.Model(inputs, [*outputs, keras.layers.Dense(1, name="value")(hidden)])

    trained = network()
    trained.save_weights(tmp_path / "trained.weights.h5")
    policy = make(policy_class, model={"custom_model": network()})
    report = policy.import_model_from_h5(tmp_path / "trained.weights.h5")
    assert "logits" in str(report)
    logits, values = trained(OBS)
    extras = policy.compute_actions(OBS, explore=False)[2]
    np.testing.assert_allclose(extras["action_dist_inputs"], logits, atol=1e-5)
    np.testing.assert_allclose(extras["vf_preds"], values[:, 0], atol=1e-5)
    before = policy.get_weights()
    with pytest.raises(FileNotFoundError, match="absent"):
        policy.import_model_from_h5(tmp_path / "absent.h5")
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(9)])
    other.save_weights(tmp_path / "other.weights.h5")
    with pytest.raises(ValueError, match=r"other\.weights\.h5"):
        policy.import_model_from_h5(tmp_path / "other.weights.h5")
    assert same(before, policy.get_weights())


def test_the_spaces_of_the_page_are_enough_for_this_file(policy_class):
    policy = make(
        policy_class, obs=spaces.Dict(a=factories.OBS), actions=spaces.Tuple([factories.TWO])
    )
    assert policy.compute_actions({"a": OBS}).actions[0].shape == (4,)
