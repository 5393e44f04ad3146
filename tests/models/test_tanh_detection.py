"""Warnings about actors that end in tanh, as in Keras's DDPG example: actions are squashed."""

import logging
import re

import keras
import pytest
from gymnasium import spaces

from helpers.factories import make
from tfpolicies import DDPGTF2Policy, PPOTF2Policy, SACTF2Policy, TD3TF2Policy
from tfpolicies.base.warn_once import warn_once
from tfpolicies.models.tanh_detection import ends_in_tanh

OBS, TORQUE = spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-2.0, 2.0, (1,))


def functional(space, outputs):
    inputs = keras.Input((3,))
    head = keras.layers.Dense(outputs, "tanh", name="torque")(keras.layers.Dense(4)(inputs))
    return keras.Model(inputs, head * 2.0, name="ddpg_actor")


def sequential(space, outputs):
    layers = [keras.layers.Dense(outputs), keras.layers.Activation("tanh")]
    return keras.Sequential([*layers, keras.layers.Rescaling(2.0)], name="ddpg_actor")


def linear(space, outputs):
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(outputs)]
    return keras.Sequential(layers, name="ddpg_actor")


SQUASHING = [SACTF2Policy, TD3TF2Policy, DDPGTF2Policy]


@pytest.mark.parametrize(
    ("policy_class", "actor", "warned"),
    [
        *((policy_class, functional, True) for policy_class in SQUASHING),
        *((policy_class, sequential, True) for policy_class in SQUASHING),
        *((policy_class, linear, False) for policy_class in SQUASHING[:2]),
        (PPOTF2Policy, functional, False),
    ],
)
def test_an_actor_that_ends_in_tanh_is_logged_with_the_remedy(policy_class, actor, warned, caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        make(policy_class, OBS, TORQUE, model={"custom_model": actor})
    warning = r"The model 'ddpg_actor' ends in tanh.*Remove that activation"
    lines = [re.match(warning, x, re.DOTALL) for x in caplog.messages if "tanh" in x]
    assert [line is not None for line in lines] == [True] * warned


def test_tanh_is_recognised_through_operations_that_shape():
    inputs = keras.Input((3,))
    mean, log_std = (keras.layers.Dense(2)(inputs) for _ in range(2))
    joined = keras.layers.Concatenate()([keras.ops.tanh(mean), log_std])
    assert ends_in_tanh(keras.Model(inputs, joined))
    assert not ends_in_tanh(keras.Model(inputs, keras.layers.Concatenate()([mean, log_std])))
    assert not ends_in_tanh(keras.Sequential([keras.layers.Dense(1, "tanh")]))  # not built
