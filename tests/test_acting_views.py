"""Views that a model reads while it acts: by hand, in sessions, samples, runtimes and exports."""

from __future__ import annotations

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces
from tiny import OBS, TWO, make

from tfpolicies import PGTF2Policy, PPOConfig, PPOTF1Policy, PPOTF2Policy, RolloutWorker
from tfpolicies.errors import ModelError, UsageError

LINE = spaces.Box(-np.inf, np.inf, (1,), np.float32)


def four(observation_space, num_outputs):
    """Reads the last four observations, and the last three actions and rewards."""
    inputs = {
        "obs": keras.Input((1,), name="obs"),
        "prev_n_obs": keras.Input((4, 1), name="prev_n_obs"),
        "prev_n_actions": keras.Input((3, 2), name="prev_n_actions"),
        "prev_n_rewards": keras.Input((3,), name="prev_n_rewards"),
    }
    flat = [keras.layers.Flatten()(x) for x in inputs.values()]
    x = keras.layers.Dense(8, activation="tanh")(keras.layers.Concatenate()(flat))
    return keras.Model(inputs, [keras.layers.Dense(num_outputs)(x), keras.layers.Dense(1)(x)])


class Counter(gym.Env):
    """Shows 1, 2, 3, ...; pays as much as it shows; lasts four steps."""

    observation_space, action_space = LINE, TWO

    def __init__(self, length=4, config=None):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.t = 1
        return np.array([1.0], np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t > self.length
        return np.array([self.t], np.float32), float(10 * (self.t - 1)), False, over, {}


def worker_of(policy_class=PPOTF2Policy, model=four, **config):
    config = {"model": {"custom_model": model}, "rollout_fragment_length": 6, **config}
    config = {"seed": 0, "inference": "tf", "jit_compile": False, **config}
    return RolloutWorker(
        env_creator=lambda ctx: Counter(), default_policy_class=policy_class, config=config
    )


def test_smoke():
    worker = worker_of()
    batch = worker.sample()
    assert batch["prev_n_obs"].shape == (6, 4, 1)
    assert batch["obs"][:, 0].tolist() == [1, 2, 3, 4, 1, 2]
    assert batch["prev_n_obs"][..., 0].tolist() == [
        [0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [0, 0, 0, 1], [0, 0, 1, 2]
    ]
    assert batch["prev_n_rewards"].tolist() == [
        [0, 0, 0], [0, 0, 10], [0, 10, 20], [10, 20, 30], [0, 0, 0], [0, 0, 10]
    ]
