"""Every method of the Policy page on `PPOTF2Policy` and `PPOTF1Policy`: one test each.

`python -m tools.policy_page` runs this file and prints the table.
"""

import json
import socket

import keras
import numpy as np
import pytest
import scipy  # its parts are imported by the test that uses them
import tensorflow as tf
from gymnasium import spaces

from helpers import factories
from helpers.factories import OBS, PLANE, TWO, assert_close, assert_equal, batch_for, make
from tfpolicies import PGTF2Policy, Policy, PPOTF1Policy, PPOTF2Policy, TFPolicy, errors
from tfpolicies.connectors import (
    ActionConnectorPipeline,
    AgentConnectorPipeline,
    ClipReward,
    FrameStack,
)
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer

pytestmark = [
    pytest.mark.parametrize(
        "policy_class", [PPOTF2Policy, PPOTF1Policy], ids=lambda cls: cls.__name__
    ),
    pytest.mark.usefixtures("kept_programs"),
]
BOX = spaces.Box(np.array([0.0, -2.0], np.float32), np.array([10.0, 2.0], np.float32))
ROWS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
LSTM = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [3], "max_seq_len": 4}


@pytest.mark.core
def test___init__(policy_class):
    policy = make(policy_class, gamma=0.5)
    assert (policy.observation_space, policy.action_space) == (OBS, TWO)
    assert policy.framework == ("tf" if policy_class is PPOTF1Policy else "tf2")
    assert (policy.global_timestep, policy.num_grad_updates) == (0, 0)
    assert (policy.config["gamma"], policy.config["lr"]) == (0.5, 5e-5)  # a default completes it
    assert (policy.dist_class.num_inputs, policy.callbacks) == (2, None)
    assert tf.executing_eagerly()
    with pytest.raises(ValueError, match="Did you mean 'gamma'"):
        make(policy_class, gama=0.5)


def test_apply(policy_class):
    policy = make(policy_class)
    result = policy.apply(lambda own, number, scale=1: (own, number * scale), 3, scale=2)
    assert result == (policy, 6)


def test_compute_actions(policy_class):
    policy = make(policy_class)
    actions, states, extras = policy.compute_actions(ROWS, explore=False)
    assert (actions.dtype, actions.shape, states) == (np.int64, (4,), [])
    np.testing.assert_array_equal(actions, extras["action_dist_inputs"].argmax(axis=1))
    with pytest.raises(errors.ObservationError, match=r"\[B, 3\]"):
        policy.compute_actions(ROWS[:, :2])


def test_compute_actions_from_input_dict(policy_class):
    policy, copy = make(policy_class), make(policy_class)
    columns = {"obs": ROWS, "prev_actions": np.zeros(4), "infos": [{}] * 4}
    result = policy.compute_actions_from_input_dict(columns, explore=True, timestep=99)
    np.testing.assert_array_equal(result.actions, copy.compute_actions(ROWS, explore=True).actions)
    assert policy.global_timestep == 4
    with pytest.raises(KeyError, match="obs"):
        policy.compute_actions_from_input_dict({"rewards": ROWS})


def test_compute_single_action(policy_class):
    policy, copy = (make(policy_class, actions=PLANE) for _ in range(2))
    action, states, extras = policy.compute_single_action(ROWS[1], explore=True)
    batch = copy.compute_actions(ROWS[1:2], explore=True)
    np.testing.assert_array_equal(action, batch.actions[0])
    assert states == []
    assert {name: x.shape for name, x in extras.items()} == {
        name: x.shape[1:] for name, x in batch.extras.items()
    }
    action, _, _ = policy.compute_single_action(input_dict={"obs": ROWS[1]}, explore=False)
    np.testing.assert_array_equal(action, copy.compute_actions(ROWS[1:2], explore=False)[0][0])
    assert policy.global_timestep == 2
    discrete = make(policy_class, obs=spaces.Discrete(3, start=2))
    action, _, _ = discrete.compute_single_action(3, prev_action=1)
    assert (action.shape, action.dtype) == ((), np.int64)
    with pytest.raises(errors.UsageError, match="obs or input_dict"):
        policy.compute_single_action()


@pytest.mark.core
def test_compute_log_likelihoods(policy_class):
    policy = make(policy_class, actions=BOX)
    actions, _, extras = policy.compute_actions(ROWS, explore=True)
    logp = policy.compute_log_likelihoods(actions, ROWS)
    assert (type(logp), logp.dtype, logp.shape) == (np.ndarray, np.float32, (4,))
    np.testing.assert_allclose(logp, extras["action_logp"], rtol=1e-5, atol=1e-6)
    mean, log_std = np.split(extras["action_dist_inputs"], 2, axis=-1)
    expected = scipy.stats.norm(mean, np.exp(log_std)).logpdf(actions).sum(-1)
    np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-6)
    assert policy.global_timestep == 4
    with pytest.raises(errors.BatchError, match="Got 3 actions for 4"):
        policy.compute_log_likelihoods(actions[:3], ROWS)


