"""The training loop of SAC: replay, targets, checkpoints, being killed, beside another policy."""

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
from tfpolicies import SAC, Algorithm, MultiAgentEnv, PolicySpec, PPOTF2Policy, SACConfig
from tfpolicies.program.policy_state import PolicyState


class PairEnv(MultiAgentEnv):
    """Two agents in `AimEnv`s of their own, one that gives vectors and one that picks a side."""

    _agent_ids = ("left", "right")
    observation_space = AimEnv.observation_space
    action_space = spaces.Dict(left=AimEnv.action_space, right=spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.seen(), {}

    def seen(self):
        return {agent: np.array([0.1 * self.now], np.float32) for agent in self._agent_ids}

    def step(self, actions):
        self.now += 1
        assert actions["left"].shape == (1,)
        assert actions["right"] in (0, 1)
        done = self.now == 5
        rewards = dict.fromkeys(self._agent_ids, 1.0)
        return self.seen(), rewards, {"__all__": done}, {"__all__": False}, {}


def aim(context):
    return AimEnv()


def tiny(env=aim, **training):
    settings = {
        "model": {"fcnet_hiddens": [16]},
        "q_model_config": {"fcnet_hiddens": [16]},
        "train_batch_size": 8,
        "num_steps_sampled_before_learning_starts": 0,
        "replay_buffer_config": {"capacity": 64},
        "store_buffer_in_checkpoints": True,
        **training,
    }
    return (
        SACConfig()
        .environment(env)
        .rollouts(num_envs_per_worker=2, rollout_fragment_length=6)
        .training(**settings)
        .framework(inference="tf", jit_compile=False)
        .reporting(min_time_s_per_iteration=None, min_sample_timesteps_per_iteration=0)
        .debugging(seed=4, log_level="ERROR")
    )


def learned(result):
    return result["info"]["learner"]["default_policy"]["learner_stats"]


def assert_same_states(one, other):
    for part in ("weights", "target_weights", "_optimizer_variables"):
        for key, value in one[part].items():
            np.testing.assert_array_equal(other[part][key], value, err_msg=key)
    assert (one["rng"], one["learning_rng"]) == (other["rng"], other["learning_rng"])


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_thousand_steps_that_act_and_learn_read_nothing_back(inference, monkeypatch):
    read, bring_back = [], PolicyState._load_segments

    def counted(state):
        read.append(state)
        return bring_back(state)

    monkeypatch.setattr(PolicyState, "_load_segments", counted)
    config = tiny().rollouts(num_envs_per_worker=1, rollout_fragment_length=1)
    config.framework(inference=inference).reporting(min_sample_timesteps_per_iteration=1000)
    algorithm = config.build()
    read.clear()
    algorithm.train()
    policy = algorithm.get_policy()
    assert policy.num_grad_updates == 1000
    assert not read

    obs = np.zeros((1, 1), np.float32)
    acted = policy.compute_actions(obs, explore=False).extras["action_dist_inputs"]
    stored, fresh = policy.get_state(), tiny().framework(inference=inference).build().get_policy()
    assert read
    fresh.set_state(stored)
    again = fresh.compute_actions(obs, explore=False).extras["action_dist_inputs"]
    np.testing.assert_array_equal(again, acted)
    algorithm.stop()


def test_the_buffer_keeps_what_the_loss_reads_and_updates_run_in_one_call():
    algorithm = tiny(training_intensity=4).build()
    result = algorithm.train()
    buffer = algorithm.replay_buffer.buffers["default_policy"]
    columns = {"obs", "new_obs", "actions", "rewards", "terminateds", "weights"}
    assert set(buffer.sample(3)) == columns
    assert (
        np.abs(buffer.sample(50)["actions"]).max() <= 1
    )  # normalised; the environment's are wider
    policy = algorithm.get_policy()
    assert policy.num_grad_updates == 6  # 12 rows, times 4, by 8
    assert policy.program.functions.traces["learn_epochs"] == 1
    assert result["num_target_updates"] == 6  # behind each update


@pytest.mark.soak
def test_it_learns_to_aim():
    config = tiny(
        lr=0.01,
        train_batch_size=64,
        training_intensity=64,
        target_entropy=-3.0,
        initial_alpha=0.1,
        replay_buffer_config={"capacity": 5000},
    )
    config.rollouts(num_envs_per_worker=4)
    algorithm = config.evaluation(
        evaluation_duration=50, evaluation_config={"explore": False}
    ).build()
    for _ in range(40):
        algorithm.train()
    obs = np.linspace(-0.9, 0.9, 7, dtype=np.float32)[:, None]
    policy = algorithm.get_policy()
    actions = 2 * policy.compute_actions(obs, explore=False).actions
    assert np.abs(actions - obs).mean() < 0.25  # a policy that is always 0 misses by 0.51
    assert algorithm.evaluate()["evaluation"]["episode_reward_mean"] > -0.25


@pytest.mark.core
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tmp_path):
    algorithm = tiny(training_intensity=2.5, n_step=2).build()
    for _ in range(3):
        algorithm.train()
    algorithm.save(tmp_path)
    restored = tiny(training_intensity=2.5, n_step=2).build()
    restored.restore(tmp_path)
    for _ in range(3):
        a, b = algorithm.train(), restored.train()
        assert learned(a) == learned(b)
        assert a["counters"] == b["counters"]
    states = [each.get_policy().get_state() for each in (algorithm, restored)]
    assert_same_states(*states)
    assert states[0]["num_grad_updates"] > 10


