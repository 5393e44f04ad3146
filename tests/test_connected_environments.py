"""Connectors between environments and policies, in sampling and evaluation."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import PPOConfig, PPOTF2Policy, RolloutWorker
from tfpolicies.connectors import ClipReward, FrameStack
from tfpolicies.errors import ConfigError


class Counting(gym.Env):
    """Shows the step's number; episodes of three steps; the reward is 5."""

    observation_space = spaces.Box(0, 10, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config=None):
        self.count = 0

    def reset(self, *, seed=None, options=None):
        self.count = 1
        return np.array([1.0], np.float32), {}

    def step(self, action):
        self.count += 1
        return np.array([self.count], np.float32), 5.0, False, self.count == 4, {}


def config():
    made = PPOConfig().environment(Counting).debugging(seed=0)
    made.framework(inference="tf", jit_compile=False).training(model={"fcnet_hiddens": [4]})
    made.rollouts(num_envs_per_worker=2, rollout_fragment_length=4)
    return made.rollouts(agent_connectors=[FrameStack(2), ClipReward(sign=True)])


def test_frames_are_stacked_within_episodes_and_rewards_clipped():
    worker = RolloutWorker(config=config(), default_policy_class=PPOTF2Policy)
    policy = worker.get_policy()
    assert policy.observation_space.shape == (2,)
    batch = worker.sample()
    assert batch["obs"][:4].tolist() == [[1, 1], [1, 2], [2, 3], [1, 1]]
    assert batch["new_obs"][:4].tolist() == [[1, 2], [2, 3], [3, 4], [1, 2]]
    assert set(batch["rewards"].tolist()) == {1.0}
    assert policy.get_connector_metrics()["agent_connectors"]["FrameStack_ms"] > 0.0
    state = policy.get_state()["connector_configs"]
    assert state["agent"][0] == "AgentConnectorPipeline"


def test_a_checkpoint_brings_connectors_back(tmp_path):
    algorithm = config().training(train_batch_size=16, sgd_minibatch_size=8).build()
    algorithm.train()
    algorithm.save(tmp_path)
    again = type(algorithm).from_checkpoint(tmp_path, config={"env": Counting})
    assert again.get_policy().observation_space.shape == (2,)
    assert len(again.get_policy().agent_connectors) == 2
    assert again.evaluate()["evaluation"]["episode_reward_mean"] == pytest.approx(3.0)


def test_what_is_no_connector_is_refused_at_the_call():
    with pytest.raises(ConfigError, match="agent_connectors must be a list of AgentConnector"):
        PPOConfig().rollouts(agent_connectors=[np.sign])
    with pytest.raises(ConfigError, match="FrameStak"):
        PPOConfig().rollouts(agent_connectors=[["FrameStak", {}]])
