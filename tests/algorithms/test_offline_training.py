"""Algorithms that learn from recorded experience: checkpoints, filters, and going online."""

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.checkpoints import edit_manifest
from helpers.short_envs import ShortEnv
from helpers.workers import assert_equal_weights, make_config
from tfpolicies import BC, DQN, BCConfig, DQNConfig, MARWILConfig
from tfpolicies.errors import ConfigError, NonFiniteError, UsageError
from tfpolicies.offline import ExperienceReader
from tfpolicies.offline.parquet_writer import write_table

pytestmark = pytest.mark.usefixtures("kept_programs")

SPACES = {
    "observation_space": spaces.Box(-9.0, 9.0, (1,), np.float32),
    "action_space": spaces.Discrete(2),
}


def make_log(rows=60, scale=1.0):
    """Makes steps of a rule: action 1 where the observation is positive."""
    obs = scale * np.random.default_rng(0).standard_normal((rows, 1)).astype(np.float32)
    return {
        "obs": obs,
        "actions": (obs[:, 0] > 0).astype(np.int64),
        "rewards": np.ones(rows, np.float32),
        "terminateds": np.arange(rows) % 10 == 9,
        "eps_id": np.arange(rows) // 10,
    }


def build(config_class=BCConfig, log=None, **settings):
    settings = {**SPACES, "train_batch_size": 20, "lr": 0.01, **settings}
    data = make_log() if log is None else log
    return make_config(None, config_class, input_=data, **settings).build()


@pytest.fixture
def path(tmp_path):
    write_table(
        tmp_path / "log.parquet", make_log(), (SPACES["observation_space"], spaces.Discrete(2))
    )
    return str(tmp_path / "log.parquet")


@pytest.mark.core
def test_bc_learns_the_rule_from_a_file_without_an_environment(path):
    algorithm = make_config(None, BCConfig, input_=path, train_batch_size=30, lr=0.05).build()
    for _ in range(60):
        result = algorithm.train()
    assert algorithm.get_policy().observation_space == SPACES["observation_space"]
    assert np.isnan(result["episode_reward_mean"])
    assert result["num_env_steps_sampled"] == 1800
    actions = algorithm.compute_actions(
        {i: np.array([x], np.float32) for i, x in enumerate((-1, 1))}
    )
    assert actions == {0: 0, 1: 1}


@pytest.mark.parametrize(
    "config_class", [BCConfig, MARWILConfig, DQNConfig], ids=lambda x: x.__name__
)
def test_a_run_continues_with_the_same_weights(config_class, path, tmp_path):
    settings = {"shuffle_buffer_size": 2, "input_": path, "train_batch_size": 7, **SPACES}
    if config_class is DQNConfig:
        settings |= {"num_steps_sampled_before_learning_starts": 20}
        settings |= {"store_buffer_in_checkpoints": True, "min_sample_timesteps_per_iteration": 14}
    first = make_config(None, config_class, **settings).build()
    for _ in range(4):
        first.train()
    checkpoint = first.save(tmp_path / "checkpoint").checkpoint.path
    second = make_config(None, config_class, **settings).build()
    second.restore(checkpoint)
    for _ in range(6):
        first.train()
        second.train()
    assert_equal_weights(first, second)


def test_filters_are_fitted_to_the_data_once():
    log = make_log(scale=5.0)
    algorithm = build(log=log, observation_filter="MeanStdFilter")
    for _ in range(3):
        algorithm.train()
    (statistic,) = algorithm.get_policy().driver.filters["filter"].statistics
    assert statistic.count == 60
    np.testing.assert_allclose(statistic.mean, log["obs"].mean(axis=0), rtol=1e-5)


def test_returns_are_not_scaled_by_running_returns():
    algorithm = build(MARWILConfig, reward_filter="ReturnStdFilter")
    with pytest.raises(
        ConfigError, match=r"reward_filter='ReturnStdFilter' needs running episodes"
    ):
        algorithm.train()


def test_data_in_memory_are_asked_for_when_training_continues(tmp_path):
    algorithm = build()
    algorithm.train()
    checkpoint = algorithm.save(tmp_path / "checkpoint").checkpoint.path
    manifest = json.loads((tmp_path / "checkpoint" / "algorithm.json").read_text())
    assert manifest["config"]["settings"]["input_"] == {
        "$unavailable": "tfpolicies.offline.memory_data:ArrayData"
    }
    restored = BC.from_checkpoint(checkpoint, config={"input_": make_log()})
    restored.train()
    assert_equal_weights(algorithm, BC.from_checkpoint(checkpoint))


class Planted(ExperienceReader):
    count = 0

    def __init__(self, io_context):
        Planted.count += 1

    def next(self):
        return make_log()


