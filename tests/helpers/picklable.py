"""Custom policies, models and environments that other processes can import."""

import gymnasium as gym
import keras
import numpy as np

from helpers.factories import OBS, TWO
from tfpolicies import DefaultCallbacks, PPOTF2Policy


class CustomPPOPolicy(PPOTF2Policy):
    """A custom class."""


class Callbacks(DefaultCallbacks):
    """Custom callbacks."""


@keras.saving.register_keras_serializable("travellers")
class Doubled(keras.layers.Layer):
    """A custom layer."""

    def call(self, x):
        return 2.0 * x


def factory(observation_space, num_outputs):
    inputs = keras.Input(observation_space.shape)
    return keras.Model(inputs, keras.layers.Dense(num_outputs)(Doubled()(inputs)))


class Corridor(gym.Env):
    """An environment of ten steps that can be saved and restored."""

    observation_space, action_space = OBS, TWO

    def __init__(self, config=None):
        self.at = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(3, np.float32), {}

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]

    def step(self, action):
        self.at += 1
        return np.full(3, self.at / 10, np.float32), float(action), self.at == 10, False, {}


def mapping(agent_id, episode=None, worker=None, **kwargs):
    return "default_policy"


def act(policy, obs):
    """Returns the class and id of a policy, and its next actions."""
    actions = [policy.compute_actions(obs)[0].tolist() for _ in range(3)]
    return type(policy).__name__, policy.policy_id, actions


def train(algorithm):
    """Returns the numbers of one more iteration."""
    result = algorithm.train()
    algorithm.stop()
    weights = algorithm.get_weights()["default_policy"]
    return result["training_iteration"], result["timesteps_total"], weights