def test_compute_gradients(policy_class):
    policy, whole = (make(policy_class, optimizer={"type": "sgd"}, lr=0.1) for _ in range(2))
    before, batch = policy.get_weights(), batch_for(policy, 8)
    gradients, info = policy.compute_gradients(batch)
    assert [g.shape for g in gradients] == [w.shape for w in before.values()]
    assert_equal(policy.get_weights(), before)
    stats = whole.learn_on_batch(batch)["learner_stats"]
    assert info["learner_stats"] == pytest.approx(stats, abs=1e-6)
    assert policy.apply_gradients(gradients) is None
    assert policy.num_grad_updates == 0
    assert_close(policy.get_weights(), whole.get_weights(), atol=1e-6)


def test_apply_gradients(policy_class):
    policy = make(policy_class, lr=0.1, optimizer={"type": "sgd"})
    before = policy.get_weights()
    gradients = [np.ones_like(w) for w in before.values()]
    with pytest.raises(errors.WeightsError, match="Unexpected number of gradients: 1 for 8"):
        policy.apply_gradients(gradients[:1])
    with pytest.raises(ValueError, match=r"gradients\[7\] must have shape"):
        policy.apply_gradients([*gradients[:-1], np.ones(7)])
    assert_equal(policy.get_weights(), before)
    policy.apply_gradients([*gradients[:-1], None])
    *changed, last = before
    expected = {**{key: before[key] - 0.1 for key in changed}, last: before[last]}
    assert_close(policy.get_weights(), expected, atol=1e-6)
    np.testing.assert_array_equal(policy.get_weights()[last], before[last])


def test_export_checkpoint(policy_class, tmp_path):
    policy, state = make(policy_class), make(policy_class, seed=4).get_state()
    assert policy.export_checkpoint(tmp_path / "other", policy_state=state) is None
    assert (tmp_path / "other" / "policy.json").exists()
    assert_equal(Policy.from_checkpoint(tmp_path / "other").get_weights(), state["weights"])
    with pytest.raises(errors.ConfigError, match="filename_prefix"):
        policy.export_checkpoint(tmp_path, "model")
    words = "checkpoint_format must be 'json', got 'cloudpickle'"
    with pytest.raises(errors.ConfigError, match=words):
        policy.export_checkpoint(tmp_path, checkpoint_format="cloudpickle")


def test_from_checkpoint(policy_class, tmp_path):
    policy = make(policy_class)
    policy.learn_on_batch(batch_for(policy, 6))
    policy.export_checkpoint(tmp_path)
    restored = policy_class.from_checkpoint(tmp_path)
    assert type(restored) is policy_class
    assert_equal(policy.get_weights(), restored.get_weights())
    batch = batch_for(policy, 6, seed=1)
    for copy in (policy, restored):  # with the state of the optimizer
        copy.learn_on_batch(batch)
    assert_equal(policy.get_weights(), restored.get_weights())
    with pytest.raises(errors.CheckpointError, match="not found"):
        policy_class.from_checkpoint(tmp_path / "nowhere")
    with pytest.raises(errors.CheckpointError, match="leave policy_ids out"):
        Policy.from_checkpoint(tmp_path, policy_ids=["default_policy"])


def test_export_model(policy_class, tmp_path):
    policy = make(policy_class)
    result = policy.export_model(tmp_path)
    served = tf.saved_model.load(str(result.path)).signatures["serving_default"](
        obs=tf.constant(ROWS)
    )
    expected = policy.compute_actions(ROWS, explore=False)
    np.testing.assert_array_equal(served["actions"].numpy(), expected.actions)
    assert result.parity.largest_difference <= 1e-5


def test_from_state(policy_class):
    policy = make(policy_class, lr=0.25)
    policy.learn_on_batch(batch_for(policy, 4))
    state, actions = policy.get_state(), policy.compute_actions(ROWS).actions
    for caller in (policy_class, Policy, TFPolicy, PGTF2Policy):
        restored = caller.from_state(state)
        assert type(restored) is policy_class
        assert restored.config["lr"] == 0.25
        assert_equal(state["weights"], restored.get_weights())
        np.testing.assert_array_equal(restored.compute_actions(ROWS).actions, actions)
    with pytest.raises(ValueError, match="No `policy_spec` key"):
        policy_class.from_state({"weights": {}})


@pytest.mark.core
def test_get_connector_metrics(policy_class):
    policy = make(policy_class)
    assert (policy.agent_connectors, policy.action_connectors) == (None, None)
    assert policy.get_connector_metrics() == {}
    policy.agent_connectors = AgentConnectorPipeline([ClipReward(sign=True)])
    policy.action_connectors = ActionConnectorPipeline([])
    metrics = {"agent_connectors": {"ClipReward_ms": 0.0}, "action_connectors": {}}
    assert policy.get_connector_metrics() == metrics


