"""`TFModelV2` classes as users of RLlib write them, and policies with them."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from helpers.factories import OBS, make
from tfpolicies import PPOTF2Policy
from tfpolicies.compat import ModelCatalog, RecurrentNetwork, TFModelV2, normc_initializer


class Functional(TFModelV2):
    """Acts by `base_model`, which gives logits and values of observations."""

    def forward(self, input_dict, state, seq_lens):
        outputs, self._value_out = self.base_model(input_dict["obs"])
        return outputs, state

    def value_function(self):
        return tf.reshape(self._value_out, [-1])


class Dense(Functional):
    """A functional Keras model with a value branch."""

    def __init__(self, obs_space, action_space, num_outputs, model_config, name, hidden=4):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        inputs = tf.keras.layers.Input(shape=obs_space.shape, name="observations")
        x = tf.keras.layers.Dense(
            hidden, activation="tanh", kernel_initializer=normc_initializer(1.0)
        )(inputs)
        outputs = tf.keras.layers.Dense(num_outputs, name="my_out")(x)
        self.base_model = tf.keras.Model(inputs, [outputs, tf.keras.layers.Dense(1)(x)])
        self.register_variables(self.base_model.variables)


class Cells(RecurrentNetwork):
    """An LSTM over sequences, masked by their lengths."""

    def __init__(self, obs_space, action_space, num_outputs, model_config, name, cells=3):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        self.cells = cells
        self.lstm = keras.layers.LSTM(cells, return_sequences=True, return_state=True)
        self.heads = {"policy": keras.layers.Dense(num_outputs), "value": keras.layers.Dense(1)}

    def forward_rnn(self, inputs, state, seq_lens):
        mask = tf.sequence_mask(seq_lens, tf.shape(inputs)[1])
        x, h, c = self.lstm(inputs, initial_state=state, mask=mask)
        self._values = self.heads["value"](x)
        return self.heads["policy"](x), [h, c]

    def get_initial_state(self):
        return [np.zeros(self.cells, np.float32), np.zeros(self.cells, np.float32)]

    def value_function(self):
        return tf.reshape(self._values, [-1])


class Linear(TFModelV2):
    """One layer, no value; remembers the inputs of `forward`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.out = keras.layers.Dense(self.num_outputs, use_bias=False, kernel_initializer="ones")

    def forward(self, input_dict, state, seq_lens):
        type(self).seen = input_dict
        return self.out(input_dict["obs_flat"]), state


def with_model(model, policy_class=PPOTF2Policy, obs=OBS, inference="tf", seed=0, **settings):
    """Makes a policy with a model class, which is registered by its name, or a registered name."""
    name = model if isinstance(model, str) else model.__name__
    if name != model:
        ModelCatalog.register_custom_model(name, model)
    settings["custom_model"] = name
    return make(policy_class, obs, model=settings, inference=inference, seed=seed)
