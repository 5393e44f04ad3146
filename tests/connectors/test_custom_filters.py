"""Filters of observations that users write, as RLlib's users do."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import CountingEnv
from helpers.factories import make
from tfpolicies import PPO, PPOConfig, PPOTF2Policy, RolloutWorker
from tfpolicies.connectors import AgentStep, OwnFilter
from tfpolicies.errors import CheckpointError, ConfigError, ObservationError


class Counting:
    """Adds 100 times what it has seen; merges as RLlib's filters do."""

    def __init__(self, shape):
        self.shape, self.seen, self.buffer = shape, 0, 0

    def __call__(self, x, update=True):
        self.seen += update
        self.buffer += update
        return x + 100.0 * self.seen

    def copy(self):
        twin = Counting(self.shape)
        twin.seen, twin.buffer = self.seen, self.buffer
        return twin

    def sync(self, other):
        self.seen = other.seen

    def apply_changes(self, other, with_buffer=False):
        self.seen += other.buffer

    def reset_buffer(self):
        self.buffer = 0


def creator(context):
    return CountingEnv()


def config_with(make_filter, **more):
    config = PPOConfig().environment(creator).debugging(seed=1)
    config.framework(inference="tf", jit_compile=False).training(
        model={"fcnet_hiddens": [4]}, train_batch_size=4, sgd_minibatch_size=4, num_sgd_iter=1
    )
    return config.rollouts(observation_filter=make_filter, rollout_fragment_length=4, **more)


def worker_with(make_filter, **more):
    config = config_with(make_filter, **more)
    return RolloutWorker(config=config, default_policy_class=PPOTF2Policy)


def filter_of(worker):
    return worker.get_policy().agent_connectors["OwnFilter"].filter


@pytest.mark.core
def test_a_filter_of_ones_own_sees_each_observation_once_and_batches_have_what_it_gives():
    plain = worker_with("NoFilter").sample()["obs"]
    worker = worker_with(Counting, enable_connectors=False)
    batch = worker.sample()
    assert filter_of(worker).shape == CountingEnv().observation_space.shape
    np.testing.assert_allclose(batch["obs"][0], plain[0] + 100.0)
    np.testing.assert_allclose(batch["obs"][1], plain[1] + 200.0)
    assert batch["obs"].dtype == np.float32
    assert worker.get_policy().config["observation_filter"] == "NoFilter"


def test_evaluation_and_single_actions_act_by_the_statistics_of_training(tmp_path):
    algorithm = PPO(config=config_with(Counting).evaluation(evaluation_interval=1))
    algorithm.train()
    mine, theirs = (filter_of(x) for x in (algorithm.worker, algorithm.evaluation_worker))
    seen = mine.seen
    assert theirs.seen == seen > 3
    algorithm.compute_single_action(CountingEnv().reset(seed=0)[0])
    assert mine.seen == seen
    algorithm.save(tmp_path / "run")
    with pytest.raises(CheckpointError, match="Counting"):
        PPO.from_checkpoint(tmp_path / "run", config={"env": creator})
    settings = {"env": creator, "observation_filter": Counting}
    again = PPO.from_checkpoint(tmp_path / "run", config=settings)
    assert again.train()["timesteps_total"] == 8
    assert filter_of(again.worker).seen > 3
    again.stop()
    policy_folder = tmp_path / "policy"
    algorithm.get_policy().export_checkpoint(policy_folder)
    alone = PPOTF2Policy.from_checkpoint(policy_folder)
    step = AgentStep(np.zeros((1, *mine.shape), np.float32), np.zeros(1, int))
    with pytest.raises(ConfigError, match=r"'Counting' is your function, which no file"):
        alone.agent_connectors(step)
    algorithm.stop()


def test_what_others_saw_is_added_and_taken_over():
    ours, theirs = OwnFilter(Counting), OwnFilter(Counting)
    step = AgentStep(np.zeros((3, 2), np.float32), np.arange(3))
    for each in (ours, theirs):
        each.connect(spaces.Box(-1.0, 1.0, (2,)))
        each(step)
    assert theirs.pending_count == 3
    ours.apply_changes(theirs.snapshot())
    theirs.forget_pending()
    theirs.sync(ours)
    assert (ours.filter.seen, theirs.filter.seen, theirs.pending_count) == (6, 6, 0)
    assert ours.apply_without_update(step).obs.tolist() == [[600.0] * 2] * 3


def test_nested_and_masked_observations_pass_a_filter_but_for_the_mask():
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


def test_a_policy_by_itself_takes_names_of_filters_only():
    with pytest.raises(ConfigError, match=r"A callable is for the config of an algorithm"):
        make(observation_filter=Counting)
    with pytest.raises(ConfigError, match=r"a function f\(shape\) that returns a filter, got 'x'"):
        OwnFilter.from_params({"make": "x"})
    with pytest.raises(ConfigError, match=r"or f\(shape\) that returns a filter, got 'Filter'"):
        PPOConfig().rollouts(observation_filter="Filter")
