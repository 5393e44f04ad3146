"""Custom filters of observations, as RLlib's users write them."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import CountingEnv
from helpers.factories import make
from helpers.workers import make_config, make_worker
from tfpolicies import PPO, PPOConfig, PPOTF2Policy
from tfpolicies.connectors import AgentStep, OwnFilter
from tfpolicies.errors import CheckpointError, ConfigError, ObservationError


class Counting:
    """Adds 100 times the number of its observations; merges as RLlib's filters do."""

    def __init__(self, shape):
        self.shape, self.seen, self.buffer = shape, 0, 0

    def __call__(self, x, update=True):
        self.seen += update
        self.buffer += update
        return x + 100.0 * self.seen

    def copy(self):
        copied = Counting(self.shape)
        copied.seen, copied.buffer = self.seen, self.buffer
        return copied

    def sync(self, other):
        self.seen = other.seen

    def apply_changes(self, other, with_buffer=False):
        self.seen += other.buffer

    def reset_buffer(self):
        self.buffer = 0


def make_env(context):
    return CountingEnv()


def get_filter(worker):
    return worker.get_policy().agent_connectors["OwnFilter"].filter


@pytest.mark.core
def test_a_custom_filter_changes_each_observation_once():
    plain = make_worker(make_env, rollout_fragment_length=4).sample()["obs"]
    worker = make_worker(
        make_env, rollout_fragment_length=4, observation_filter=Counting, enable_connectors=False
    )
    batch = worker.sample()
    assert get_filter(worker).shape == CountingEnv().observation_space.shape
    np.testing.assert_allclose(batch["obs"][0], plain[0] + 100.0)
    np.testing.assert_allclose(batch["obs"][1], plain[1] + 200.0)
    assert batch["obs"].dtype == np.float32
    assert worker.get_policy().config["observation_filter"] == "NoFilter"


def test_evaluation_and_single_actions_use_the_statistics_of_training(tmp_path):
    sizes = {"rollout_fragment_length": 4, "train_batch_size": 4, "sgd_minibatch_size": 4}
    settings = {"num_sgd_iter": 1, "evaluation_interval": 1, "observation_filter": Counting}
    algorithm = PPO(config=make_config(make_env, **sizes, **settings))
    algorithm.train()
    workers = (algorithm.worker, algorithm.evaluation_worker)
    training, evaluation = (get_filter(worker) for worker in workers)
    seen = training.seen
    assert evaluation.seen == seen > 3
    algorithm.compute_single_action(CountingEnv().reset(seed=0)[0])
    assert training.seen == seen
    algorithm.save(tmp_path / "run")
    with pytest.raises(CheckpointError, match="Counting"):
        PPO.from_checkpoint(tmp_path / "run", config={"env": make_env})
    settings = {"env": make_env, "observation_filter": Counting}
    again = PPO.from_checkpoint(tmp_path / "run", config=settings)
    assert again.train()["timesteps_total"] == 8
    assert get_filter(again.worker).seen > 3
    again.stop()
    policy_folder = tmp_path / "policy"
    algorithm.get_policy().export_checkpoint(policy_folder)
    alone = PPOTF2Policy.from_checkpoint(policy_folder)
    step = AgentStep(np.zeros((1, *training.shape), np.float32), np.zeros(1, int))
    with pytest.raises(ConfigError, match=r"'Counting' is your function, which no file"):
        alone.agent_connectors(step)
    algorithm.stop()


def test_counts_of_other_filters_are_added_and_adopted():
    local, other = OwnFilter(Counting), OwnFilter(Counting)
    step = AgentStep(np.zeros((3, 2), np.float32), np.arange(3))
    for connector in (local, other):
        connector.connect(spaces.Box(-1.0, 1.0, (2,)))
        connector(step)
    assert other.pending_count == 3
    local.apply_changes(other.snapshot())
    other.forget_pending()
    other.sync(local)
    assert (local.filter.seen, other.filter.seen, other.pending_count) == (6, 6, 0)
    assert local.apply_without_update(step).obs.tolist() == [[600.0] * 2] * 3


def test_a_filter_gets_nested_observations_without_the_mask():
    seen = spaces.Dict(a=spaces.Box(-1.0, 1.0, (2,)), n=spaces.Discrete(3))
    space = spaces.Dict(observations=seen, action_mask=spaces.MultiBinary(2))
    shapes = []

    def doubling(shape):
        shapes.append(shape)
        return lambda x, update: {"a": 2 * x["a"], "n": x["n"]}

    connector = OwnFilter(doubling)
    connector.connect(space)
    obs = {"a": np.ones((1, 2), np.float32), "n": np.array([2])}
    mask = np.ones((1, 2), np.int8)
    result = connector(AgentStep({"observations": obs, "action_mask": mask}, np.zeros(1, int))).obs
    assert shapes == [{"a": (2,), "n": None}]
    assert result["observations"]["a"].tolist() == [[2.0, 2.0]]
    assert result["observations"]["n"].tolist() == [2]
    wrong = OwnFilter(lambda shape: lambda x, update: x[:1])
    wrong.connect(spaces.Box(-1.0, 1.0, (2,)))
    with pytest.raises(ObservationError, match="must return observations of the shapes of Box"):
        wrong(AgentStep(np.zeros((1, 2), np.float32), np.zeros(1, int)))


def test_a_policy_without_an_algorithm_takes_only_names_of_filters():
    with pytest.raises(ConfigError, match=r"A callable is for the config of an algorithm"):
        make(observation_filter=Counting)
    with pytest.raises(ConfigError, match=r"a function f\(shape\) that returns a filter, got 'x'"):
        OwnFilter.from_params({"make": "x"})
    with pytest.raises(ConfigError, match=r"or f\(shape\) that returns a filter, got 'Filter'"):
        PPOConfig().rollouts(observation_filter="Filter")
