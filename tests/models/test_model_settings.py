"""Defaults and refusals of the `model` config."""

import pytest

from tfpolicies import PPOConfig
from tfpolicies.errors import ConfigError, ModelError, ModelSettingError
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.model_config import complete_model_config

REFUSED = {
    "fcnet_hiddens": [4, ["a"], [0], [True], "list of integers >= 1"],
    "post_fcnet_hiddens": [[0], "list of integers >= 1"],
    "conv_filters": [
        *(4, [4], [[16, 4]], [[16, [4, 4, 4], 1]], [[0, 4, 1]], [[16, 4, "2"]]),
        r"list of \[channels, kernel, stride\]",
    ],
    "post_fcnet_activation": [3, "activation name"],
    "conv_activation": [3, "activation name"],
    "vf_share_layers": ["yes", "True or False"],
    "no_final_linear": [1, "True or False"],
    "use_lstm": [None, "True or False"],
    "use_gru": [1, "True or False"],
    "use_attention": [1, "True or False"],
    "lstm_use_prev_action": [1, "True or False"],
    "max_seq_len": [0, "integer >= 1"],
    "lstm_cell_size": [64.0, "integer >= 1"],
    "_time_major": [True, r"sequences are \[B, T, \.\.\.\]"],
    "attention_dim": [-1, "integer >= 1"],
    "attention_memory_inference": [0, "integer >= 1"],
    "attention_init_gru_gate_bias": [float("nan"), "finite number"],
    "attention_use_n_prev_actions": [1001, "integer from 0 to 1000"],
    "attention_use_n_prev_rewards": [True, "integer from 0 to 1000"],
    "framestack": [False, "AtariPreprocessing"],
    "dim": [0, "integer >= 1"],
    "grayscale": [True, "AtariPreprocessing"],
    "zero_mean": [False, "AtariPreprocessing"],
    "custom_model": ["a string", r"keras\.Model, a factory.*the name of a registered model"],
    "custom_model_config": [[], "a dict"],
    "custom_action_dist": [3, "subclass of models"],
    "custom_preprocessor": ["mine", "ObservationWrapper"],
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_value_out_of_range_is_refused_with_key_rule_and_value(key):
    *values, rule = REFUSED[key]
    for value in values:
        with pytest.raises(ModelSettingError, match=rule) as error:
            complete_model_config({key: value})
        assert f"model[{key!r}]" in str(error.value)
        assert repr(value) in str(error.value)
        assert isinstance(error.value, ConfigError)
        assert isinstance(error.value, ModelError)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_lstm": True, "use_gru": True}, "At most one of"),
        ({"use_gru": True, "use_attention": True}, "use_gru and use_attention"),
        ({"lstm_use_prev_action": True}, "without use_lstm or use_gru"),
        ({"lstm_use_prev_reward": True, "use_attention": True}, "without use_lstm or use_gru"),
        ({"attention_use_n_prev_actions": 1, "use_lstm": True}, "without use_attention"),
        ({"use_lstm": True, "no_final_linear": True}, "linear layer after the memory"),
        ({"attention_memory_inference": 10, "attention_memory_training": 5}, "= 10, got 5"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ModelSettingError, match=words):
        complete_model_config(settings)


def test_missing_settings_get_their_defaults_and_unknown_ones_are_refused():
    settings = complete_model_config({"attention_memory_inference": 10, "use_attention": True})
    assert settings == {**MODEL_DEFAULTS, "attention_memory_inference": 10, "use_attention": True}
    assert settings["attention_memory_training"] == 50  # the default is not a contradiction
    with pytest.raises(ModelSettingError, match="Did you mean 'lstm_cell_size'"):
        complete_model_config({"lstm_cel_size": 3})


def test_a_config_checks_its_model_where_it_is_given():
    with pytest.raises(ConfigError, match="At most one of"):
        PPOConfig().training(model={"use_lstm": True, "use_attention": True})
