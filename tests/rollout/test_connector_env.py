"""Connectors between environments and policies, in sampling and evaluation."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.view_models import Counter
from helpers.workers import get_logits, make_callbacks, make_config, make_worker
from tfpolicies import PPOConfig, PPOTF2Policy
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


SMALL = {"env": Counter, "env_config": {"length": 3}, "num_cpus_per_worker": 0}
SMALL |= {"num_envs_per_worker": 2, "rollout_fragment_length": 4}
SMALL |= {"train_batch_size": 8, "sgd_minibatch_size": 8}
STACKING = {**SMALL, "agent_connectors": [FrameStack(2), ClipReward(sign=True)]}
CLIPPING = {**SMALL, "agent_connectors": [ClipObservations(low=0.0, high=2.0)]}


def test_frames_are_stacked_within_episodes_and_rewards_clipped():
    worker = make_worker(**STACKING)
    policy = worker.get_policy()
    assert policy.observation_space.shape == (2,)
    batch = worker.sample()
    assert batch["obs"][:4].tolist() == [[1, 1], [1, 2], [2, 3], [1, 1]]
    assert batch["new_obs"][:4].tolist() == [[1, 2], [2, 3], [3, 4], [1, 2]]
    assert set(batch["rewards"].tolist()) == {1.0}
    assert policy.get_connector_metrics()["agent_connectors"]["FrameStack_ms"] > 0.0
    state = policy.get_state()["connector_configs"]
    assert state["agent"][0] == "AgentConnectorPipeline"


def test_a_checkpoint_restores_connectors(tmp_path):
    algorithm = make_config(**STACKING).build()
    algorithm.train()
    algorithm.save(tmp_path)
    restored = type(algorithm).from_checkpoint(tmp_path, config={"env": Counter})
    assert restored.get_policy().observation_space.shape == (2,)
    assert len(restored.get_policy().agent_connectors) == 2
    assert restored.evaluate()["evaluation"]["episode_reward_mean"] == pytest.approx(3.0)


def test_the_command_line_plays_through_the_connectors_of_a_checkpoint(tmp_path, capsys):
    algorithm = make_config(**{**STACKING, "env": "CartPole-v1", "env_config": {}}).build()
    algorithm.save(tmp_path)
    algorithm.stop()
    assert main(["evaluate", str(tmp_path), "--episodes", "2"]) == 0
    assert "mean return" in capsys.readouterr().out
    algorithm = make_config(**CLIPPING).build()  # of another environment
    algorithm.save(tmp_path)
    algorithm.stop()
    assert main(["evaluate", str(tmp_path), "--episodes", "2", "--env", "CartPole-v1"]) != 0


def test_results_have_the_times_of_connectors():
    algorithm = make_config(**STACKING).build()
    result = algorithm.train()
    times = result["connector_metrics"]
    assert set(times) == {"FrameStack_ms", "ClipReward_ms"}
    assert 0.0 < times["FrameStack_ms"] < 100.0
    assert result["sampler_results"]["connector_metrics"] == times
    assert set(algorithm.evaluate()["evaluation"]["connector_metrics"]) == set(times)
    algorithm.stop()


def test_a_state_with_equal_connectors_replaces_none():
    worker = make_worker(**STACKING)
    policy = worker.get_policy()
    state, connectors = worker.get_state(), policy.agent_connectors
    worker.set_state(state)
    assert policy.agent_connectors is connectors is worker.sampler.envs.agent
    assert connectors.space == Counter.observation_space
    assert worker.policy_dict["default_policy"].observation_space == Counter.observation_space
    copy = PPOTF2Policy.from_state(policy.get_state())
    assert copy.agent_connectors.space == Counter.observation_space
    state = policy.get_state()
    state["connector_configs"]["agent"][1]["space"] = {"type": "Box"}
    with pytest.raises(ConfigError, match="Box space is malformed"):
        copy.set_state(state)


def test_other_objects_and_unknown_names_are_refused_as_connectors():
    with pytest.raises(ConfigError, match="agent_connectors must be a list of AgentConnector"):
        PPOConfig().rollouts(agent_connectors=[np.sign])
    with pytest.raises(ConfigError, match="FrameStak"):
        PPOConfig().rollouts(agent_connectors=[["FrameStak", {}]])


@pytest.mark.core
def test_one_observation_goes_through_the_connectors():
    algorithm = make_config(**CLIPPING).build()
    expected = get_logits(algorithm, [2.0])
    assert get_logits(algorithm, [9.0]) == expected != get_logits(algorithm, [1.0])
    values = {"input_dict": {"obs": np.array([9.0])}, "explore": False, "full_fetch": True}
    result = algorithm.compute_single_action(**values)[2]
    assert result["action_dist_inputs"].tolist() == expected
    algorithm.stop()


def test_one_action_goes_through_the_connectors():
    class Pushed(Counter):
        action_space = spaces.Box(-4.0, 4.0, (1,), np.float32)

    config = make_config(**{**CLIPPING, "env": Pushed}, normalize_actions=False)
    plain = config.copy(copy_frozen=False).build()
    widened = config.rollouts(action_connectors=[UnsquashActions()]).build()
    action, expected = (x.compute_single_action([1.0], explore=False) for x in (widened, plain))
    np.testing.assert_allclose(action, 4.0 * expected, rtol=1e-6)


def test_a_connector_with_a_memory_needs_whole_episodes():
    algorithm = make_config(**STACKING).build()
    with pytest.raises(UsageError, match=r"FrameStack needs a whole episode.*`evaluate\(\)`"):
        algorithm.compute_single_action([1.0])


def test_a_learner_whose_workers_sample_elsewhere_has_the_connectors(ray_cluster, tmp_path):
    algorithm = make_config(**CLIPPING, num_rollout_workers=1).build()
    assert algorithm.get_policy().observation_space == spaces.Box(0.0, 2.0, (1,), np.float32)
    expected = get_logits(algorithm, [2.0])
    assert get_logits(algorithm, [9.0]) == expected != get_logits(algorithm, [1.0])
    assert algorithm.train()["num_env_steps_sampled"] == 8
    algorithm.save(tmp_path)
    algorithm.stop()
    local = {"env": Counter, "num_rollout_workers": 0}
    restored = type(algorithm).from_checkpoint(tmp_path, config=local)
    assert restored.get_policy().agent_connectors[0].params() == {"low": 0.0, "high": 2.0}
    restored.stop()


@register_connector
class Opposite(ActionConnector):
    """Makes 1 of action 0, and 0 of 1; records its inputs."""

    inputs: list = []

    def __call__(self, step):
        self.inputs.append(step.actions)
        return step._replace(actions=1 - step.actions)


def test_a_callback_can_append_connectors_to_a_new_policy():
    def append(policy_id, policy):
        policy.action_connectors.append(Opposite())
        policy.agent_connectors.prepend(ClipReward(sign=True))

    def worker_with(**methods):
        return make_worker(**SMALL, callbacks=make_callbacks(**methods))

    assert worker_with().get_policy().action_connectors is None
    batch = worker_with(on_create_policy=append).sample()
    drawn = np.stack(Opposite.inputs, axis=1)  # [2, 4]: environment by environment
    assert drawn.ravel().tolist() == batch["actions"].tolist()
    assert set(batch["rewards"].tolist()) == {1.0}
    worker, other = worker_with(on_create_policy=append), worker_with(on_create_policy=append)
    state = worker_protocol.get_inference_state(worker.get_policy())
    addition = PolicyAddition("default_policy", policy_state=state, calls_on_create=True)
    worker_protocol.add_policy(other, addition, other.policies.mapping_and_trainable)
    assert list(map(len, get_pipelines(other.get_policy()))) == [1, 1]