def test_reset_connectors(policy_class):
    policy = make(policy_class)
    policy.reset_connectors(0)  # nothing to forget
    policy.agent_connectors = AgentConnectorPipeline([FrameStack(2)])
    policy.agent_connectors.connect(OBS)
    policy.reset_connectors([0, 3])
    assert len(policy.agent_connectors) == 1


@pytest.mark.core
def test_restore_connectors(policy_class):
    policy, other = make(policy_class), make(policy_class)
    other.restore_connectors({})
    policy.agent_connectors = AgentConnectorPipeline([FrameStack(3)])
    configs = json.loads(json.dumps(policy.get_state()["connector_configs"]))
    for restore in (other.set_state, other.restore_connectors):
        other.agent_connectors = None
        restore({**policy.get_state(), "connector_configs": configs})
        assert repr(other.agent_connectors) == repr(policy.agent_connectors)
        assert other.agent_connectors is not policy.agent_connectors
        assert other.get_state()["connector_configs"] == configs
    with pytest.raises(errors.ConfigError, match="connector_configs"):
        other.restore_connectors({"connector_configs": {"agent": ["Unknown", {}]}})
    other.restore_connectors({})
    assert other.agent_connectors is not None


def test_get_exploration_state(policy_class):
    assert make(policy_class).get_exploration_state() == {}
    greedy = make(policy_class, exploration_config={"type": "EpsilonGreedy"})
    assert greedy.get_exploration_state() == {"cur_epsilon": 1.0, "last_timestep": 0}


def test_get_host(policy_class):
    assert make(policy_class).get_host() == socket.gethostname()


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
    assert policy.load_batch_into_buffer(batch_for(policy, 6)) == 6


def test_get_num_samples_loaded_into_buffer(policy_class):
    policy = make(policy_class)
    assert policy.get_num_samples_loaded_into_buffer() == 0
    policy.load_batch_into_buffer(batch_for(policy, 5), buffer_index=1)
    assert policy.get_num_samples_loaded_into_buffer(1) == 5
    assert policy.get_num_samples_loaded_into_buffer() == 0


def test_learn_on_loaded_batch(policy_class):
    policy, copy = make(policy_class, sgd_minibatch_size=4), make(policy_class)
    with pytest.raises(ValueError, match="must call load_batch_into_buffer"):
        policy.learn_on_loaded_batch()
    batch = batch_for(policy, 10)
    policy.load_batch_into_buffer(batch)
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        result = policy.learn_on_loaded_batch(start)
        assert result["num_agent_steps_trained"] == stop - start
        copy.learn_on_batch({name: column[start:stop] for name, column in batch.items()})
    assert_equal(policy.get_weights(), copy.get_weights())
    assert policy.num_grad_updates == 3
    with pytest.raises(errors.BatchError, match=r"offset must be in \[0, 10\), got 10"):
        policy.learn_on_loaded_batch(10)
    policy.load_batch_into_buffer(batch.slice(0, 3), buffer_index=1)
    assert policy.learn_on_loaded_batch(buffer_index=1)["num_agent_steps_trained"] == 3


def test_learn_on_batch(policy_class):
    policy = make(policy_class, lr=0.1)
    before = policy.get_weights()
    result = policy.learn_on_batch(batch_for(policy, 6))
    assert result["num_agent_steps_trained"] == 6
    assert np.isfinite(result["learner_stats"]["total_loss"])
    assert any(not np.array_equal(before[key], w) for key, w in policy.get_weights().items())
    assert policy.num_grad_updates == 1


def test_learn_on_batch_from_replay_buffer(policy_class):
    policy = make(policy_class)
    buffer = MultiAgentReplayBuffer(100, seed=0, train_batch_size=4, learning_starts=6)
    assert policy.learn_on_batch_from_replay_buffer(buffer, "default_policy") == {}
    buffer.add(batch_for(policy, 8))
    assert policy.learn_on_batch_from_replay_buffer(buffer, "unknown") == {}
    result = policy.learn_on_batch_from_replay_buffer(buffer, "default_policy")
    assert result["num_agent_steps_trained"] == 4
    assert policy.num_grad_updates == 1


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
    batch = {"obs": ROWS}
    norms = []
    for _ in range(3):
        policy.learn_on_batch(batch)
        norms.append(np.square(policy.compute_actions(ROWS)[2]["action_dist_inputs"]).mean())
    assert norms[2] < norms[1] < norms[0]
    assert all(tf.is_tensor(lr) for lr in seen)


