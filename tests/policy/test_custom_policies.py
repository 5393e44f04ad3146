"""Policies written by hand: what they are given, and what becomes of their actions."""

import logging

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import (
    AlgorithmConfig,
    MultiAgentEnv,
    Policy,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
    SampleBatch,
)
from tfpolicies.compat import RandomPolicy
from tfpolicies.connectors.agent_connectors import ClipObservations
from tfpolicies.errors import UsageError
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.policy.recurrent_state import flatten_states
from tfpolicies.rollout.episode import Episode
from tfpolicies.rollout.evaluation import play

WIDE = spaces.Box(np.array([0, -2], np.float32), np.array([4, 2], np.float32))


class Line(gym.Env):
    """Counts steps and keeps its actions; episodes of three steps."""

    observation_space = spaces.Box(-9.0, 9.0, (1,), np.float32)

    def __init__(self, action_space=WIDE):
        self.action_space = action_space
        self.taken = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.now += 1
        self.taken.append(action)
        ended = self.now == 3
        return np.full(1, self.now, np.float32), float(self.now), ended, False, {"now": self.now}


NESTED = spaces.Dict(at=spaces.Discrete(3, start=1), speed=spaces.Box(-9.0, 9.0, (2,), np.float32))
EPISODE_ROWS = np.array([[1, 0, 0, 0, 5], [0, 1, 0, 1, 6], [0, 0, 1, 2, 7]], np.float32)


class Nested(Line):
    """What `Line` does, with observations of a Dict."""

    observation_space = NESTED

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.nested(), {}

    def step(self, action):
        return self.nested(1), *super().step(action)[1:]

    def nested(self, more=0):
        now = self.now + more
        return {"at": min(1 + now, 3), "speed": np.array([now, 5 + now], np.float32)}


class OnRows(Policy):
    """Keeps what it is given."""

    flat_observations = True

    def __init__(self, *args):
        super().__init__(*args)
        self.acted, self.processed, self.learned = [], [], []

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        self.acted.append(obs_batch)
        return ActionBatch(np.zeros((len(obs_batch), 2), np.float32), [], {})

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        self.processed.append(sample_batch["new_obs"])
        return sample_batch

    def learn_on_batch(self, samples):
        self.learned.append(samples["obs"])
        return {}


def test_a_class_that_asks_for_flat_observations_gets_rows_everywhere():
    config = AlgorithmConfig().environment(Nested).rollouts(rollout_fragment_length=3)
    worker = RolloutWorker(config=config, default_policy_class=OnRows)
    policy, batch = worker.get_policy(), worker.sample()
    np.testing.assert_array_equal(np.concatenate(policy.acted), EPISODE_ROWS)
    np.testing.assert_array_equal(batch["obs"], EPISODE_ROWS)
    (reached,) = policy.processed
    np.testing.assert_array_equal(reached[:2], EPISODE_ROWS[1:])
    np.testing.assert_array_equal(reached[2], [0, 0, 1, 3, 8])
    policy.driver.learning.update(batch, 1, 3, shuffle=False)
    np.testing.assert_array_equal(policy.learned[0], EPISODE_ROWS)
    policy.compute_single_action({"at": 2, "speed": np.array([1, 6], np.float32)})
    policy.compute_single_action(EPISODE_ROWS[1])
    for values in policy.acted[-2:]:
        np.testing.assert_array_equal(values, EPISODE_ROWS[1:2])


def test_a_tensorflow_policy_cannot_ask_for_flat_observations():
    message = "Flat.flat_observations must be False: a TFPolicy encodes nested observations itself"
    with pytest.raises(UsageError, match=message):
        type("Flat", (PPOTF2Policy,), {"flat_observations": True})


