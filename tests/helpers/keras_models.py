"""Keras models that tests share, and their weights."""

from __future__ import annotations

import keras
import numpy as np


def make_mlp(
    *, n: int = 3, hidden: int = 4, activation: str = "tanh", values: int = 0
) -> keras.Model:
    """Returns a functional model of one hidden layer for two actions, and values if there are."""
    inputs = keras.Input((n,))
    x = keras.layers.Dense(hidden, activation)(inputs)
    logits = keras.layers.Dense(2)(x)
    return keras.Model(inputs, [logits, keras.layers.Dense(values)(x)] if values else logits)


def vary_weights(model: keras.Model, scale: float = 1.0, seed: int = 0) -> keras.Model:
    """Gives each weight random values, so that every input counts; returns the model."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        if variable.name != "seed_generator_state":
            variable.assign(scale * rng.normal(size=variable.shape))
    return model


def two_layers(observation_space, num_outputs, width=8):
    layers = [keras.layers.Dense(width, "tanh"), keras.layers.Dense(num_outputs)]
    return keras.Sequential(layers)


class UnregisteredDense(keras.layers.Dense):
    """A layer that no file can name."""


def unregistered_layer(observation_space, num_outputs):
    return keras.Sequential([UnregisteredDense(num_outputs)])
