"""Keras models in ported code: classes in RLlib's form, and attributes of `policy.model`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import OBS, make, rows_of
from tfpolicies import PGTF2Policy, PPOTF2Policy
from tfpolicies.compat import FullyConnectedNetwork, ModelCatalog
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.testing import random_batch

FIVE = rows_of(OBS, 5, seed=3)


class Cells(keras.Model):
    def __init__(self, input_space, action_space, num_outputs, *, name="", cells=3):
        super().__init__(name=name)
        self.cells, self.sizes = cells, (input_space.shape, action_space.n)
        self.lstm = keras.layers.LSTM(cells, return_sequences=True, return_state=True)
        self.logits, self.value = keras.layers.Dense(num_outputs), keras.layers.Dense(1)

    def call(self, sample_batch):
        lengths = sample_batch["seq_lens"]
        x = tf.reshape(sample_batch["obs"], [tf.shape(lengths)[0], -1, *self.sizes[0]])
        before = [sample_batch["state_in_0"], sample_batch["state_in_1"]]
        mask = tf.sequence_mask(lengths, tf.shape(x)[1])
        x, h, c = self.lstm(x, mask=mask, initial_state=before)
        rows = tf.reshape(x, [-1, self.cells])
        return self.logits(rows), [h, c], {"vf_preds": tf.reshape(self.value(rows), [-1])}

    def get_initial_state(self):
        return [np.zeros(self.cells, np.float32), np.zeros(self.cells, np.float32)]

    def double_cells(self):
        return 2 * self.cells


class Plain(keras.Model):
    """Without a memory and without values; in training mode it adds 1."""

    def __init__(self, input_space, action_space, num_outputs, *, name):
        super().__init__(name=name)
        self.out = keras.layers.Dense(num_outputs, kernel_initializer="ones")

    def call(self, sample_batch, training=False):
        return self.out(sample_batch["obs_flat"]) + float(training), []


def with_class(kind, policy_class=PPOTF2Policy, obs=OBS, **config):
    model = {"custom_model": kind, "custom_model_config": config, "max_seq_len": 2}
    return make(policy_class, obs, model=model)


def assert_outputs(policy):
    """Asserts that the model called by itself has the outputs of acting; returns its states."""
    extras = policy.compute_actions(FIVE, explore=False).extras
    outputs, states = policy.model({"obs": FIVE})
    np.testing.assert_allclose(outputs, extras["action_dist_inputs"], atol=1e-6)
    np.testing.assert_allclose(policy.model.value_function(), extras["vf_preds"], atol=1e-6)
    return states


@pytest.fixture(scope="module")
def remembering():
    return with_class(Cells, cells=3)


@pytest.mark.core
def test_a_keras_class_with_a_memory_acts_by_its_layers(remembering):
    policy = remembering
    memory = [np.full((5, 3), 0.5, np.float32), np.full((5, 3), -0.5, np.float32)]
    _, after, extras = policy.compute_actions(FIVE, memory, explore=False)
    layers = policy.model.base_model
    x, h, c = layers.lstm(FIVE[:, None], initial_state=memory)
    np.testing.assert_allclose(extras["action_dist_inputs"], layers.logits(x[:, 0]), atol=1e-5)
    np.testing.assert_allclose(extras["vf_preds"], layers.value(x[:, 0])[:, 0], atol=1e-5)
    np.testing.assert_allclose(after, [h, c], atol=1e-5)
    assert (policy.model.name, layers.sizes, policy.model.double_cells()) == (
        "Cells",
        ((3,), 2),
        6,
    )


def test_a_keras_class_with_a_memory_learns_and_is_called_by_itself(remembering):
    policy = remembering.copy()
    before = policy.get_weights()
    policy.learn_on_batch(random_batch(policy, 6))
    assert all(np.any(before[key] != w) for key, w in policy.get_weights().items())
    lengths, memory = np.array([2, 1], np.int32), [np.zeros((2, 3), np.float32)] * 2
    named = {f"state_in_{i}": x for i, x in enumerate(memory)}
    outputs, after = policy.model({"obs": FIVE[:4], **named}, memory, lengths)
    assert (outputs.shape, [x.shape for x in after]) == ((4, 2), [(2, 3)] * 2)
    assert policy.model.value_function().shape == (4,)


def test_a_keras_class_without_values_and_with_discrete_observations():
    ModelCatalog.register_custom_model("plain", Plain)
    policy = with_class("plain", policy_class=PGTF2Policy, obs=spaces.Discrete(3))
    _, _, extras = policy.compute_actions([0, 2], explore=False)
    np.testing.assert_allclose(extras["action_dist_inputs"], np.ones((2, 2)))  # one-hot rows
    assert "vf_preds" not in extras
    critic = with_class("plain")  # with a value network of the catalog
    assert critic.compute_actions(FIVE).extras["vf_preds"].shape == (5,)


def test_a_keras_class_of_another_form_is_refused_with_a_hint():
    class OneOutput(Plain):
        def call(self, sample_batch):
            return self.out(sample_batch["obs_flat"])

    with pytest.raises(ModelError, match=r"OneOutput.call must return \(outputs"):
        with_class(OneOutput)

    class OldName(Plain):
        def call(self, sample_batch):
            keras.layers.LSTM(2)(inputs=sample_batch["obs_flat"][:, None])

    with pytest.raises(ModelError, match="called `sequences`: leave the name `inputs=` out"):
        with_class(OldName)
    with pytest.raises(ModelError, match="OneOutput could not be constructed"):
        with_class(OneOutput, cells=3)


@pytest.mark.core
def test_the_catalogs_model_has_the_attributes_that_scripts_read():
    policy = make()
    model = policy.model
    with pytest.raises(ConfigError, match="was not called yet"):
        model.value_function()
    assert_outputs(policy)
    assert (model.base_model, model.is_time_major()) == (model, False)
    assert list(model.view_requirements) == list(model.inference_view_requirements) == ["obs"]
    assert policy.model is model
    assert [v.shape for v in policy.variables()] == [w.shape for w in policy.get_weights().values()]


def test_attributes_of_a_model_are_not_in_its_clones():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    policy = make(PGTF2Policy, model=model)
    result = policy.model
    result(FIVE)
    with pytest.raises(ConfigError, match="has no value output"):
        result.value_function()
    copy = make(PGTF2Policy, model=result)  # as a template, with these weights
    outputs = result(FIVE).numpy()
    np.testing.assert_array_equal(copy.model(FIVE).numpy(), outputs)
    assert not hasattr(keras.models.clone_model(result), "view_requirements")


def test_the_views_of_a_model_with_a_memory_are_its_inputs():
    settings = {"use_lstm": True, "lstm_cell_size": 2, "max_seq_len": 3, "fcnet_hiddens": []}
    settings |= {"lstm_use_prev_action": True, "lstm_use_prev_reward": True}
    model = make(model=settings).model
    states = [f"state_{way}_{i}" for i in (0, 1) for way in ("in", "out")]
    assert list(model.view_requirements) == ["obs", "prev_actions", "prev_rewards", *states]
    assert model.view_requirements["prev_actions"].shift == -1
    assert model.view_requirements["state_in_1"].batch_repeat_value == 3
    reads = ["obs", "prev_actions", "prev_rewards", "state_in_0", "state_in_1"]
    assert list(model.inference_view_requirements) == reads


def test_make_model_may_return_a_model_of_the_catalog():
    class FromCatalog(PPOTF2Policy):
        def make_model(self):
            both = self.observation_space, self.action_space
            return ModelCatalog.get_model_v2(*both, 2, {"fcnet_hiddens": [4]})

    policy = make(FromCatalog)
    assert isinstance(policy.model.inner, FullyConnectedNetwork)
    assert assert_outputs(policy) == []
    assert "base_model.fc_out.kernel:0" in policy.model.inner.variables(as_dict=True)
