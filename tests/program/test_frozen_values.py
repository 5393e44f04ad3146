"""Warnings of values that a trace freezes: draws in Python, numbers on `self`, losses in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, TWO, batch_for, make
from tfpolicies import PGTF1Policy, PGTF2Policy, PPOTF2Policy
from tfpolicies.errors import ConfigError

LOGGER = "tfpolicies.program.frozen_values"
RNG = np.random.default_rng(0)
SCALE = 1.0


def get_lines(caplog):
    return [x.getMessage() for x in caplog.records if x.name == LOGGER]


def learn(policy_class, **config):
    policy = make(policy_class, **config)
    for _ in range(2):
        policy.learn_on_batch(batch_for(make(PGTF2Policy), 4))
    return policy


def test_draws_in_a_loss_are_warned_of(caplog):
    class Global(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            return super().loss(model, dist_class, train_batch) * np.random.uniform()

    class Named(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            return super().loss(model, dist_class, train_batch) * RNG.uniform()

    class InGraph(PGTF1Policy):
        def loss(self, model, dist_class, train_batch):
            return super().loss(model, dist_class, train_batch) * np.random.uniform()

    for policy_class in (Global, Named, InGraph):
        learn(policy_class)
    assert [line.partition(",")[0] for line in get_lines(caplog)] == [
        "Global.loss draws from np.random",
        "Named.loss draws from RNG",
        "InGraph.loss draws from np.random",
    ]


def test_draws_of_a_model_are_warned_of_where_it_acts(caplog):
    class Noisy(keras.layers.Layer):
        def call(self, x):
            return x + np.random.normal(size=3).astype(np.float32)

    class Acting(PPOTF2Policy):
        pass

    def network(observation_space, num_outputs):
        return keras.Sequential([keras.Input((3,)), Noisy(), keras.layers.Dense(num_outputs)])

    policy = Acting(OBS, TWO, {"inference": "tf", "model": {"custom_model": network}})
    policy.compute_actions(np.zeros((2, 3), np.float32))
    assert "acting of Acting draws from np.random" in get_lines(caplog)[0]


def test_draws_of_each_update_are_not_warned_of(caplog):
    class Fresh(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            return super().loss(model, dist_class, train_batch) * np.random.uniform(0.5, 1.0)

    learn(Fresh, eager_tracing=False)
    learn(PGTF2Policy)
    assert get_lines(caplog) == []


def test_numbers_that_a_loss_keeps_on_the_policy_are_warned_of(caplog):
    class Counts(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            self.updates = vars(self).get("updates", 0) + 1
            self.scale = np.float32(SCALE)
            self.mean = tf.reduce_mean(model(train_batch)[0])
            return super().loss(model, dist_class, train_batch) * self.scale

        def stats_fn(self, train_batch):
            return {"mean": self.mean}

    learn(Counts)
    assert [line.partition(",")[0] for line in get_lines(caplog)] == [
        "Counts.loss sets self.updates to the number 1",
        "Counts.loss sets self.scale to the number np.float32(1.0)",
    ]


@pytest.mark.parametrize("eager_tracing", [True, False])
def test_a_loss_without_a_gradient_is_refused_though_layers_add_losses(eager_tracing):
    class Cut(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            return tf.stop_gradient(super().loss(model, dist_class, train_batch))

    def network(observation_space, num_outputs):
        layer = keras.layers.Dense(num_outputs, kernel_regularizer=keras.regularizers.L2(0.5))
        return keras.Sequential([keras.Input((3,)), layer])

    for policy_class in (PGTF2Policy, Cut):
        config = {"jit_compile": False, "eager_tracing": eager_tracing, "inference": "tf"}
        policy = policy_class(OBS, TWO, {**config, "model": {"custom_model": network}})
        before = policy.get_weights()
        batch = batch_for(make(PGTF2Policy), 4)
        if policy_class is PGTF2Policy:
            assert np.isfinite(policy.learn_on_batch(batch)["learner_stats"]["policy_loss"])
            continue
        with pytest.raises(ConfigError, match="A loss depends on none of the variables"):
            policy.learn_on_batch(batch)
        for key, value in policy.get_weights().items():
            np.testing.assert_array_equal(value, before[key])