KILLED = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from algorithms.test_sac_training import tiny
    algorithm = tiny().build()
    for _ in range(3):
        algorithm.train()
    algorithm.save({folder!r})
    for _ in range(2):
        algorithm.train()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_a_run_that_was_killed_goes_on_as_if_it_had_not(tmp_path):
    paths = [str(Path(__file__).parents[1])]
    script = textwrap.dedent(KILLED).format(paths=paths, folder=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    whole, resumed = tiny().build(), tiny().build()
    resumed.restore(tmp_path)
    for _ in range(3):
        whole.train()
    for _ in range(3):
        assert learned(whole.train()) == learned(resumed.train())
    assert_same_states(whole.get_policy().get_state(), resumed.get_policy().get_state())


def test_a_whole_algorithm_comes_back_from_a_folder(tmp_path):
    algorithm = tiny(optimization_config={"actor_learning_rate": 1e-3}).build()
    algorithm.train()
    algorithm.save(tmp_path)
    restored = Algorithm.from_checkpoint(tmp_path, config={"env": aim})
    assert isinstance(restored, SAC)
    assert restored.config.optimization["actor_learning_rate"] == 1e-3
    assert len(restored.replay_buffer) == 12
    assert_same_states(algorithm.get_policy().get_state(), restored.get_policy().get_state())


def test_another_policy_may_act_beside_it():
    config = tiny(lambda context: PairEnv())
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
    for _ in range(2):
        result = algorithm.train()
    assert set(result["info"]["learner"]) == {"aims"}
    assert algorithm.get_policy("aims").num_grad_updates == 2
    for key, value in algorithm.get_policy("sides").get_weights().items():
        np.testing.assert_array_equal(before[key], value)


@pytest.mark.soak
def test_graph_mode_learns_the_same():
    results = [
        config.build().train()
        for config in (tiny(), tiny().framework("tf", inference="auto", jit_compile="auto"))
    ]
    one, other = map(learned, results)
    for name, value in one.items():
        assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


class TwoChoicesEnv(SeededEnv):
    action_space = spaces.MultiDiscrete([2, 2])


def test_an_environment_of_other_actions_is_named():
    with pytest.raises(ValueError, match="one-dimensional Boxes of floats"):
        tiny(lambda context: TwoChoicesEnv()).build()


@pytest.mark.parametrize("steps", [600, 2500])
def test_a_seed_fixes_how_many_steps_a_run_has_and_it_ends_where_it_is_to(steps):
    """A training step has 2 environments x 6 steps; 600 and 2500 are rounded up to one."""
    runs = []
    for _ in range(2):
        algorithm = tiny().reporting(min_sample_timesteps_per_iteration=1000).build()
        learned = algorithm.learn(steps, progress=False)
        runs.append((algorithm.counters["num_env_steps_sampled"], algorithm.iteration))
        assert learned.ended_by == "steps"
    assert runs == [(600, 1) if steps == 600 else (2508, 3)] * 2
    assert algorithm.train()["num_env_steps_sampled_this_iter"] == 1008  # as before
