"""Custom policies: their inputs, actions, recurrent states and filters."""

import logging

import numpy as np
import pytest
from gymnasium import spaces

from helpers.constant_policies import ConstantPolicy
from helpers.factories import assert_equal
from helpers.short_envs import ShortEnv
from helpers.workers import make_config, make_worker
from tfpolicies import AlgorithmConfig, Policy, PPOTF2Policy, SampleBatch
from tfpolicies.compat import RandomPolicy
from tfpolicies.connectors.agent_connectors import ClipObservations
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import UsageError
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.policy.recurrent_state import flatten_states
from tfpolicies.rollout.episode import Episode
from tfpolicies.rollout.evaluation import play

WIDE = spaces.Box(np.array([0, -2], np.float32), np.array([4, 2], np.float32))
HALF_UNBOUNDED = spaces.Box(np.float32([-np.inf, -2]), np.float32([np.inf, 2]))


class Line(ShortEnv):
    """Keeps its actions; episodes of three steps, each of which pays its number."""

    length, terminates = 3, True

    def __init__(self, config=None, action_space=WIDE):
        self.action_space = action_space
        self.actions = []

    def pay(self, action):
        self.actions.append(action)
        return float(self.t)


NESTED = spaces.Dict(at=spaces.Discrete(3, start=1), speed=spaces.Box(-9.0, 9.0, (2,), np.float32))
EPISODE_ROWS = np.array([[1, 0, 0, 0, 5], [0, 1, 0, 1, 6], [0, 0, 1, 2, 7]], np.float32)


class Nested(Line):
    observation_space = NESTED

    def observe(self):
        return {"at": min(1 + self.t, 3), "speed": np.array([self.t, 5 + self.t], np.float32)}


class OnRows(Policy):
    """Takes flat observations, and keeps all that it is called with."""

    flat_observations = True

    def __init__(self, *args):
        super().__init__(*args)
        self.acted_on, self.postprocessed, self.learned_from = [], [], []

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        self.acted_on.append(obs_batch)
        return ActionBatch(np.zeros((len(obs_batch), 2), np.float32), [], {})

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        self.postprocessed.append(sample_batch["new_obs"])
        return sample_batch

    def learn_on_batch(self, samples):
        self.learned_from.append(samples["obs"])
        return {}


def test_a_class_with_flat_observations_gets_rows_everywhere():
    worker = make_custom_worker(OnRows, Nested, rollout_fragment_length=3)
    policy, batch = worker.get_policy(), worker.sample()
    np.testing.assert_array_equal(np.concatenate(policy.acted_on), EPISODE_ROWS)
    np.testing.assert_array_equal(batch["obs"], EPISODE_ROWS)
    (new_obs,) = policy.postprocessed
    np.testing.assert_array_equal(new_obs, [*EPISODE_ROWS[1:], [0, 0, 1, 3, 8]])
    policy.driver.learning.update(batch, 1, 3, shuffle=False)
    np.testing.assert_array_equal(policy.learned_from[0], EPISODE_ROWS)
    policy.compute_single_action({"at": 2, "speed": np.array([1, 6], np.float32)})
    policy.compute_single_action(EPISODE_ROWS[1])
    for values in policy.acted_on[-2:]:
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

    batch = make_custom_worker(Plain, Nested, rollout_fragment_length=1).sample()
    assert batch["obs"]["at"].tolist() == [1]


class Constant(ConstantPolicy):
    action = (0.5, 0.5)


def make_two_lines(config):
    return make_multi_agent(Line)({"num_agents": 2})


def get_lines(worker):
    return [worker.env] if isinstance(worker.env, Line) else worker.env.envs


def make_custom_worker(policy_class, env=Line, **settings):
    settings = {"rollout_fragment_length": 4, "seed": 1, "log_level": "WARN", **settings}
    return make_worker(env, policy_class, config_class=AlgorithmConfig, **settings)


def make_constant(*action):
    return type("Fixed", (Constant,), {"action": action})


@pytest.mark.parametrize(
    ("settings", "action", "expected"),
    [
        ({}, (0.5, 0.5), [3.0, 1.0]),
        ({}, (-1.0, 1.0), [0.0, 2.0]),
        ({"normalize_actions": False}, (9.0, 0.5), [9.0, 0.5]),
        ({"normalize_actions": False, "clip_actions": True}, (9.0, 0.5), [4.0, 0.5]),
    ],
)
def test_actions_of_a_custom_policy_are_unsquashed_and_clipped(settings, action, expected):
    worker = make_custom_worker(make_constant(*action), **settings)
    batch = worker.sample()
    np.testing.assert_allclose(worker.env.actions, [expected] * 4, atol=1e-6)
    np.testing.assert_allclose(batch["actions"], [action] * 4)
    assert worker.env.actions[0].dtype == np.float32
    play(worker, 1, by_episodes=True)
    np.testing.assert_allclose(worker.env.actions[4:], [expected] * 3, atol=1e-6)
    session = worker.get_policy().session()
    np.testing.assert_allclose(session.act(np.zeros(1)), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (spaces.Discrete(3, start=5), 6, 6),
        (spaces.MultiDiscrete([3, 3]), [2, 1], [2, 1]),
        (spaces.Box(3, 5, (1,), np.int32), [1], [4]),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), [7.0], [7.0]),
        (spaces.Box(-np.inf, 1.0, (1,), np.float32), [7.0], [1.0]),
    ],
    ids=["discrete", "multi", "integers", "unbounded", "half"],
)
def test_only_boxes_are_mapped(space, action, expected):
    policy = Constant(Line.observation_space, space, {})
    policy.action = action
    actions, _ = policy.driver.acting.act([np.zeros((1, 1), np.float32)])
    assert actions.dtype == space.dtype
    assert actions[0].tolist() == np.asarray(policy.to_env_action(action)).tolist() == expected