def test_a_checkpoint_chooses_neither_readers_nor_outputs_nor_trust(path, tmp_path):
    algorithm = build(log=path, input_config={"trusted": True})
    algorithm.train()
    folder = tmp_path / "checkpoint"
    checkpoint = algorithm.save(folder).checkpoint.path
    assert BC.from_checkpoint(checkpoint).config.input_config == {"trusted": False}
    with edit_manifest(folder / "algorithm.json") as manifest:
        manifest["config"]["settings"]["output"] = str(tmp_path / "elsewhere")
        manifest["config"]["settings"]["input_"] = f"{__name__}.Planted"
    restored = BC.from_checkpoint(checkpoint)
    assert restored.config.input_config == {}
    assert restored.compute_single_action(np.zeros(1, np.float32)) in (0, 1)
    with pytest.raises(ConfigError, match=r"saved with input_=.*Planted.*from_checkpoint\(path"):
        restored.train()
    assert Planted.count == 0
    assert not (tmp_path / "elsewhere").exists()
    named = BC.from_checkpoint(checkpoint, config={"input_": Planted, "output": None})
    named.train()
    assert Planted.count == 1


def test_a_run_from_data_goes_online(tmp_path):
    settings = {"num_steps_sampled_before_learning_starts": 10, "train_batch_size": 10}
    settings |= {"min_sample_timesteps_per_iteration": 20, "input_": make_log()}
    offline = make_config(ShortEnv, DQNConfig, **settings).build()
    offline.train()
    checkpoint = offline.save(tmp_path / "checkpoint").checkpoint.path
    changes = {"input_": "sampler", "env": ShortEnv}
    online = DQN.from_checkpoint(checkpoint, config=changes)
    assert_equal_weights(offline, online)
    assert online.train()["episode_reward_mean"] == 4.0
    online.stop()


def test_an_environment_is_only_made_to_evaluate():
    settings = {"evaluation_interval": 2, "evaluation_duration": 2, "input_": make_log()}
    algorithm = make_config(ShortEnv, BCConfig, train_batch_size=20, **settings, **SPACES).build()
    assert algorithm.worker.env is None
    assert "evaluation" not in algorithm.train()
    assert algorithm.train()["evaluation"]["episode_reward_mean"] == 4.0
    algorithm.stop()


def test_without_an_environment_nothing_is_evaluated():
    with pytest.raises(ConfigError, match="evaluation_interval=1 needs an environment"):
        build(evaluation_interval=1)
    with pytest.raises(UsageError, match="There is no environment to evaluate in"):
        build().evaluate()


def test_a_reader_of_rows_that_are_not_finite_does_not_change_the_policy():
    class Broken(ExperienceReader):
        def __init__(self, io_context):
            assert io_context.worker_index == 0

        def next(self):
            return {**make_log(), "obs": np.full((60, 1), np.nan, np.float32)}

    algorithm = make_config(None, BCConfig, input_=Broken, **SPACES).build()
    before = algorithm.get_weights()
    with pytest.raises(NonFiniteError):
        algorithm.train()
    assert str(algorithm.get_weights()) == str(before)


def test_actions_of_boxes_are_normalised_unless_they_are_already():
    box = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 8.0], np.float32))
    log = {**make_log(4), "actions": np.array([[-1, 0], [0, 4], [1, 8], [2, 10]], np.float32)}
    settings = {"action_space": box, "train_batch_size": 4, "shuffle_buffer_size": 0}
    for changes, expected in (
        ({}, [[-1, -1], [0, 0], [1, 1], [2, 1.5]]),
        ({"actions_in_input_normalized": True}, log["actions"].tolist()),
        ({"normalize_actions": False}, log["actions"].tolist()),
        ({"normalize_actions": False, "clip_actions": True}, [[-1, 0], [0, 4], [1, 8], [1, 8]]),
    ):
        algorithm = build(BCConfig, log, **settings, **changes)
        assert algorithm.worker.sample()["actions"].tolist() == expected
        algorithm.stop()


def test_images_and_masks_are_read_as_they_were_recorded(tmp_path):
    space = spaces.Dict(
        observations=spaces.Box(0, 255, (4, 4, 3), np.uint8), action_mask=spaces.MultiBinary(3)
    )
    images = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), np.uint8)
    masks = np.tile(np.array([[1, 1, 0], [1, 0, 1]], np.int8), (4, 1))
    columns = {"obs": {"observations": images, "action_mask": masks}, "actions": np.zeros(8, int)}
    write_table(tmp_path / "log.parquet", columns, (space, spaces.Discrete(3)))
    config = make_config(None, BCConfig, input_=str(tmp_path / "log.parquet"), train_batch_size=8)
    algorithm = config.offline_data(shuffle_buffer_size=0).build()
    batch = algorithm.worker.sample()
    assert batch["obs"]["observations"].tolist() == images.tolist()
    assert batch["obs"]["action_mask"].tolist() == masks.tolist()
    assert np.isfinite(
        algorithm.train()["info"]["learner"]["default_policy"]["learner_stats"]["policy_loss"]
    )
    assert isinstance(algorithm.get_policy().observation_space, gym.spaces.Dict)
