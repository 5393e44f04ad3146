"""What other processes find by name: policies, models and environments of the user's."""

import gymnasium as gym
import keras
import numpy as np

from helpers.factories import OBS, TWO
from tfpolicies import DefaultCallbacks, Policy, PPOTF2Policy


class Mine(PPOTF2Policy):
    """A class of the user's, with a setting of its own in its state."""


class Callbacks(DefaultCallbacks):
    """Callbacks of the user's."""


@keras.saving.register_keras_serializable("travellers")
class Doubled(keras.layers.Layer):
    """A layer of the user's."""

    def call(self, x):
        return 2.0 * x


def factory(observation_space, num_outputs):
    inputs = keras.Input(observation_space.shape)
    return keras.Model(inputs, keras.layers.Dense(num_outputs)(Doubled()(inputs)))


class ByHand(Policy):
    """A policy without TensorFlow."""

    def __init__(self, observation_space=OBS, action_space=TWO, config=None):
        super().__init__(observation_space, action_space, config or {})
        self.bias = np.arange(3)

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return np.zeros(len(obs_batch), np.int64), [], {}


class Corridor(gym.Env):
    """An environment of the user's."""

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


def acted(policy, obs):
    """What a policy does next, and what it has become then."""
    actions = [policy.compute_actions(obs)[0].tolist() for _ in range(3)]
    return type(policy).__name__, policy.policy_id, actions


def trained(algorithm):
    """The numbers of one more iteration."""
    result = algorithm.train()
    algorithm.stop()
    weights = algorithm.get_weights()["default_policy"]
    return result["training_iteration"], result["timesteps_total"], weights
