"""Checkpoints continue the episodes of environments with `get_state` and `set_state`."""

import logging

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.workers import make_small_config
from tfpolicies import PPO
from tfpolicies.base.warn_once import warn_once
from tfpolicies.envs import check_env
from tfpolicies.errors import EnvError

pytestmark = pytest.mark.usefixtures("kept_programs")


class Drift(gym.Env):
    """A random walk of 12 steps."""

    observation_space = spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = 0.0, 0
        return self.observe(), {}

    def step(self, action):
        self.place += 0.1 * self.np_random.normal() + 0.1 * int(action)
        self.steps += 1
        return self.observe(), self.place, False, self.steps == 12, {}

    def observe(self):
        return np.array([self.place], np.float32)


class SavedDrift(Drift):
    def get_state(self):
        return self.place, self.steps, self.np_random.bit_generator.state

    def set_state(self, state):
        self.place, self.steps, self.np_random.bit_generator.state = state


class WithoutGenerator(SavedDrift):
    def get_state(self):
        return self.place, self.steps

    def set_state(self, state):
        self.place, self.steps = state


class WithObject(SavedDrift):
    def get_state(self):
        return self.place, self.steps, self.np_random


class Failing(SavedDrift):
    def get_state(self):
        raise RuntimeError("out of order")


class OnlyGetter(Drift):
    def get_state(self):
        return self.place


class OtherParameters(SavedDrift):
    def get_state(self, normalized):
        return self.place / 10


@pytest.fixture(autouse=True)
def fresh_warnings():
    warn_once.cache_clear()


def resume(env_class, folder, resumed_class=None):
    """Returns the weights after two iterations, with and without a checkpoint after the first."""
    make = make_small_config(env_class, rollout_fragment_length=32, log_level="WARN").build
    whole = make()
    whole.train()
    whole.train()
    interrupted = make()
    interrupted.train()
    interrupted.save(folder)
    resumed = PPO.from_checkpoint(folder, config={"env": resumed_class or env_class})
    resumed.train()
    return [algorithm.get_policy().get_weights() for algorithm in (whole, resumed)]


def are_equal(weights, other_weights):
    return all(np.array_equal(x, other_weights[key]) for key, x in weights.items())


def test_a_resumed_run_continues_the_episodes(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        assert are_equal(*resume(SavedDrift, tmp_path))
    assert "episodes" not in caplog.text


@pytest.mark.parametrize("env_class", [OnlyGetter, OtherParameters, Drift])
def test_methods_of_other_meaning_are_not_called(env_class, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        assert not are_equal(*resume(env_class, tmp_path))
    assert "episodes" not in caplog.text
    check_env(env_class())


@pytest.mark.parametrize(
    ("env_class", "reason"),
    [
        (WithObject, "Generator, which no file can hold"),
        (Failing, "`get_state` of Failing failed: RuntimeError('out of order')"),
    ],
)
def test_a_state_that_cannot_be_stored_costs_the_running_episodes_only(
    env_class, reason, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        resume(env_class, tmp_path)
    (line,) = [x.getMessage() for x in caplog.records if "running episodes" in x.getMessage()]
    assert reason in line


@pytest.mark.parametrize(
    ("resumed_class", "reason"),
    [
        (Drift, "Drift no longer has `get_state` and `set_state`"),
        (WithoutGenerator, "`set_state` of WithoutGenerator failed: ValueError("),
    ],
)
def test_a_state_that_cannot_be_restored_starts_new_episodes(
    resumed_class, reason, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        resume(SavedDrift, tmp_path, resumed_class)
    (line,) = [x.getMessage() for x in caplog.records if "cannot be continued" in x.getMessage()]
    assert reason in line


@pytest.mark.parametrize(
    ("env_class", "message"),
    [
        (WithoutGenerator, r"an episode continues in another way. The observation in step 1 was"),
        (WithObject, r"`get_state` returns numpy\..*Generator, which no file can hold"),
        (Failing, r"`get_state` of Failing failed"),
    ],
)
def test_check_env_continues_an_episode_from_its_stored_state(env_class, message):
    check_env(SavedDrift())
    check_env(env_class(), repeatable=False)
    with pytest.raises(EnvError, match=message):
        check_env(env_class())