def test_other_classes_get_observations_as_the_environment_has_them():
    class Plain(OnRows):
        flat_observations = False

        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            assert obs_batch["at"].tolist() == [1]
            return ActionBatch(np.zeros((1, 2), np.float32), [], {})

    config = AlgorithmConfig().environment(Nested).rollouts(rollout_fragment_length=1)
    batch = RolloutWorker(config=config, default_policy_class=Plain).sample()
    assert batch["obs"]["at"].tolist() == [1]


class Two(MultiAgentEnv):
    """Two agents that do what `Line` does."""

    observation_space = spaces.Dict(a=Line.observation_space, b=Line.observation_space)
    action_space = spaces.Dict(a=WIDE, b=WIDE)

    def __init__(self):
        self.lines = {"a": Line(), "b": Line()}

    def reset(self, *, seed=None, options=None):
        return {agent: line.reset()[0] for agent, line in self.lines.items()}, {}

    def step(self, actions):
        steps = {agent: self.lines[agent].step(action) for agent, action in actions.items()}
        obs, rewards, ends, cuts, infos = (
            {agent: each[i] for agent, each in steps.items()} for i in range(5)
        )
        return obs, rewards, {**ends, "__all__": ends["a"]}, {**cuts, "__all__": False}, infos


class Constant(Policy):
    """Does always the same."""

    action = (0.5, 0.5)

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        actions = np.broadcast_to(np.asarray(self.action), (len(obs_batch), len(self.action)))
        return ActionBatch(actions, [], {})


def worker_of(policy_class, env=Line, *, length=4, **settings):
    config = AlgorithmConfig().environment(lambda context: env())
    config.rollouts(rollout_fragment_length=length).debugging(seed=1)
    config.update_from_dict(settings)
    return RolloutWorker(config=config, default_policy_class=policy_class)


def doing(*action):
    return type("Doing", (Constant,), {"action": action})


# -- actions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "action", "expected"),
    [
        ({}, (0.5, 0.5), [3.0, 1.0]),
        ({}, (-1.0, 1.0), [0.0, 2.0]),
        ({"normalize_actions": False}, (9.0, 0.5), [9.0, 0.5]),
        ({"normalize_actions": False, "clip_actions": True}, (9.0, 0.5), [4.0, 0.5]),
    ],
)
def test_actions_of_a_policy_written_by_hand_are_unsquashed_and_clipped(settings, action, expected):
    worker = worker_of(doing(*action), **settings)
    batch = worker.sample()
    np.testing.assert_allclose(worker.env.taken, [expected] * 4, atol=1e-6)
    np.testing.assert_allclose(batch["actions"], [action] * 4)
    assert worker.env.taken[0].dtype == np.float32
    play(worker, 1, by_episodes=True)
    np.testing.assert_allclose(worker.env.taken[4:], [expected] * 3, atol=1e-6)
    policy = worker.get_policy()
    session = policy.session()
    np.testing.assert_allclose(session.act(np.zeros(1)), expected, atol=1e-6)


def test_agents_actions_are_unsquashed_and_their_own():
    worker = worker_of(Constant, Two, policies={"default_policy"})
    worker.sample()
    for line in worker.env.lines.values():
        np.testing.assert_allclose(line.taken, [[3.0, 1.0]] * 4, atol=1e-6)


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (spaces.Discrete(3, start=5), 6, 6),
        (spaces.MultiDiscrete([3, 3]), [2, 1], [2, 1]),
        (spaces.Box(3, 5, (1,), np.int32), [1], [4]),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), [7.0], [7.0]),
        (spaces.Box(-np.inf, 1.0, (1,), np.float32), [7.0], [1.0]),
        (spaces.Dict(a=spaces.Box(0.0, 2.0, (1,)), b=spaces.Discrete(2)), {"a": [0.0], "b": 1},
         {"a": [1.0], "b": 1}),
    ],
    ids=["discrete", "multi", "integers", "unbounded", "half", "nested"],
)  # fmt: skip
def test_only_boxes_are_mapped(space, action, expected):
    class Own(Policy):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch([action] * len(obs_batch) if space_is_flat else nested, [], {})

    space_is_flat = not isinstance(space, spaces.Dict)
    nested = {"a": np.zeros((1, 1)), "b": np.ones(1)}
    policy = Own(Line.observation_space, space, {})
    actual, _ = policy.driver.acting.act([np.zeros((1, 1), np.float32)])
    alone = policy.to_env_action(action)
    if space_is_flat:
        assert actual.dtype == space.dtype
        assert actual[0].tolist() == np.asarray(alone).tolist() == expected
    else:
        assert {key: x[0].tolist() for key, x in actual.items()} == expected
        assert {key: x.tolist() for key, x in alone.items()} == expected


