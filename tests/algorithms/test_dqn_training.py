"""DQN's training: replayed transitions, updates owed, target updates, learning, checkpoints."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import assert_equal
from helpers.off_policy import get_stats, make_config, saved_counting, train, two_arms
from tfpolicies import DQN, Algorithm, DQNConfig, Policy, PolicySpec
from tfpolicies.errors import CheckpointError
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.program.policy_state import PolicyState

pytestmark = pytest.mark.usefixtures("kept_programs")


# -- replay ---------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_custom_policy_learns_from_replayed_rows():
    class Custom(Policy):
        sizes, targets = [], 0

        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})

        def learn_on_batch(self, samples):
            assert {"obs", "new_obs", "actions", "rewards", "terminateds"} <= set(samples)
            self.sizes.append(samples.count)
            return {"learner_stats": {"loss": 1.5}}

        def update_target(self):
            type(self).targets += 1

    config = make_config(saved_counting, target_network_update_freq=24, training_intensity=1.0)
    config.multi_agent(policies={"default_policy": PolicySpec(Custom)})
    algorithm = config.build()
    *_, result = train(algorithm, 4)
    assert Custom.sizes == [4] * 12
    assert Custom.targets == 2
    assert get_stats(result) == {"loss": 1.5}
    assert result["num_agent_steps_trained"] == 48
    algorithm.stop()


@pytest.mark.core
def test_learning_starts_with_enough_rows():
    algorithm = make_config(saved_counting, num_steps_sampled_before_learning_starts=25).build()
    results = train(algorithm, 4)
    assert [result["num_env_steps_trained"] for result in results] == [0, 0, 4, 8]
    assert "default_policy" not in results[1]["info"]["learner"]
    assert set(get_stats(results[2])) >= {"mean_q", "mean_td_error", "cur_lr"}


@pytest.mark.parametrize(("intensity", "updates"), [(None, 5), (1, 15), (0.5, 7), (4, 60)])
def test_the_intensity_is_rows_trained_per_row_sampled(intensity, updates):
    algorithm = make_config(saved_counting, training_intensity=intensity).build()
    *_, result = train(algorithm, 5)  # of 12 rows each; an update takes 4
    assert algorithm.get_policy().num_grad_updates == updates
    assert result["num_env_steps_trained"] == 4 * updates
    assert algorithm.get_policy().program.functions.traces["learn_epochs"] == 1


@pytest.mark.core
def test_the_target_is_updated_by_environment_steps():
    algorithm = make_config(saved_counting, target_network_update_freq=24, lr=0.1).build()
    are_equal = []
    for _ in range(5):
        result = algorithm.train()
        state = algorithm.get_policy().get_state()
        pairs = zip(state["weights"].values(), state["target_weights"].values(), strict=True)
        are_equal.append(all((a == b).all() for a, b in pairs))
    assert are_equal == [False, True, False, True, False]
    assert (result["num_target_updates"], result["last_target_update_ts"]) == (2, 48)


def test_the_target_moves_inside_the_compiled_call(monkeypatch):
    algorithm = make_config(saved_counting, target_network_update_freq=0, lr=0.1, tau=0.5).build()
    before = algorithm.get_policy().get_state()["target_weights"]
    monkeypatch.setattr(PolicyState, "update_targets", None)  # what `update_target` would call
    *_, result = train(algorithm, 2)
    assert result["num_target_updates"] == 2
    after = algorithm.get_policy().get_state()["target_weights"]
    assert any((before[key] != after[key]).any() for key in before)


def test_epsilon_follows_the_environment_steps():
    config = make_config(saved_counting)
    config.exploration(exploration_config={"final_epsilon": 0.0, "epsilon_timesteps": 48})
    algorithm = config.build()
    epsilons = []
    for _ in range(5):
        algorithm.train()
        policy = algorithm.get_policy()
        epsilons.append(float(policy.exploration.get_params(policy.global_timestep, True)[0]))
    np.testing.assert_allclose(epsilons, [0.75, 0.5, 0.25, 0, 0], atol=1e-6)


def test_rows_too_large_for_one_call_are_learned_in_several(monkeypatch):
    monkeypatch.setattr("tfpolicies.algorithms.off_policy._MAX_BYTES_PER_CALL", 600)
    algorithm = make_config(saved_counting, training_intensity=4).build()
    assert algorithm.train()["num_env_steps_trained"] == 48
    assert algorithm.get_policy().num_grad_updates == 12


# -- learning -------------------------------------------------------------------------------------


class CorridorEnv(gym.Env):
    """Five cells in a row; only going right through all of them pays, and only at the end."""

    observation_space = spaces.Box(0.0, 1.0, (5,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = self.now = 0
        return np.eye(5, dtype=np.float32)[0], {}

    def step(self, action):
        self.now += 1
        self.cell = max(0, self.cell + (1 if action else -1))
        done = self.cell == 4
        return np.eye(5, dtype=np.float32)[self.cell], float(done), done, self.now == 20, {}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("MultiAgentReplayBuffer", marks=pytest.mark.core),
        "MultiAgentPrioritizedReplayBuffer",
    ],
)
def test_it_learns_the_values_of_a_corridor(kind):
    config = make_config(
        lambda context: CorridorEnv(),
        envs=4,
        lr=0.02,
        gamma=0.5,
        train_batch_size=32,
        training_intensity=32,
        target_network_update_freq=48,
        replay_buffer_config={"type": kind, "capacity": 5000},
    )
    config.exploration(exploration_config={"final_epsilon": 0.3, "epsilon_timesteps": 600})
    algorithm = config.build()
    train(algorithm, 50)
    q = algorithm.get_policy().compute_actions(np.eye(5), explore=False).extras["q_values"]
    right, left = [0.125, 0.25, 0.5, 1.0], [0.0625, 0.0625, 0.125, 0.25]
    np.testing.assert_allclose(q[:4], np.stack([left, right], 1), atol=0.05)
    evaluation = algorithm.evaluate()["evaluation"]
    assert evaluation["episode_len_mean"] == 4.0  # greedy: evaluations do not explore


@pytest.mark.parametrize("kind", ["MultiAgentReplayBuffer", "MultiAgentPrioritizedReplayBuffer"])
def test_one_seed_repeats_bit_for_bit(kind):
    buffer = {"type": kind, "capacity": 64}
    runs = [
        train(make_config(two_arms, n_step=2, replay_buffer_config=buffer).build(), 4)
        for _ in range(2)
    ]
    assert list(map(get_stats, runs[0])) == list(map(get_stats, runs[1]))


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.core
def test_without_its_rows_a_restored_run_fills_the_buffer_first(tmp_path):
    algorithm = make_config(
        saved_counting,
        num_steps_sampled_before_learning_starts=24,
        store_buffer_in_checkpoints=False,
    ).build()
    train(algorithm, 4)
    algorithm.save(tmp_path)
    algorithm.restore(tmp_path)
    assert len(algorithm.replay_buffer) == 0
    results = train(algorithm, 3)
    assert [x["num_env_steps_trained_this_iter"] for x in results] == [0, 4, 4]


def test_a_buffer_of_another_size_is_refused_and_nothing_changes(tmp_path):
    algorithm = make_config(saved_counting).build()
    algorithm.train()
    algorithm.save(tmp_path)
    other = make_config(
        saved_counting, replay_buffer_config={"type": "MultiAgentReplayBuffer", "capacity": 32}
    ).build()
    before = other.get_weights()
    with pytest.raises(CheckpointError, match="capacity 64"):
        other.restore(tmp_path)
    assert other.counters["num_env_steps_sampled"] == 0
    assert_equal(other.get_weights()["default_policy"], before["default_policy"])


def test_defaults_run_and_are_restored_from_a_folder(tmp_path):
    config = DQNConfig().environment("CartPole-v1").framework(inference="tf", jit_compile=False)
    config.debugging(log_level="ERROR", seed=0).training(store_buffer_in_checkpoints=True)
    algorithm = config.build()
    assert algorithm.train()["timesteps_total"] == 1000
    algorithm.save(tmp_path)
    restored = Algorithm.from_checkpoint(tmp_path)
    assert isinstance(restored, DQN)
    assert len(restored.replay_buffer) == 1000
    restored.training_step()
    assert restored.get_policy().num_grad_updates == 2


def test_learn_ends_with_the_training_step_that_reaches_its_steps():
    config = make_config(saved_counting).reporting(min_sample_timesteps_per_iteration=1000)
    algorithm = config.build()
    algorithm.learn(30, progress=False)
    assert algorithm.counters["num_env_steps_sampled"] == 36
