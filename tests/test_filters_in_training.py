"""Running filters as a part of the policy: the same numbers wherever it acts."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import PPO, PPOConfig, PPOTF2Policy, RolloutWorker


class Shifted(gym.Env):
    """Observations around (100, -3) with deviations (20, 0.1); rewards around 50."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config=None):
        self.rng = np.random.default_rng(0)

    def _obs(self):
        return (np.array([100.0, -3.0]) + self.rng.normal(0, [20.0, 0.1])).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        return self._obs(), self.rng.normal(50.0, 10.0), self.count == 20, False, {}


def config(**rollouts):
    made = PPOConfig().environment(Shifted).debugging(seed=0)
    made.training(train_batch_size=200, sgd_minibatch_size=100, num_sgd_iter=2)
    made.training(model={"fcnet_hiddens": [8]}).framework(inference="tf", jit_compile=False)
    return made.rollouts(observation_filter="MeanStdFilter", **rollouts)


@pytest.fixture(scope="module")
def trained():
    algorithm = config(reward_filter="MeanStdFilter").build()
    batches = []
    for _ in range(3):
        batches.append(algorithm.sample_train_batch()["default_policy"])
        algorithm.train()
    return algorithm, batches


def test_statistics_are_those_of_all_observations_that_were_trained_on(trained):
    algorithm, batches = trained
    policy = algorithm.get_policy()
    (stat,) = policy.filter.statistics
    assert stat.count == 1200  # three batches of the fixture, three of training
    np.testing.assert_allclose(stat.mean, [100.0, -3.0], rtol=0.05)
    np.testing.assert_allclose(stat.std, [20.0, 0.1], rtol=0.1)
    assert np.abs(batches[0]["obs"][:, 0]).mean() > 50  # batches keep what the environment showed


def test_learning_sees_what_acting_saw():
    algorithm = config(num_envs_per_worker=2).build()
    for _ in range(3):
        batch = algorithm.sample_train_batch()["default_policy"]
        info = algorithm.get_policy().compute_gradients(batch)[1]
        assert info["learner_stats"]["kl"] == pytest.approx(0.0, abs=1e-6)
        algorithm.train()


def test_evaluation_and_single_actions_use_the_same_numbers_and_change_none(trained):
    algorithm, _ = trained
    policy = algorithm.get_policy()
    before, stat = policy.filter.get_state(), policy.filter.statistics[0]
    algorithm.evaluate()
    other = algorithm.evaluation_worker.get_policy()
    obs = np.array([[120.0, -3.1], [80.0, -2.9]], np.float32)
    for each in (policy, other):
        extras = each.compute_actions(obs, explore=False)[2]
        by_hand = np.clip((obs - stat.mean) / (stat.std + 1e-8), -10, 10)
        plain = PPOTF2Policy(
            spaces.Box(-10, 10, (2,)),
            policy.action_space,
            {"model": {"fcnet_hiddens": [8]}, "inference": "tf"},
        )
        plain.set_weights(each.get_weights())
        wanted = plain.compute_actions(by_hand.astype(np.float32), explore=False)[2]
        np.testing.assert_allclose(
            extras["action_dist_inputs"], wanted["action_dist_inputs"], atol=1e-5
        )
    after = policy.filter.get_state()
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_rewards_are_learned_from_at_their_running_scale_and_reported_raw(trained):
    algorithm, batches = trained
    assert batches[0]["rewards"].mean() == pytest.approx(10.0)  # not scaled yet, but clipped
    assert 4.0 < batches[-1]["rewards"].mean() < 6.0  # 50 / 10
    assert algorithm.train()["episode_reward_mean"] == pytest.approx(1000.0, rel=0.05)


def test_checkpoints_and_exports_have_the_filter(trained, tmp_path):
    algorithm, _ = trained
    policy = algorithm.get_policy()
    algorithm.save(tmp_path / "run")
    again = PPO.from_checkpoint(tmp_path / "run", config={"env": Shifted})
    twin = again.get_policy()
    obs = np.array([[120.0, -3.1], [80.0, -2.9]], np.float32)
    actions, _, extras = policy.compute_actions(obs, explore=False)
    np.testing.assert_array_equal(
        twin.compute_actions(obs, explore=False)[2]["action_dist_inputs"],
        extras["action_dist_inputs"],
    )
    assert twin.filter.pending_count == policy.filter.pending_count
    result = policy.export_model(tmp_path / "onnx", onnx=True)
    namespace = {"__name__": "play", "__file__": "play.py"}
    exec((tmp_path / "onnx" / "play.py").read_text(), namespace)
    client = namespace["OnnxPolicy"](result.path)
    np.testing.assert_array_equal(client.act(obs), actions)


def test_a_worker_of_its_own_applies_its_statistics_from_sample_to_sample():
    worker = RolloutWorker(config=config(), default_policy_class=PPOTF2Policy)
    policy = worker.get_policy()
    worker.sample()
    assert policy.filter.statistics[0].count == 0
    worker.sample()
    assert policy.filter.statistics[0].count == 200