def test_an_action_that_is_not_normalised_warns_once_and_is_clipped(caplog):
    policy_class = doing(3.0, 0.0)
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        for _ in range(2):
            worker = worker_of(policy_class)
            worker.sample()
            worker.sample()
    (line,) = caplog.messages
    assert "returned the action 3," in line
    assert "environment(normalize_actions=False)" in line
    np.testing.assert_allclose(worker.env.taken[0], [4.0, 0.0], atol=1e-6)


def test_the_number_that_is_told_is_one_that_is_scaled(caplog):
    space = spaces.Box(np.float32([-np.inf, -2]), np.float32([np.inf, 2]))
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        worker_of(doing(100.0, 3.0), lambda: Line(space)).sample()
    (line,) = caplog.messages
    assert "returned the action 3," in line


@pytest.mark.parametrize("values", [(None, None), ([], None), (None, {}), (np.zeros(2), {})])
def test_what_compute_actions_returns_beside_actions_is_asked_for_in_its_form(values):
    class Short(Constant):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return super().compute_actions(obs_batch).actions, *values

    words = r"Short.compute_actions must return .*without a recurrent state \(actions, \[\], \{\}\)"
    with pytest.raises(UsageError, match=words):
        worker_of(Short).sample()


def test_a_random_policy_draws_from_the_whole_space(caplog):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        worker = worker_of(RandomPolicy, length=200)
        worker.sample()
    taken = np.array(worker.env.taken)
    assert not caplog.messages
    np.testing.assert_allclose(taken.min(0), [0.0, -2.0], atol=0.2)
    np.testing.assert_allclose(taken.max(0), [4.0, 2.0], atol=0.2)
    np.testing.assert_allclose(taken.mean(0), [2.0, 0.0], atol=0.4)


# -- what a signature asks for --------------------------------------------------------------------


class Asking(Constant):
    """Asks for all that there is, and takes it down."""

    def compute_actions(
        self,
        obs_batch,
        state_batches=None,
        prev_action_batch=None,
        prev_reward_batch=None,
        info_batch=None,
        episodes=None,
        explore=None,
        timestep=None,
    ):
        kept = self.__dict__.setdefault("kept", [])
        numbers = [episode.length for episode in episodes]
        kept.append((prev_action_batch.tolist(), prev_reward_batch.tolist(), info_batch, numbers))
        self.last = episodes, timestep
        return super().compute_actions(obs_batch)


def test_a_policy_is_given_what_its_signature_asks_for():
    worker = worker_of(Asking)
    policy = worker.get_policy()
    policy.on_global_var_update({"timestep": 7})
    batch = worker.sample()
    none, same = [[0.0, 0.0]], [[0.5, 0.5]]
    assert policy.kept == [
        (none, [0.0], [{}], [0]),
        (same, [1.0], [{"now": 1}], [1]),
        (same, [2.0], [{"now": 2}], [2]),
        (none, [0.0], [{}], [0]),
    ]
    assert isinstance(policy.last[0][0], Episode)
    assert policy.last[0][0].worker is worker
    assert policy.last[1] == 7
    assert batch["prev_rewards"].tolist() == [0.0, 1.0, 2.0, 0.0]
    assert batch["prev_actions"].tolist() == [*none, *same, *same, *none]
    policy.kept.clear()
    play(worker, 1, by_episodes=True)
    assert [lengths for *_, lengths in policy.kept] == [[0], [1], [2]]


