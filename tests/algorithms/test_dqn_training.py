"""The training loop of DQN: replay, updates owed, target updates, learning, checkpoints."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import CountingEnv, SavedCountingEnv, TwoArmsEnv
from tfpolicies import DQN, Algorithm, DQNConfig, Policy, PolicySpec
from tfpolicies.errors import CheckpointError
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.program.policy_state import PolicyState

pytestmark = pytest.mark.usefixtures("kept_programs")


def saved_counting(context):
    return SavedCountingEnv(context.vector_index)


def two_arms(context):
    return TwoArmsEnv()


def corridor(context):
    return CorridorEnv()


def tiny(env=saved_counting, **training):
    settings = {
        "model": {"fcnet_hiddens": [8]},
        "hiddens": [],
        "train_batch_size": 4,
        "num_steps_sampled_before_learning_starts": 0,
        "replay_buffer_config": {"type": "MultiAgentReplayBuffer", "capacity": 64},
        **training,
    }
    return (
        DQNConfig()
        .environment(env)
        .rollouts(num_envs_per_worker=2, rollout_fragment_length=6)
        .training(**settings)
        .framework(inference="tf", jit_compile=False)
        .reporting(min_sample_timesteps_per_iteration=0)
        .debugging(seed=4, log_level="ERROR")
    )


def learned(result):
    return result["info"]["learner"].get("default_policy", {})


# -- replay ---------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_policy_written_by_hand_learns_from_replayed_rows():
    class Hand(Policy):
        sizes, targets = [], 0

        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})

        def learn_on_batch(self, samples):
            assert {"obs", "new_obs", "actions", "rewards", "terminateds"} <= set(samples)
            self.sizes.append(samples.count)
            return {"learner_stats": {"loss": 1.5}}

        def update_target(self):
            type(self).targets += 1

    config = tiny(target_network_update_freq=24, training_intensity=1.0)
    config.multi_agent(policies={"default_policy": PolicySpec(Hand)})
    algorithm = config.build()
    results = [algorithm.train() for _ in range(4)]
    assert Hand.sizes == [4] * 12
    assert Hand.targets == 2
    assert learned(results[-1])["learner_stats"] == {"loss": 1.5}
    assert results[-1]["num_agent_steps_trained"] == 48
    algorithm.stop()


@pytest.mark.core
def test_the_buffer_keeps_what_the_loss_reads():
    algorithm = tiny().build()
    algorithm.train()
    buffer = algorithm.replay_buffer.buffers["default_policy"]
    assert len(buffer) == 12
    batch = buffer.sample(50)
    columns = {"obs", "new_obs", "actions", "rewards", "terminateds", "weights"}
    assert set(batch) == columns
    for _ in range(10):
        algorithm.train()
    assert (len(buffer), buffer.num_added) == (64, 132)


@pytest.mark.parametrize("n_step", [1, 2, 4])
def test_replayed_rows_are_true_transitions(n_step):
    algorithm = tiny(n_step=n_step, gamma=0.5).build()
    for _ in range(4):
        algorithm.train()
    env = CountingEnv()
    batch = algorithm.replay_buffer.buffers["default_policy"].sample(200)
    steps = batch["n_steps"] if n_step > 1 else np.ones(200, int)
    assert set(steps.tolist()) == set(range(1, n_step + 1))
    rows = zip(batch["obs"], batch["new_obs"], batch["terminateds"], steps, strict=True)
    for (number, episode, now), (_, same, after), terminated, count in rows:
        env.number = int(number)
        length = env.length(int(episode))
        ended = after == length
        assert (after, same) == (now + count, episode)
        assert terminated == (ended and not env.truncates(int(episode)))
    first = batch["n_steps"] == 2 if n_step == 2 else steps == 1
    for row in np.flatnonzero(first)[:20]:
        number, episode, now = batch["obs"][row]
        env.number = int(number)
        least = sum(0.5**k * env.reward(episode, now + k, 0) for k in range(steps[row]))
        assert 0 <= batch["rewards"][row] - least <= 0.5 * (1 + 0.5 * (n_step == 2))


@pytest.mark.core
def test_learning_starts_with_enough_rows():
    algorithm = tiny(num_steps_sampled_before_learning_starts=25).build()
    results = [algorithm.train() for _ in range(4)]
    assert [result["num_env_steps_trained"] for result in results] == [0, 0, 4, 8]
    assert learned(results[1]) == {}
    assert set(learned(results[2])["learner_stats"]) >= {"mean_q", "mean_td_error", "cur_lr"}


@pytest.mark.parametrize(("intensity", "updates"), [(None, 5), (1, 15), (0.5, 7), (4, 60)])
def test_the_intensity_is_rows_trained_per_row_sampled(intensity, updates):
    algorithm = tiny(training_intensity=intensity).build()
    for _ in range(5):  # of 12 rows; an update takes 4
        result = algorithm.train()
    assert algorithm.get_policy().num_grad_updates == updates
    assert result["num_env_steps_trained"] == 4 * updates
    assert algorithm.get_policy().program.functions.traces["learn_epochs"] == 1


@pytest.mark.core
def test_the_target_is_updated_by_environment_steps():
    algorithm = tiny(target_network_update_freq=24, lr=0.1).build()
    seen = []
    for _ in range(5):
        result = algorithm.train()
        state = algorithm.get_policy().get_state()
        pairs = zip(state["weights"].values(), state["target_weights"].values(), strict=True)
        seen.append(all((a == b).all() for a, b in pairs))
    assert seen == [False, True, False, True, False]
    assert (result["num_target_updates"], result["last_target_update_ts"]) == (2, 48)


def test_the_target_moves_inside_the_compiled_call(monkeypatch):
    algorithm = tiny(target_network_update_freq=0, lr=0.1, tau=0.5).build()
    before = algorithm.get_policy().get_state()["target_weights"]
    monkeypatch.setattr(PolicyState, "update_targets", None)  # what `update_target` would call
    for _ in range(2):
        result = algorithm.train()
    assert result["num_target_updates"] == 2
    after = algorithm.get_policy().get_state()["target_weights"]
    assert any((before[key] != after[key]).any() for key in before)


def test_epsilon_follows_the_environment_steps():
    config = tiny()
    config.exploration(exploration_config={"final_epsilon": 0.0, "epsilon_timesteps": 48})
    algorithm = config.build()
    epsilons = []
    for _ in range(5):
        algorithm.train()
        policy = algorithm.get_policy()
        epsilons.append(float(policy.exploration.get_params(policy.global_timestep, True)[0]))
    np.testing.assert_allclose(epsilons, [0.75, 0.5, 0.25, 0, 0], atol=1e-6)


def test_rows_too_large_for_one_call_are_learned_in_several(monkeypatch):
    algorithm = tiny(training_intensity=4).build()
    whole = tiny(training_intensity=4).build()
    monkeypatch.setattr("tfpolicies.algorithms.off_policy._MAX_BYTES_PER_CALL", 600)
    result = algorithm.train()
    assert algorithm.get_policy().num_grad_updates == 12
    assert result["num_env_steps_trained"] == 48
    monkeypatch.undo()
    whole.train()
    assert whole.get_policy().num_grad_updates == 12


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
    config = tiny(
        corridor,
        lr=0.02,
        gamma=0.5,
        train_batch_size=32,
        training_intensity=32,
        target_network_update_freq=48,
        replay_buffer_config={"type": kind, "capacity": 5000},
    )
    config.exploration(exploration_config={"final_epsilon": 0.3, "epsilon_timesteps": 600})
    algorithm = config.rollouts(num_envs_per_worker=4).build()
    for _ in range(50):
        algorithm.train()
    q = algorithm.get_policy().compute_actions(np.eye(5), explore=False).extras["q_values"]
    right, left = [0.125, 0.25, 0.5, 1.0], [0.0625, 0.0625, 0.125, 0.25]
    np.testing.assert_allclose(q[:4], np.stack([left, right], 1), atol=0.05)
    evaluation = algorithm.evaluate()["evaluation"]
    assert evaluation["episode_len_mean"] == 4.0  # greedy: evaluations do not explore


def test_one_seed_repeats_bit_for_bit():
    one, other = (tiny(two_arms, n_step=2).build() for _ in range(2))
    for _ in range(4):
        assert learned(one.train()) == learned(other.train())


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.core
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tmp_path):
    def config():
        return tiny(
            store_buffer_in_checkpoints=True,
            training_intensity=0.5,
            target_network_update_freq=24,
            n_step=3,
        )

    algorithm = config().build()
    for _ in range(3):
        algorithm.train()
    assert algorithm.get_extra_state()["updates_owed"] == 0.25  # of 34 rows; two wait
    algorithm.save(tmp_path)
    restored = config().build()
    restored.restore(tmp_path)
    for _ in range(4):
        a, b = algorithm.train(), restored.train()
        assert learned(a) == learned(b)
        assert a["counters"] == b["counters"]
    for key, value in algorithm.get_policy().get_state()["target_weights"].items():
        np.testing.assert_array_equal(
            restored.get_policy().get_state()["target_weights"][key], value
        )


@pytest.mark.core
def test_without_its_rows_a_restored_run_fills_the_buffer_first(tmp_path):
    algorithm = tiny(num_steps_sampled_before_learning_starts=24).build()
    for _ in range(4):
        algorithm.train()
    algorithm.save(tmp_path)
    algorithm.restore(tmp_path)
    assert len(algorithm.replay_buffer) == 0
    trained = [algorithm.train()["num_env_steps_trained_this_iter"] for _ in range(3)]
    assert trained == [0, 4, 4]


def test_a_buffer_of_another_size_is_refused_and_nothing_changes(tmp_path):
    algorithm = tiny(store_buffer_in_checkpoints=True).build()
    algorithm.train()
    algorithm.save(tmp_path)
    other = tiny(replay_buffer_config={"type": "MultiAgentReplayBuffer", "capacity": 32}).build()
    before = other.get_weights()["default_policy"]
    with pytest.raises(CheckpointError, match="capacity 64"):
        other.restore(tmp_path)
    assert other.counters["num_env_steps_sampled"] == 0
    for key, value in other.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(before[key], value)


def test_defaults_run_and_come_back_from_a_folder(tmp_path):
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
    config = tiny().reporting(min_sample_timesteps_per_iteration=1000)
    algorithm = config.build()
    algorithm.learn(30, progress=False)
    assert algorithm.counters["num_env_steps_sampled"] == 36