def test_only_boxes_of_nested_actions_are_mapped():
    class Nesting(Policy):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch({"a": np.zeros((1, 1)), "b": np.ones(1)}, [], {})

    space = spaces.Dict(a=spaces.Box(0.0, 2.0, (1,)), b=spaces.Discrete(2))
    policy = Nesting(Line.observation_space, space, {})
    actions, _ = policy.driver.acting.act([np.zeros((1, 1), np.float32)])
    assert {key: x[0].tolist() for key, x in actions.items()} == {"a": [1.0], "b": 1}
    action = policy.to_env_action({"a": [0.0], "b": 1})
    assert {key: x.tolist() for key, x in action.items()} == {"a": [1.0], "b": 1}


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [(WIDE, (3.0, 0.0), [4.0, 0.0]), (HALF_UNBOUNDED, (100.0, 3.0), [100.0, 2.0])],
)
def test_an_action_that_is_not_normalised_warns_once_and_is_clipped(
    space, action, expected, caplog
):
    policy_class = make_constant(*action)
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        for _ in range(2):
            worker = make_custom_worker(policy_class, lambda _: Line(action_space=space))
            worker.sample()
            worker.sample()
    (line,) = caplog.messages
    assert "returned the action 3," in line  # the one that is scaled
    assert "environment(normalize_actions=False)" in line
    np.testing.assert_allclose(worker.env.actions[0], expected, atol=1e-6)


@pytest.mark.parametrize("values", [(None, None), ([], None), (None, {}), (np.zeros(2), {})])
def test_states_and_extras_of_another_form_are_refused(values):
    class Short(Constant):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return super().compute_actions(obs_batch).actions, *values

    words = r"Short.compute_actions must return .*without a recurrent state \(actions, \[\], \{\}\)"
    with pytest.raises(UsageError, match=words):
        make_custom_worker(Short).sample()


def test_a_random_policy_draws_from_the_whole_space(caplog):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        worker = make_custom_worker(RandomPolicy, rollout_fragment_length=200)
        worker.sample()
    actions = np.array(worker.env.actions)
    assert not caplog.messages
    np.testing.assert_allclose(actions.min(0), [0.0, -2.0], atol=0.2)
    np.testing.assert_allclose(actions.max(0), [4.0, 2.0], atol=0.2)
    np.testing.assert_allclose(actions.mean(0), [2.0, 0.0], atol=0.4)


class Recording(Constant):
    """Takes all arguments that there are, and records them."""

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
        calls, lengths = self.__dict__.setdefault("calls", []), [x.length for x in episodes]
        calls.append((prev_action_batch.tolist(), prev_reward_batch.tolist(), info_batch, lengths))
        self.last = episodes, timestep
        return super().compute_actions(obs_batch)


@pytest.mark.parametrize("env", [Line, make_two_lines])
def test_a_policy_gets_the_arguments_of_its_signature(env):
    worker, agents = make_custom_worker(Recording, env), 1 if env is Line else 2
    policy = worker.get_policy()
    policy.on_global_var_update({"timestep": 7})
    batch = worker.sample().as_multi_agent()["default_policy"]
    none, same = [[0.0, 0.0]], [[0.5, 0.5]]
    first = (none * agents, [0.0] * agents, [{}] * agents, [0] * agents)
    later = [(same * agents, [t] * agents, [{"now": t}] * agents, [t] * agents) for t in (1, 2)]
    assert policy.calls == [first, *later, first]
    assert isinstance(policy.last[0][0], Episode)
    assert policy.last[0][0].worker is worker
    assert policy.last[1] == 7
    agent = batch["agent_index"] == 0
    assert batch["prev_rewards"][agent].tolist() == [0.0, 1.0, 2.0, 0.0]
    assert batch["prev_actions"][agent].tolist() == [*none, *same, *same, *none]
    for line in get_lines(worker):
        np.testing.assert_allclose(line.actions, [[3.0, 1.0]] * 4, atol=1e-6)
    policy.calls.clear()
    play(worker, 1, by_episodes=True)
    assert [lengths for *_, lengths in policy.calls] == [[t] * agents for t in range(3)]