def test_each_agents_policy_is_given_what_its_signature_asks_for():
    worker = worker_of(Asking, Two)
    batch = worker.sample()["default_policy"]
    kept = worker.get_policy().kept
    infos = [[{"now": n}, {"now": n}] for n in (1, 2)]
    assert [x for _, _, x, _ in kept] == [[{}, {}], *infos, [{}, {}]]
    assert [x for *_, x in kept] == [[0, 0], [1, 1], [2, 2], [0, 0]]
    first = batch["agent_index"] == 0
    assert batch["prev_rewards"][first].tolist() == [0.0, 1.0, 2.0, 0.0]


def test_a_short_signature_is_given_no_more_than_it_names():
    class Short(Policy):
        def compute_actions(self, obs_batch, state_batches=None, explore=None):
            return ActionBatch(np.zeros((len(obs_batch), 2)), [], {})

    worker = worker_of(Short)
    batch = worker.sample()
    assert (batch["prev_rewards"].tolist(), worker.sampler._tracker) == (
        [0.0, 1.0, 2.0, 0.0],
        None,
    )
    assert worker.get_policy().compute_single_action(np.zeros(1))[0].tolist() == [0.0, 0.0]


def test_an_input_dict_is_a_batch_with_what_came_before():
    seen = []

    class Own(Constant):
        def compute_actions_from_input_dict(self, input_dict, **kwargs):
            seen.append((type(input_dict), sorted(input_dict)))
            return super().compute_actions_from_input_dict(input_dict, **kwargs)

    worker_of(Own).sample()
    assert seen == [(SampleBatch, ["obs", "prev_actions", "prev_rewards"])] * 4


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [Line, Two])
def test_a_memory_may_be_a_dict(env):
    class Remembering(Constant):
        def get_initial_state(self):
            return {"seen": np.zeros(1), "age": np.array([10.0, 20.0])}

        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            actions = super().compute_actions(obs_batch).actions
            after = {"seen": np.asarray(obs_batch), "age": state_batches["age"] + 1}
            before = {"seen_before": state_batches["seen"][:, 0], "age": state_batches["age"]}
            return ActionBatch(actions, after, before)

    worker = worker_of(Remembering, env)
    batch = worker.sample().as_multi_agent()["default_policy"]
    ages = [[10.0, 20.0], [11.0, 21.0], [12.0, 22.0], [10.0, 20.0]]
    first = batch["agent_index"] == 0
    assert batch["seen_before"][first].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert batch["age"][first].tolist() == ages
    assert batch["state_in_0"].tolist()[:2] == [[10.0, 20.0], [10.0, 20.0]]
    assert sorted(set(batch["seq_lens"].tolist())) == [1, 3]
    policy = worker.get_policy()
    _, after, _ = policy.compute_single_action(np.ones(1), policy.get_initial_state())
    assert {name: x.tolist() for name, x in after.items()} == {"seen": [1.0], "age": [11.0, 21.0]}
    assert policy.session().act(np.zeros(1)).tolist() == [3.0, 1.0]


def test_a_memory_of_lists_has_the_rows_of_these_lists():
    assert [x.tolist() for x in flatten_states([[1, 2], np.zeros(1)])] == [[1, 2], [0.0]]


# -- filters --------------------------------------------------------------------------------------


