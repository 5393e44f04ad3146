"""Training of SAC, TD3, DDPG and DQN: replay, targets, checkpoints, kills, learning."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from helpers.continuous_actions import AimEnv
from helpers.environments import SeededEnv
from helpers.marks import telling
from helpers.off_policy import (
    RAINBOW,
    aim,
    assert_equal_runs,
    assert_equal_states,
    get_stats,
    make_config,
    saved_counting,
    train,
    two_arms,
)
from tfpolicies import (
    DDPG,
    SAC,
    TD3,
    Algorithm,
    DDPGConfig,
    DQNConfig,
    MultiAgentEnv,
    PolicySpec,
    PPOTF2Policy,
    SACConfig,
    TD3Config,
)
from tfpolicies.__main__ import main
from tfpolicies.program.policy_state import PolicyState

pytestmark = pytest.mark.usefixtures("kept_programs")

PRIORITIZED = {"type": "MultiAgentPrioritizedReplayBuffer", "capacity": 64}
WIDE_SAC = {"model": {"fcnet_hiddens": [16]}, "q_model_config": {"fcnet_hiddens": [16]}}


class PairEnv(MultiAgentEnv):
    """Two agents, of which one acts by vectors as in `AimEnv`, and one picks a side."""

    _agent_ids = ("left", "right")
    observation_space = AimEnv.observation_space
    action_space = spaces.Dict(left=AimEnv.action_space, right=spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.observe(), {}

    def observe(self):
        return {agent: np.array([0.1 * self.now], np.float32) for agent in self._agent_ids}

    def step(self, actions):
        self.now += 1
        assert actions["left"].shape == (1,)
        assert actions["right"] in (0, 1)
        done = self.now == 5
        rewards = dict.fromkeys(self._agent_ids, 1.0)
        return self.observe(), rewards, {"__all__": done}, {"__all__": False}, {}


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_thousand_steps_that_act_and_learn_read_nothing_back(inference, monkeypatch):
    loads, load_segments = [], PolicyState._load_segments

    def count(state):
        loads.append(state)
        return load_segments(state)

    monkeypatch.setattr(PolicyState, "_load_segments", count)
    config = make_config(aim, SACConfig, envs=1, fragment=1).framework(inference=inference)
    algorithm = config.reporting(min_sample_timesteps_per_iteration=1000).build()
    loads.clear()
    algorithm.train()
    policy = algorithm.get_policy()
    assert policy.num_grad_updates == 1000
    assert not loads

    obs = np.zeros((1, 1), np.float32)
    expected = policy.compute_actions(obs, explore=False).extras["action_dist_inputs"]
    state = policy.get_state()
    assert loads
    fresh = make_config(aim, SACConfig).framework(inference=inference).build().get_policy()
    fresh.set_state(state)
    actual = fresh.compute_actions(obs, explore=False).extras["action_dist_inputs"]
    np.testing.assert_array_equal(actual, expected)
    algorithm.stop()


@pytest.mark.core
@pytest.mark.parametrize(
    ("config_class", "env"), [(DQNConfig, saved_counting), (SACConfig, aim), (TD3Config, aim)]
)
def test_the_buffer_keeps_the_losss_columns_and_updates_run_in_one_call(config_class, env):
    config = make_config(env, config_class, training_intensity=4, train_batch_size=8)
    config.training(replay_buffer_config={"type": "MultiAgentReplayBuffer", "capacity": 16})
    algorithm = config.build()
    *_, result = train(algorithm, 2)
    buffer = algorithm.replay_buffer.buffers["default_policy"]
    assert (len(buffer), buffer.num_added) == (16, 24)
    batch = buffer.sample(50)
    assert set(batch) == {"obs", "new_obs", "actions", "rewards", "terminateds", "weights"}
    if config_class is not DQNConfig:  # normalised; the environment's are wider
        assert np.abs(batch["actions"]).max() <= 1
    policy = algorithm.get_policy()
    assert policy.num_grad_updates == 12  # 2 times 12 rows, times 4, by 8
    assert policy.program.functions.traces["learn_epochs"] == 1
    if config_class is SACConfig:
        assert result["num_target_updates"] == 12  # after each update
    if config_class is TD3Config:
        slots = policy.get_state()["_optimizer_variables"]
        steps = [slots[f"{name}/000_iteration"] for name in ("optimizer", "critic_optimizer")]
        assert steps == [6, 12]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("config_class", "iterations", "settings"),
    [
        (SACConfig, 40, {"target_entropy": -3.0, "initial_alpha": 0.1, "lr": 0.01, **WIDE_SAC}),
        (TD3Config, 60, {"tau": 0.05, "actor_hiddens": [16], "critic_hiddens": [16]}),
        (DDPGConfig, 60, {"tau": 0.05, "actor_hiddens": [16], "critic_hiddens": [16]}),
    ],
)
def test_it_learns_to_aim(config_class, iterations, settings):
    settings = {"replay_buffer_config": {"capacity": 5000}, "train_batch_size": 64, **settings}
    config = make_config(aim, config_class, envs=4, training_intensity=64, **settings)
    if config_class is not SACConfig:
        config.exploration(exploration_config={"random_timesteps": 300})
    config.evaluation(evaluation_duration=50, evaluation_config={"explore": False})
    algorithm = config.build()
    train(algorithm, iterations)
    obs = np.linspace(-0.9, 0.9, 7, dtype=np.float32)[:, None]
    actions = 2 * algorithm.get_policy().compute_actions(obs, explore=False).actions
    assert np.abs(actions - obs).mean() < 0.25  # a policy that is always 0 misses by 0.51
    assert algorithm.evaluate()["evaluation"]["episode_reward_mean"] > -0.25


@pytest.mark.soak
def test_sac_learns_which_arm_is_better():
    config = make_config(
        two_arms,
        SACConfig,
        envs=4,
        fragment=4,
        lr=0.01,
        train_batch_size=32,
        training_intensity=32,
        target_entropy=0.1,
        replay_buffer_config={"capacity": 5000},
        **WIDE_SAC,
    )
    config.reporting(min_sample_timesteps_per_iteration=1000)
    assert train(config.build(), 20)[-1]["episode_reward_mean"] > 0.8


@pytest.mark.soak
@pytest.mark.parametrize(
    ("parts", "exploration"),
    [
        ({"num_atoms": 51, "v_min": 0.0, "v_max": 100.0}, {"epsilon_timesteps": 3000}),
        ({"noisy": True}, {"type": "EpsilonGreedy", "epsilon_schedule": 0.0}),
    ],
    ids=["atoms", "noisy"],
)
def test_dqn_with_a_part_of_rainbow_learns_to_balance_a_pole(parts, exploration):
    config = DQNConfig().environment("CartPole-v1")
    config.rollouts(num_envs_per_worker=4, rollout_fragment_length=16)
    config.training(
        lr=1e-3,
        train_batch_size=64,
        training_intensity=16,
        model={"fcnet_hiddens": [64]},
        hiddens=[64],
        target_network_update_freq=200,
        **parts,
    )
    config.exploration(exploration_config=exploration).debugging(seed=0, log_level="ERROR")
    config.evaluation(evaluation_duration=20, evaluation_config={"explore": False})
    algorithm = config.build()
    while algorithm.counters["num_env_steps_sampled"] < 16_000:
        algorithm.train()
    assert algorithm.evaluate()["evaluation"]["episode_reward_mean"] > 100


@pytest.mark.soak
@pytest.mark.parametrize("config_class", [SACConfig, TD3Config])
def test_graph_mode_learns_the_same(config_class):
    other = make_config(aim, config_class).framework("tf", inference="auto", jit_compile="auto")
    configs = (make_config(aim, config_class), other)
    one, result = (get_stats(train(config.build(), 1)[0]) for config in configs)
    assert result == pytest.approx(one, rel=1e-4, abs=1e-5)


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_class", "env", "settings"),
    [
        *telling(
            [(DQNConfig, saved_counting, {"target_network_update_freq": 24}), (SACConfig, aim, {})],
            (DQNConfig, saved_counting, {"target_network_update_freq": 24}),
            (SACConfig, aim, {}),
        ),
        (DQNConfig, saved_counting, {"replay_buffer_config": PRIORITIZED}),
        (DQNConfig, saved_counting, {"replay_buffer_config": PRIORITIZED, **RAINBOW}),
        (SACConfig, aim, {"replay_buffer_config": PRIORITIZED}),
        (TD3Config, aim, {}),
        (DDPGConfig, aim, {"replay_buffer_config": PRIORITIZED}),
    ],
)
def test_a_run_resumes_from_its_checkpoint_bit_for_bit(config_class, env, settings, tmp_path):
    settings = {"training_intensity": 0.5, "n_step": 3, **settings}
    algorithm, restored = (make_config(env, config_class, **settings).build() for _ in range(2))
    train(algorithm, 3)
    if config_class is DQNConfig:
        assert algorithm.get_extra_state()["updates_owed"] == 0.25  # of 34 rows; two wait
    algorithm.save(tmp_path)
    restored.restore(tmp_path)
    if "replay_buffer_config" in settings:
        states = [x.replay_buffer.get_state()["buffers"] for x in (algorithm, restored)]
        masses = [state["default_policy"]["priorities"]["masses"] for state in states]
        np.testing.assert_array_equal(*masses)
    assert_equal_runs(algorithm, restored, 4)


KILLED = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from helpers.off_policy import aim, make_config, train
    from tfpolicies import SACConfig
    algorithm = make_config(aim, SACConfig).build()
    train(algorithm, 3)
    algorithm.save({folder!r})
    train(algorithm, 2)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_a_run_that_was_killed_resumes_as_if_it_had_not_been(tmp_path):
    paths = [str(Path(__file__).parents[1])]
    script = textwrap.dedent(KILLED).format(paths=paths, folder=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    whole, resumed = (make_config(aim, SACConfig).build() for _ in range(2))
    resumed.restore(tmp_path)
    train(whole, 3)
    assert_equal_runs(whole, resumed)


@pytest.mark.parametrize(
    ("config_class", "algorithm_class", "settings"),
    [
        (SACConfig, SAC, {"optimization_config": {"actor_learning_rate": 1e-3}}),
        (TD3Config, TD3, {}),
        (DDPGConfig, DDPG, {}),
    ],
)
def test_an_algorithm_is_restored_from_a_folder(config_class, algorithm_class, settings, tmp_path):
    algorithm = make_config(aim, config_class, tau=0.5, **settings).build()
    algorithm.train()
    algorithm.save(tmp_path)
    restored = Algorithm.from_checkpoint(tmp_path, config={"env": aim})
    assert type(restored) is algorithm_class
    assert (restored.config.tau, len(restored.replay_buffer)) == (0.5, 12)
    if settings:
        assert restored.config.optimization["actor_learning_rate"] == 1e-3
    assert_equal_states(*(x.get_policy().get_state() for x in (algorithm, restored)))


# -- runs -----------------------------------------------------------------------------------------


def test_another_policy_may_act_beside_it():
    config = make_config(lambda context: PairEnv(), SACConfig, train_batch_size=8)
    config.multi_agent(
        policies={
            "aims": PolicySpec(None, AimEnv.observation_space, AimEnv.action_space),
            "sides": PolicySpec(PPOTF2Policy, AimEnv.observation_space, spaces.Discrete(2)),
        },
        policy_mapping_fn=lambda agent, *args, **kwargs: "aims" if agent == "left" else "sides",
        policies_to_train=["aims"],
    )
    algorithm = config.build()
    before = algorithm.get_policy("sides").get_weights()
    *_, result = train(algorithm, 2)
    assert set(result["info"]["learner"]) == {"aims"}
    assert algorithm.get_policy("aims").num_grad_updates == 2
    for key, value in algorithm.get_policy("sides").get_weights().items():
        np.testing.assert_array_equal(before[key], value)


class TwoChoicesEnv(SeededEnv):
    action_space = spaces.MultiDiscrete([2, 2])


def test_an_environment_with_unsupported_actions_is_named():
    with pytest.raises(ValueError, match="one-dimensional Boxes of floats"):
        make_config(lambda context: TwoChoicesEnv(), SACConfig).build()


@pytest.mark.parametrize(("steps", "expected"), [(600, (600, 1)), (2500, (2508, 3))])
def test_a_seed_fixes_how_many_steps_a_run_has_and_where_it_ends(steps, expected):
    """A training step has 2 environments x 6 steps; 600 and 2500 are rounded up to one."""
    runs = []
    for _ in range(2):
        config = make_config(aim, SACConfig, train_batch_size=8)
        algorithm = config.reporting(min_sample_timesteps_per_iteration=1000).build()
        assert algorithm.learn(steps, progress=False).ended_by == "steps"
        runs.append((algorithm.counters["num_env_steps_sampled"], algorithm.iteration))
    assert runs == [expected] * 2
    assert algorithm.train()["num_env_steps_sampled_this_iter"] == 1008  # as before


def test_the_command_line_trains_it_by_name(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    settings = {
        "jit_compile": "False",
        "inference": "tf",
        "actor_hiddens": "[8]",
        "critic_hiddens": "[8]",
        "num_steps_sampled_before_learning_starts": "100",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    assert main(["train", "Pendulum-v1", "--algo", "TD3", "--steps", "400", *words]) == 0
    assert "TD3 on Pendulum-v1" in capfd.readouterr().out
