"""Tuned settings: the table, configs that begin with them, and the command line."""

import math
import re
from pathlib import Path

import gymnasium as gym
import pytest

from tfpolicies import AlgorithmConfig, PPOConfig, SACConfig
from tfpolicies.algorithms.algorithm_registry import find_algorithm
from tfpolicies.algorithms.tuned_hyperparameters import (
    get_tuned_entries,
    get_tuned_settings,
    register_tuned,
    require_tuned,
    suggest_tuned,
)
from tfpolicies.algorithms.tuned_hyperparameters_table import TUNED
from tfpolicies.cli.train_options import TrainSettings
from tfpolicies.envs.third_party import register_namespace
from tfpolicies.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("algo", "env"), TUNED, ids=" on ".join)
def test_an_entry_is_a_valid_config_and_names_its_source(algo, env):
    config = find_algorithm(algo).get_default_config().environment(env)
    config.update_from_dict(get_tuned_settings(algo, env)).validate()
    entry = TUNED[algo, env]
    assert re.search(r"hyperparams/\w+\.yml|arXiv:\d", entry.source)
    assert entry.steps >= 20_000
    assert entry.threshold is None or math.isfinite(entry.threshold)
    sampled = config.get_fragment_length() * config.num_envs_per_worker
    if "sgd_minibatch_size" in config:
        assert sampled == config.train_batch_size
    intensity = config.get("training_intensity")
    assert intensity is None or intensity * sampled % config.train_batch_size == 0


def test_environments_of_the_table_are_registered():
    for _, env in TUNED:
        if not env.startswith("envpool:"):
            register_namespace(env)
            assert gym.spec(env).id == env


def test_settings_are_the_callers_to_change():
    get_tuned_settings("PPO", "CartPole-v1")["model"]["fcnet_hiddens"].append(1)
    assert get_tuned_settings("PPO", "CartPole-v1")["model"]["fcnet_hiddens"] == [64, 64]
    assert get_tuned_settings("PPO", "Nothing-v0") == {}


def test_a_config_begins_with_tuned_settings():
    config = SACConfig.from_tuned("HalfCheetah-v4")
    assert isinstance(config, SACConfig)
    assert (config.env, config.lr, config.train_batch_size) == ("HalfCheetah-v4", 3e-4, 256)
    robot = PPOConfig.from_tuned("Hopper-v5")
    assert (robot.observation_filter, robot.reward_filter) == ("MeanStdFilter", "ReturnStdFilter")


def test_an_unknown_pair_names_the_nearest_entries():
    with pytest.raises(ConfigError, match=r"SAC on HalfCheetah-v3; nearest are SAC on HalfCheetah"):
        SACConfig.from_tuned("HalfCheetah-v3")
    with pytest.raises(ConfigError, match=r"AlgorithmConfig has no algorithm"):
        AlgorithmConfig.from_tuned("CartPole-v1")
    nearest = "TD3 on MountainCarContinuous-v0, DDPG on MountainCarContinuous-v0"
    assert suggest_tuned("SAC", "MountainCarContinuous-v0") == nearest
    assert suggest_tuned("SAC", "my_module:Drone") == ""
    with pytest.raises(ConfigError, match=r"SAC on my_module:Drone\. `tfpolicies list tuned`"):
        SACConfig.from_tuned("my_module:Drone")


def test_a_package_adds_entries_of_its_own(monkeypatch):
    monkeypatch.setattr("tfpolicies.algorithms.tuned_hyperparameters.TUNED", dict(TUNED))
    register_tuned("MINE", "Mine-v0", {"lr": 1.0}, source="my paper", steps=7, deviations=["none"])
    entry = require_tuned("MINE", "Mine-v0")
    assert (entry.settings, entry.steps, entry.deviations) == ({"lr": 1.0}, 7, ("none",))
    assert list(get_tuned_entries("MINE")) == [("MINE", "Mine-v0")]
    assert ("PPO", "HalfCheetah-v5") in get_tuned_entries(env="cheetah")


def test_train_says_which_settings_it_begins_with():
    tuned = TrainSettings(env="HalfCheetah-v4", algo="SAC")
    text = "hyperparams/sac.yml, for 1,000,000 steps; this run has 100,000."
    assert text in tuned.describe_tuned()
    assert tuned.make_config().num_steps_sampled_before_learning_starts == 10_000
    plain = TrainSettings(env="HalfCheetah-v4", algo="SAC", no_tuned=True)
    assert plain.describe_tuned() == "Settings: RLlib's defaults."
    assert plain.make_config().num_steps_sampled_before_learning_starts == 1500
    file = TrainSettings(env="HalfCheetah-v4", algo="SAC", from_file={"lr": 1e-3, "gamma": 0.9})
    start = "Settings: 2 settings of --config, the rest: tuned for SAC on HalfCheetah-v4 by RL"
    assert file.describe_tuned().startswith(start)
    file = TrainSettings(env="HalfCheetah-v4", algo="SAC", no_tuned=True, from_file={"lr": 1e-3})
    assert file.describe_tuned() == "Settings: 1 setting of --config, the rest: RLlib's defaults."
    without = TrainSettings(env="HalfCheetah-v3", algo="SAC")
    assert "none are tuned for SAC on HalfCheetah-v3 (nearest: SAC on" in without.describe_tuned()


def test_words_override_tuned_settings():
    settings = TrainSettings(env="Pendulum-v1", algo="SAC", lr=2e-3, set=("tau=0.5",))
    config = settings.make_config()
    assert (config.lr, config.tau, config.train_batch_size) == (2e-3, 0.5, 256)


def test_without_tuned_settings_each_step_of_a_replay_algorithm_has_an_update():
    configs = [
        TrainSettings(env="Acrobot-v1", algo=x, no_tuned=True).make_config() for x in ("DQN", "PPO")
    ]
    assert [config.num_envs_per_worker for config in configs] == [1, 8]


def test_the_page_shows_the_table():
    rows = [
        line for line in (DOCS / "tables" / "tuned.md").read_text().splitlines() if line[:2] == "| "
    ]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    algorithms = ("PPO", "A2C", "DQN", "SAC", "TD3", "DDPG")
    actual = {(algo, env): columns for algo, env, *columns in cells if algo in algorithms}
    assert actual == {
        (algo, f"`{env}`"): [
            f"{entry.steps:,}",
            "" if entry.threshold is None else f"{entry.threshold:,.1f}",
            "; ".join(entry.deviations),
        ]
        for (algo, env), entry in TUNED.items()
    }
