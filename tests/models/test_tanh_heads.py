"""An actor of Keras's DDPG example ends in tanh, times the bound; here actions are squashed."""

import logging

import keras
import pytest
from gymnasium import spaces

from helpers.factories import make
from tfpolicies import DDPGTF2Policy, PPOTF2Policy, SACTF2Policy, TD3TF2Policy
from tfpolicies.models.tanh_heads import ends_in_tanh
from tfpolicies.models.warn_once import warn_once

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


@pytest.mark.parametrize("actor", [functional, sequential])
@pytest.mark.parametrize("policy_class", [SACTF2Policy, TD3TF2Policy, DDPGTF2Policy])
def test_an_actor_that_ends_in_tanh_is_told_of_with_the_remedy(policy_class, actor, caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        make(policy_class, OBS, TORQUE, model={"custom_model": actor})
    (line,) = [x for x in caplog.messages if "ends in tanh" in x]
    assert line.startswith("The model 'ddpg_actor' ends in tanh")
    assert "Remove that activation" in line


@pytest.mark.parametrize(
    ("policy_class", "actor"),
    [(SACTF2Policy, linear), (TD3TF2Policy, linear), (PPOTF2Policy, functional)],
)
def test_an_actor_that_may_end_so_is_not(policy_class, actor, caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        make(policy_class, OBS, TORQUE, model={"custom_model": actor})
    assert not [x for x in caplog.messages if "tanh" in x]


def test_tanh_is_found_through_operations_that_shape():
    inputs = keras.Input((3,))
    mean, log_std = (keras.layers.Dense(2)(inputs) for _ in range(2))
    joined = keras.layers.Concatenate()([keras.ops.tanh(mean), log_std])
    assert ends_in_tanh(keras.Model(inputs, joined))
    assert not ends_in_tanh(keras.Model(inputs, keras.layers.Concatenate()([mean, log_std])))
    assert not ends_in_tanh(keras.Sequential([keras.layers.Dense(1, "tanh")]))  # not built