def test_a_short_signature_gets_only_the_arguments_it_names():
    class Short(Policy):
        def compute_actions(self, obs_batch, state_batches=None, explore=None):
            return ActionBatch(np.zeros((len(obs_batch), 2)), [], {})

    worker = make_custom_worker(Short)
    batch = worker.sample()
    assert batch["prev_rewards"].tolist() == [0.0, 1.0, 2.0, 0.0]
    assert worker.sampler._tracker is None
    assert worker.get_policy().compute_single_action(np.zeros(1))[0].tolist() == [0.0, 0.0]


def test_an_input_dict_is_a_batch_with_previous_actions_and_rewards():
    seen = []

    class Own(Constant):
        def compute_actions_from_input_dict(self, input_dict, **kwargs):
            seen.append((type(input_dict), sorted(input_dict)))
            return super().compute_actions_from_input_dict(input_dict, **kwargs)

    make_custom_worker(Own).sample()
    assert seen == [(SampleBatch, ["obs", "prev_actions", "prev_rewards"])] * 4


@pytest.mark.parametrize("env", [Line, make_two_lines])
def test_a_memory_may_be_a_dict(env):
    class Remembering(Constant):
        def get_initial_state(self):
            return {"seen": np.zeros(1), "age": np.array([10.0, 20.0])}

        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            actions = super().compute_actions(obs_batch).actions
            after = {"seen": np.asarray(obs_batch), "age": state_batches["age"] + 1}
            before = {"seen_before": state_batches["seen"][:, 0], "age": state_batches["age"]}
            return ActionBatch(actions, after, before)

    worker = make_custom_worker(Remembering, env)
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


FILTER = {"observation_filter": "MeanStdFilter"}


class Watching(Constant):
    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        self.__dict__.setdefault("seen", []).extend(np.ravel(obs_batch).tolist())
        return super().compute_actions(obs_batch)


@pytest.mark.parametrize("env", [Line, make_two_lines])
def test_a_custom_policy_has_an_observation_filter(env):
    worker = make_custom_worker(Watching, env, rollout_fragment_length=3, **FILTER)
    policy, agents = worker.get_policy(), 1 if env is Line else 2
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
    policy.seen.clear()
    copies = [policy, policy.copy(), Policy.from_state(policy.get_state())]
    for copied in copies:
        copied.seen = []
        copied.driver.acting.act([np.array([[2.0]], np.float32)])
    assert copies[2].seen == copies[1].seen == policy.seen != [2.0]


def test_filters_of_a_custom_policy_are_in_its_checkpoint(tmp_path):
    worker = make_custom_worker(Watching, reward_filter="MeanStdFilter", **FILTER)
    worker.sample()
    worker.observation_filters.flush()
    policy = worker.get_policy()
    policy.export_checkpoint(tmp_path)
    loaded = Watching.from_checkpoint(tmp_path)
    for name in ("filter", "reward_filter"):
        assert_equal(*(getattr(x, name).get_state() for x in (loaded, policy)))


def test_evaluation_uses_the_filter_of_training():
    settings = {"train_batch_size": 6, "sgd_minibatch_size": 6, "rollout_fragment_length": 6}
    settings |= {"evaluation_duration": 1}
    policies = {"default_policy": (Watching, None, None, {})}
    algorithm = make_config(Line, **settings, **FILTER, policies=policies).build()
    algorithm.train()
    algorithm.evaluate()
    workers = (algorithm.worker, algorithm.evaluation_worker)
    trained, evaluated = (x.get_policy().filter.get_scalings()[0].mean.tolist() for x in workers)
    assert evaluated == trained != [0]
    algorithm.stop()


@pytest.mark.parametrize("env", [Line, make_two_lines])
def test_connectors_precede_a_custom_policy(env):
    connectors = [ClipObservations(0.0, 1.5)]
    settings = {"rollout_fragment_length": 3, "agent_connectors": connectors}
    worker = make_custom_worker(Watching, env, **settings)
    worker.sample()
    assert set(worker.get_policy().seen) == {0.0, 1.0, 1.5}
    for line in get_lines(worker):
        np.testing.assert_allclose(line.actions, [[3.0, 1.0]] * 3, atol=1e-6)


class Weighted(ConstantPolicy):
    """Its only weight is a Python number, as in RLlib's page about custom policies."""

    def __init__(self, *args):
        super().__init__(*args)
        self.w = 1.0

    def get_weights(self):
        return {"w": self.w}

    def set_weights(self, weights):
        self.w = weights["w"]


def test_weights_that_are_python_numbers_are_saved(tmp_path):
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    policy = Weighted(space, space, {})
    policy.w = 2.5
    policy.export_checkpoint(tmp_path / "policy")
    restored = Weighted.from_checkpoint(tmp_path / "policy")
    assert float(restored.w) == 2.5