class Watching(Constant):
    """Takes down what it sees."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        self.__dict__.setdefault("seen", []).extend(np.ravel(obs_batch).tolist())
        return super().compute_actions(obs_batch)


@pytest.mark.parametrize("env", [Line, Two])
def test_an_observation_filter_is_there_for_policies_written_by_hand(env):
    worker = worker_of(Watching, env, length=3, observation_filter="MeanStdFilter")
    policy = worker.get_policy()
    agents = 1 if env is Line else 2
    worker.sample()
    assert policy.seen == np.repeat([0.0, 1.0, 2.0], agents).tolist()
    policy.seen.clear()
    batch = worker.sample().as_multi_agent()["default_policy"]  # of 0, 1, 2: mean 1
    std = np.std(np.repeat([0.0, 1.0, 2.0], agents), ddof=1)
    scaled = (np.array([0.0, 1.0, 2.0]) - 1) / std
    np.testing.assert_allclose(policy.seen, np.repeat(scaled, agents), atol=1e-5)
    first = batch["agent_index"] == 0
    np.testing.assert_allclose(batch["obs"][first][:, 0], scaled, atol=1e-5)
    np.testing.assert_allclose(batch["new_obs"][first][:2, 0], scaled[1:], atol=1e-5)
    assert set(worker.filters) == {"default_policy"}
    twin = policy.copy()
    policy.seen, twin.seen = [], []
    for each in (policy, twin, Policy.from_state(policy.get_state())):
        each.driver.acting.act([np.array([[2.0]], np.float32)])
    assert twin.seen == policy.seen != [2.0]


def test_a_filter_of_a_policy_written_by_hand_is_in_its_checkpoint(tmp_path):
    worker = worker_of(Watching, observation_filter="MeanStdFilter", reward_filter="MeanStdFilter")
    worker.sample()
    worker.observation_filters.flush()
    policy = worker.get_policy()
    policy.export_checkpoint(tmp_path)
    loaded = Watching.from_checkpoint(tmp_path)
    for name in ("filter", "reward_filter"):
        actual, expected = (getattr(each, name).get_state() for each in (loaded, policy))
        assert {key: x.tolist() for key, x in actual.items()} == {
            key: x.tolist() for key, x in expected.items()
        }


def test_evaluation_sees_through_the_same_filter_as_training():
    config = PPOConfig().environment(lambda context: Line())
    config.rollouts(rollout_fragment_length=6, observation_filter="MeanStdFilter")
    config.training(train_batch_size=6, sgd_minibatch_size=6)
    config.multi_agent(policies={"default_policy": (Watching, None, None, {})})
    config.evaluation(evaluation_duration=1).debugging(log_level="ERROR")
    algorithm = config.build()
    algorithm.train()
    algorithm.evaluate()
    here, there = (w.get_policy() for w in (algorithm.worker, algorithm.evaluation_worker))
    assert (
        there.filter.get_scalings()[0].mean.tolist()
        == here.filter.get_scalings()[0].mean.tolist()
        != [0]
    )
    algorithm.stop()


@pytest.mark.parametrize("env", [Line, Two])
def test_connectors_stand_before_a_policy_written_by_hand(env):
    class Clipped(Watching):
        pass

    config = AlgorithmConfig().environment(lambda context: env())
    config.rollouts(rollout_fragment_length=3, agent_connectors=[ClipObservations(0.0, 1.5)])
    worker = RolloutWorker(config=config, default_policy_class=Clipped)
    worker.sample()
    lines = worker.env.lines.values() if env is Two else [worker.env]
    assert set(worker.get_policy().seen) == {0.0, 1.0, 1.5}
    for line in lines:
        np.testing.assert_allclose(line.taken, [[3.0, 1.0]] * 3, atol=1e-6)


class Weighted(Policy):
    """Its only weight is a number of Python, as in RLlib's page about custom policies."""

    def __init__(self, *args):
        super().__init__(*args)
        self.w = 1.0

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return ActionBatch(np.zeros((len(obs_batch), 2), np.float32), [], {})

    def get_weights(self):
        return {"w": self.w}

    def set_weights(self, weights):
        self.w = weights["w"]


def test_weights_that_are_numbers_of_python_are_saved(tmp_path):
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    policy = Weighted(space, space, {})
    policy.w = 2.5
    policy.export_checkpoint(tmp_path / "policy")
    restored = Weighted.from_checkpoint(tmp_path / "policy")
    assert float(restored.w) == 2.5
