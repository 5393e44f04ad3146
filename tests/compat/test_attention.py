"""Memories around ported models, `GTrXLNet`, and windows of outputs as attention memories."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, TWO, make, rows_of, varied
from tfpolicies.compat import GTrXLNet, ModelCatalog, TFModelV2
from tfpolicies.errors import UsageError

FIVE = rows_of(OBS, 5, seed=3)
UNITS = {"attention_dim": 4, "head_dim": 3, "memory_inference": 2, "position_wise_mlp_dim": 4}
ATTENTION = {f"attention_{name.removeprefix('attention_')}": x for name, x in UNITS.items()}
ATTENTION |= {"use_attention": True, "attention_num_heads": 2, "fcnet_hiddens": []}
LSTM = {"use_lstm": True, "lstm_cell_size": 4, "lstm_use_prev_action": True}
DOUBLING = {**LSTM, "custom_model": "doubling", "custom_model_config": {"units": 3}}


class Doubling(TFModelV2):
    """Features as in RLlib's example: its values are not called."""

    def __init__(self, obs_space, action_space, num_outputs, model_config, name, units=4):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        assert num_outputs is None
        self.num_outputs = units
        self.hidden = keras.layers.Dense(units, "tanh")

    def forward(self, input_dict, state, seq_lens):
        self.rows = input_dict["obs_flat"].shape[0]
        return self.hidden(input_dict["obs_flat"]), []

    def value_function(self):
        return tf.zeros(self.rows)

    def get_features(self, obs):
        return self.hidden(obs)


class Inside(TFModelV2):
    def __init__(self, *args):
        super().__init__(*args)
        self.inner = GTrXLNet(*args[:2], None, *args[3:], **UNITS)
        self.out, self.value = keras.layers.Dense(self.num_outputs), keras.layers.Dense(1)

    def forward(self, input_dict, state, seq_lens):
        self.features, after = self.inner(input_dict, state, seq_lens)
        return self.out(self.features), after

    def get_initial_state(self):
        return self.inner.get_initial_state()

    def value_function(self):
        return tf.reshape(self.value(self.features), [-1])


ModelCatalog.register_custom_model("doubling", Doubling)
ModelCatalog.register_custom_model("gtrxl", GTrXLNet)
ModelCatalog.register_custom_model("inside", Inside)


def play(policy):
    """Returns the inputs of a policy's distribution in five steps of an episode."""
    memory = policy.session(1).recurrent_state
    rows = [memory.act([row[None]], False)[1]["action_dist_inputs"].copy() for row in FIVE]
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("catalog", "model", "inference"),
    [
        ({**LSTM, "fcnet_hiddens": [4]}, {**LSTM, "custom_model": "doubling"}, "onnx"),
        ({**LSTM, "fcnet_hiddens": [4]}, {**LSTM, "custom_model": "doubling"}, "session"),
        (ATTENTION, {"custom_model": "gtrxl", "custom_model_config": UNITS}, "onnx"),
    ],
    ids=["lstm-onnx", "lstm-session", "gtrxl-onnx"],
)
def test_ported_models_with_a_memory_equal_those_of_the_catalog(catalog, model, inference):
    expected = varied(make(model=catalog))
    policy = make(model=model, inference=inference)
    policy.set_weights(list(expected.get_weights().values()))
    np.testing.assert_allclose(play(policy), play(expected), atol=1e-6)


def test_a_model_with_a_memory_around_it_keeps_its_methods():
    policy = make(model=DOUBLING)
    kernel, bias, *_ = policy.get_weights().values()
    assert policy.model.num_outputs == 3
    get_features = policy.model.get_features  # with the weights of its policy
    make(model=DOUBLING, seed=1)
    np.testing.assert_allclose(get_features(FIVE), np.tanh(FIVE @ kernel + bias), atol=1e-6)


def test_attention_may_be_a_part_of_another_model():
    policy = make(model={"custom_model": "inside"})
    assert [part.shape for part in policy.get_initial_state()] == [(2, 4), (1,)]
    state = [np.stack([part] * 5) for part in policy.get_initial_state()]
    result, after, _ = policy.compute_actions(FIVE, state)
    assert TWO.contains(result[0])
    assert after[1].tolist() == [[1.0]] * 5


@pytest.mark.parametrize("units", [1, 2])
def test_windows_of_the_last_outputs_are_a_memory_of_attention(units):
    model = {**ATTENTION, "attention_num_transformer_units": units}
    policy = varied(make(model=model))
    windows, result = [np.zeros((2, 4), np.float32)] * units, []
    for row in FIVE:
        _, newest, extras = policy.compute_single_action(row, windows, explore=False)
        assert [part.shape for part in newest] == [(4,)] * units
        windows = [np.concatenate([w, [x]])[1:] for w, x in zip(windows, newest, strict=True)]
        result.append(extras["action_dist_inputs"])
    np.testing.assert_allclose(result, play(policy), atol=1e-6)


@pytest.fixture(scope="module")
def attention():
    return make(model=ATTENTION)


@pytest.mark.parametrize(
    "memory", [[], [np.zeros((3, 4))], [np.zeros((2, 4))] * 3, [np.zeros(4)], [None]]
)
def test_other_memories_are_refused(memory, attention):
    with pytest.raises(UsageError, match=r"a recurrent state of 2 arrays"):
        attention.compute_actions(FIVE[:1], memory)


def test_windows_need_the_names_for_ported_code(no_extensions, attention):
    with pytest.raises(UsageError, match=r"a recurrent state of 2 arrays"):
        attention.compute_single_action(FIVE[0], [np.zeros((2, 4))])