def test_make_rl_module(policy_class):
    policy = make(policy_class)
    assert isinstance(policy.make_rl_module(), keras.Model)
    assert policy.make_rl_module() is policy.model


def test_maybe_add_time_dimension(policy_class):
    batch = {"obs": ROWS}
    policy = make(policy_class)
    assert policy.maybe_add_time_dimension(batch, np.array([4]), framework="tf2") is batch


def test_maybe_remove_time_dimension(policy_class):
    batch = {"obs": ROWS}
    assert make(policy_class).maybe_remove_time_dimension(batch) is batch


def test_init_view_requirements(policy_class):
    policy = make(policy_class)
    policy.init_view_requirements()
    assert {"obs", "new_obs", "actions", "rewards"} <= set(policy.view_requirements)


def test_on_global_var_update(policy_class):
    policy = make(policy_class, lr=1.0, lr_schedule=[[0, 1.0], [100, 0.0]])
    policy.compute_actions(ROWS)
    policy.on_global_var_update({"timestep": 50})
    assert (policy.global_timestep, policy.num_grad_updates) == (50, 0)
    assert policy.get_hyperparameter("lr") == pytest.approx(0.5)
    policy.on_global_var_update({"timestep": 5, "num_grad_updates": 7})
    policy.on_global_var_update({"timestep": 6, "num_grad_updates": None})
    assert (policy.global_timestep, policy.num_grad_updates) == (6, 7)
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
    state["weights"]["layer_0/kernel"][...] = 9.0
    assert not (policy.get_weights()["layer_0/kernel"] == 9.0).any()
    state["policy_spec"]["config"]["model"]["fcnet_hiddens"].append(99)
    assert policy.config["model"]["fcnet_hiddens"] == [4]


def test_set_state(policy_class):
    policy, other = make(policy_class), make(policy_class, seed=1)
    policy.learn_on_batch(batch_for(policy, 6))
    other.set_state(policy.get_state())
    assert_equal(policy.get_weights(), other.get_weights())
    assert other.num_grad_updates == 1
    with pytest.raises(KeyError, match="global_timestep"):
        other.set_state({"weights": policy.get_weights()})


def test_get_weights(policy_class):
    policy = make(policy_class)
    weights = policy.get_weights()
    assert list(weights)[:2] == ["layer_0/kernel", "layer_0/bias"]
    weights["layer_0/kernel"][...] = 9.0
    assert not (policy.get_weights()["layer_0/kernel"] == 9.0).any()


@pytest.mark.core
def test_set_weights(policy_class):
    policy, other = make(policy_class, seed=1), make(policy_class, seed=2, __policy_id="other")
    before, weights = policy.get_weights(), other.get_weights()
    for form in (
        weights,
        dict(reversed(weights.items())),
        list(weights.values()),
        [w.tolist() for w in weights.values()],
        {f"other/{key}": w for key, w in weights.items()},
    ):
        policy.set_weights(before)
        policy.set_weights(form)
        assert_equal(policy.get_weights(), weights)
    left, right = (x.compute_actions(ROWS, explore=False).extras for x in (policy, other))
    np.testing.assert_array_equal(left["vf_preds"], right["vf_preds"])
    with pytest.raises(errors.WeightsError, match="must have shape"):
        other.set_weights([w[..., None] for w in weights.values()])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
def test_import_model_from_h5(policy_class, tmp_path):
    def make_network(width=4):
        inputs = keras.Input((3,))
        hidden = keras.layers.Dense(width, activation="relu", name="body")(inputs)
        outputs = [keras.layers.Dense(2, name="logits")(hidden)]
        return keras.Model(inputs, [*outputs, keras.layers.Dense(1, name="value")(hidden)])

    network, wide = make_network(), make_network(width=5)
    network.save_weights(tmp_path / "network.weights.h5")
    policy = make(policy_class, model={"custom_model": make_network()})
    report = policy.import_model_from_h5(tmp_path / "network.weights.h5")
    assert len(report) == 6
    assert "logits" in str(report)
    logits, values = network(ROWS)
    extras = policy.compute_actions(ROWS, explore=False)[2]
    np.testing.assert_allclose(extras["action_dist_inputs"], logits, atol=1e-5)
    np.testing.assert_allclose(extras["vf_preds"], values[:, 0], atol=1e-5)
    before = policy.get_weights()
    path = tmp_path / "absent.h5"
    for name, error in ((path, errors.MissingModelFileError), (str(path), FileNotFoundError)):
        with pytest.raises(error, match="absent"):
            policy.import_model_from_h5(name)
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(9)])
    for model, words in ((other, r"other\.weights\.h5"), (wide, "body")):
        model.save_weights(tmp_path / "other.weights.h5")
        with pytest.raises(errors.ModelImportError, match=words):
            policy.import_model_from_h5(tmp_path / "other.weights.h5")
    assert_equal(policy.get_weights(), before)
