"""The training loop of TD3 and DDPG: replay, delays, checkpoints, the command line, learning."""

import numpy as np
import pytest

from helpers.continuous_actions import AimEnv
from helpers.factories import assert_equal
from tfpolicies import DDPG, TD3, Algorithm, DDPGConfig, TD3Config
from tfpolicies.__main__ import main

pytestmark = pytest.mark.usefixtures("kept_programs")


def aim(context):
    return AimEnv()


def tiny(config_class=TD3Config, **training):
    settings = {
        "actor_hiddens": [16],
        "critic_hiddens": [16],
        "train_batch_size": 8,
        "num_steps_sampled_before_learning_starts": 0,
        "replay_buffer_config": {"capacity": 64},
        "store_buffer_in_checkpoints": True,
        **training,
    }
    return (
        config_class()
        .environment(aim)
        .rollouts(num_envs_per_worker=2, rollout_fragment_length=6)
        .training(**settings)
        .framework(inference="tf", jit_compile=False)
        .exploration(exploration_config={"random_timesteps": 20})
        .reporting(min_sample_timesteps_per_iteration=0)
        .debugging(seed=4, log_level="ERROR")
    )


def learned(result):
    return result["info"]["learner"]["default_policy"]["learner_stats"]


def test_updates_of_a_training_step_run_in_one_call_and_the_actor_waits():
    algorithm = tiny(training_intensity=4).build()
    for _ in range(2):
        algorithm.train()
    buffer = algorithm.replay_buffer.buffers["default_policy"]
    columns = {"obs", "new_obs", "actions", "rewards", "terminateds", "weights"}
    assert set(buffer.sample(3)) == columns
    assert np.abs(buffer.sample(50)["actions"]).max() <= 1  # normalised
    policy = algorithm.get_policy()
    assert policy.num_grad_updates == 12  # 2 times 12 rows, times 4, by 8
    assert policy.program.functions.traces["learn_epochs"] == 1
    slots = policy.get_state()["_optimizer_variables"]
    assert (slots["optimizer/000_iteration"], slots["critic_optimizer/000_iteration"]) == (6, 12)


@pytest.mark.parametrize("config_class", [TD3Config, DDPGConfig])
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tmp_path, config_class):
    algorithm, restored = (
        tiny(config_class, training_intensity=2.5, n_step=2).build() for _ in range(2)
    )
    for _ in range(3):
        algorithm.train()
    algorithm.save(tmp_path)
    restored.restore(tmp_path)
    for _ in range(3):
        a, b = algorithm.train(), restored.train()
        assert learned(a) == learned(b)
        assert a["counters"] == b["counters"]
    one, other = (each.get_policy().get_state() for each in (algorithm, restored))
    for part in ("weights", "target_weights", "_optimizer_variables"):
        assert_equal(one[part], other[part])
    assert (one["rng"], one["learning_rng"]) == (other["rng"], other["learning_rng"])
    exploring = ("cur_scale", "last_timestep", "ou_state")
    for key in set(exploring) & one["_exploration_state"].keys():
        np.testing.assert_array_equal(*(x["_exploration_state"][key] for x in (one, other)))
    assert one["num_grad_updates"] > 10


@pytest.mark.parametrize(("config_class", "kind"), [(TD3Config, TD3), (DDPGConfig, DDPG)])
def test_a_whole_algorithm_comes_back_from_a_folder(tmp_path, config_class, kind):
    algorithm = tiny(config_class, tau=0.5).build()
    algorithm.train()
    algorithm.save(tmp_path)
    restored = Algorithm.from_checkpoint(tmp_path, config={"env": aim})
    assert type(restored) is kind
    assert (restored.config.tau, len(restored.replay_buffer)) == (0.5, 12)


def test_the_command_line_trains_it_by_name(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    sets = {
        "jit_compile": "False",
        "inference": "tf",
        "actor_hiddens": "[8]",
        "critic_hiddens": "[8]",
        "num_steps_sampled_before_learning_starts": "100",
    }
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    assert main(["train", "Pendulum-v1", "--algo", "TD3", "--steps", "400", *words]) == 0
    assert "TD3 on Pendulum-v1" in capfd.readouterr().out


@pytest.mark.soak
@pytest.mark.parametrize("config_class", [TD3Config, DDPGConfig])
def test_it_learns_to_aim(config_class):
    config = tiny(
        config_class,
        train_batch_size=64,
        training_intensity=64,
        tau=0.05,
        replay_buffer_config={"capacity": 5000},
    )
    config.rollouts(num_envs_per_worker=4)
    config.exploration(exploration_config={"random_timesteps": 300})
    config.evaluation(evaluation_duration=50)
    algorithm = config.build()
    for _ in range(60):
        algorithm.train()
    obs = np.linspace(-0.9, 0.9, 7, dtype=np.float32)[:, None]
    actions = 2 * algorithm.get_policy().compute_actions(obs, explore=False).actions
    assert np.abs(actions - obs).mean() < 0.25  # a policy that is always 0 misses by 0.51
    assert algorithm.evaluate()["evaluation"]["episode_reward_mean"] > -0.25


@pytest.mark.soak
def test_graph_mode_learns_the_same():
    other = tiny().framework("tf", inference="auto", jit_compile="auto")
    one, result = (learned(config.build().train()) for config in (tiny(), other))
    assert result == pytest.approx(one, rel=1e-4, abs=1e-5)
