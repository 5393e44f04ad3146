"""Connectors between environments and policies, in sampling and evaluation."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import DefaultCallbacks, PPOConfig, PPOTF2Policy, RolloutWorker
from tfpolicies.cli import main
from tfpolicies.connectors import (
    ActionConnector,
    ClipObservations,
    ClipReward,
    FrameStack,
    UnsquashActions,
    register_connector,
)
from tfpolicies.distributed import worker_protocol
from tfpolicies.errors import ConfigError, UsageError
from tfpolicies.rollout.policy_changes import PolicyAddition
from tfpolicies.rollout.policy_connectors import get_pipelines

pytestmark = pytest.mark.usefixtures("kept_programs")


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


def test_the_command_line_plays_through_the_connectors_of_a_checkpoint(tmp_path, capsys):
    made = config().environment("CartPole-v1").training(train_batch_size=8, sgd_minibatch_size=8)
    algorithm = made.build()
    algorithm.save(tmp_path)
    algorithm.stop()
    assert main(["evaluate", str(tmp_path), "--episodes", "2"]) == 0
    assert "mean return" in capsys.readouterr().out
    algorithm = clipping().build()  # of another environment
    algorithm.save(tmp_path)
    algorithm.stop()
    assert main(["evaluate", str(tmp_path), "--episodes", "2", "--env", "CartPole-v1"]) != 0


def test_results_tell_the_times_of_connectors():
    algorithm = config().training(train_batch_size=8, sgd_minibatch_size=8).build()
    result = algorithm.train()
    times = result["connector_metrics"]
    assert set(times) == {"FrameStack_ms", "ClipReward_ms"}
    assert 0.0 < times["FrameStack_ms"] < 100.0
    assert result["sampler_results"]["connector_metrics"] == times
    assert set(algorithm.evaluate()["evaluation"]["connector_metrics"]) == set(times)
    algorithm.stop()


def test_states_leave_connectors_that_do_the_same_as_they_are():
    worker = RolloutWorker(config=config(), default_policy_class=PPOTF2Policy)
    policy = worker.get_policy()
    state, kept = worker.get_state(), policy.agent_connectors
    worker.set_state(state)
    assert policy.agent_connectors is kept is worker.sampler.envs.agent
    assert kept.space == Counting.observation_space
    assert worker.policy_dict["default_policy"].observation_space == Counting.observation_space
    twin = PPOTF2Policy.from_state(policy.get_state())
    assert twin.agent_connectors.space == Counting.observation_space
    state = policy.get_state()
    state["connector_configs"]["agent"][1]["space"] = {"type": "Box"}
    with pytest.raises(ConfigError, match="Box space is malformed"):
        twin.set_state(state)
    worker.stop()


def test_what_is_no_connector_is_refused_at_the_call():
    with pytest.raises(ConfigError, match="agent_connectors must be a list of AgentConnector"):
        PPOConfig().rollouts(agent_connectors=[np.sign])
    with pytest.raises(ConfigError, match="FrameStak"):
        PPOConfig().rollouts(agent_connectors=[["FrameStak", {}]])


def clipping(**rollouts):
    made = config().rollouts(agent_connectors=[ClipObservations(low=0.0, high=2.0)], **rollouts)
    return made.training(train_batch_size=8, sgd_minibatch_size=8).resources(num_cpus_per_worker=0)


def logits(algorithm, observation):
    result = algorithm.compute_single_action(observation, explore=False, full_fetch=True)
    return result[2]["action_dist_inputs"].tolist()


@pytest.mark.core
def test_one_observation_goes_through_the_connectors_too():
    algorithm = clipping().build()
    assert logits(algorithm, [9.0]) == logits(algorithm, [2.0]) != logits(algorithm, [1.0])
    values = {"input_dict": {"obs": np.array([9.0])}, "explore": False, "full_fetch": True}
    assert algorithm.compute_single_action(**values)[2]["action_dist_inputs"].tolist() == logits(
        algorithm, [2.0]
    )
    algorithm.stop()


def test_one_action_goes_through_the_connectors_too():
    class Pushed(Counting):
        action_space = spaces.Box(-4.0, 4.0, (1,), np.float32)

    made = clipping().environment(Pushed, normalize_actions=False)
    plain = made.copy(copy_frozen=False).build()
    widened = made.rollouts(action_connectors=[UnsquashActions()]).build()
    observation = [1.0]
    own = plain.compute_single_action(observation, explore=False)
    np.testing.assert_allclose(
        widened.compute_single_action(observation, explore=False), 4.0 * own, rtol=1e-6
    )


def test_a_connector_that_remembers_wants_whole_episodes():
    algorithm = config().training(train_batch_size=16, sgd_minibatch_size=8).build()
    with pytest.raises(UsageError, match=r"FrameStack needs a whole episode.*`evaluate\(\)`"):
        algorithm.compute_single_action([1.0])


def test_a_learner_whose_workers_sample_elsewhere_has_the_connectors(ray_cluster, tmp_path):
    algorithm = clipping(num_rollout_workers=1).build()
    policy = algorithm.get_policy()
    assert policy.observation_space == spaces.Box(0.0, 2.0, (1,), np.float32)
    assert logits(algorithm, [9.0]) == logits(algorithm, [2.0]) != logits(algorithm, [1.0])
    assert algorithm.train()["num_env_steps_sampled"] == 8
    algorithm.save(tmp_path)
    algorithm.stop()
    alone = type(algorithm).from_checkpoint(
        tmp_path, config={"env": Counting, "num_rollout_workers": 0}
    )
    assert alone.get_policy().agent_connectors[0].params() == {"low": 0.0, "high": 2.0}
    alone.stop()


@register_connector
class Opposite(ActionConnector):
    """Makes 1 of action 0, and 0 of 1; takes down what comes in."""

    seen: list = []

    def __call__(self, step):
        self.seen.append(step.actions)
        return step._replace(actions=1 - step.actions)


def test_connectors_can_be_appended_where_a_policy_is_made():
    class Appends(DefaultCallbacks):
        def on_create_policy(self, *, policy_id, policy):
            policy.action_connectors.append(Opposite())
            policy.agent_connectors.prepend(ClipReward(sign=True))

    def worker_with(callbacks):
        plain = config().callbacks(callbacks).rollouts(agent_connectors=[])
        return RolloutWorker(config=plain, default_policy_class=PPOTF2Policy)

    assert worker_with(DefaultCallbacks).get_policy().action_connectors is None
    batch = worker_with(Appends).sample()
    drawn = np.stack(Opposite.seen, axis=1)  # [2, 4]: environment by environment
    assert drawn.ravel().tolist() == batch["actions"].tolist()
    assert set(batch["rewards"].tolist()) == {1.0}
    worker, other = worker_with(Appends), worker_with(Appends)  # which is told of a new policy
    state = worker_protocol.get_inference_state(worker.get_policy())
    addition = PolicyAddition("default_policy", policy_state=state, calls_on_create=True)
    worker_protocol.add_policy(other, addition, other.policies.mapping_and_trainable)
    assert list(map(len, get_pipelines(other.get_policy()))) == [1, 1]
