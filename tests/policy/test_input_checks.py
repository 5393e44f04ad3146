"""Checks of observations, actions and results of environments: types, ranges, NaN, masks."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from helpers.constant_policies import ConstantPolicy
from helpers.factories import OBS, PLANE, TWO, batch_for, make
from helpers.short_envs import PairEnv, ShortEnv
from helpers.workers import make_config
from tfpolicies import PolicyMap
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.multi_agent_env import GroupedAgentsEnv
from tfpolicies.envs.vector_adapters import GymVectorEnvAdapter, SyncEnvAdapter
from tfpolicies.errors import BatchError, EnvError, ObservationError, UsageError

NAN = np.array([[0.0, 1.0, 2.0], [0.0, np.nan, 0.0]], np.float32)
NESTED = spaces.Dict(camera=spaces.Box(-9, 9, (2, 2), np.float32), speed=spaces.Box(-9, 9, (1,)))
MASKED = spaces.Dict(observations=OBS, action_mask=spaces.MultiBinary(5))


def make_masked(allowed):
    """Returns observations with a mask for each row."""
    allowed = np.array(allowed, np.int8)
    return {"observations": np.zeros((len(allowed), 3), np.float32), "action_mask": allowed}


def get_calls(policy, obs):
    """Returns all ways of acting on rows of observations."""
    first = {k: x[-1] for k, x in obs.items()} if isinstance(obs, dict) else obs[-1]
    rows = len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
    return [
        lambda: policy.compute_actions(obs),
        lambda: policy.compute_actions_from_input_dict({"obs": obs}),
        lambda: policy.compute_single_action(first),
        lambda: policy.session().act(first),
        lambda: policy.session(rows).act(obs),
    ]


def assert_refused(policy, obs, words):
    for act in get_calls(policy, obs):
        with pytest.raises(ObservationError, match=words):
            act()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_observations_that_are_not_finite_are_refused_by_row_and_value(value):
    policy = make()
    obs = np.zeros((40, 3), np.float32)
    obs[-1, 1] = value
    before = policy.get_state()
    assert_refused(policy, obs, rf"obs\[\d+, 1\] is {value}")
    with pytest.raises(ObservationError, match=r"obs\[39, 1\]"):
        policy.compute_actions(obs)
    after = policy.get_state()
    assert after["rng"] == before["rng"]
    assert after["global_timestep"] == before["global_timestep"]


def test_large_finite_observations_are_acted_on():
    policy = make()
    for rows in (1, 40):
        assert len(policy.compute_actions(np.full((rows, 3), 1e38, np.float32)).actions) == rows


def test_numbers_that_would_change_on_their_way_to_the_dtype_of_the_space_are_refused():
    policy = make(obs=spaces.Box(0, 255, (3,), np.uint8))
    whole = np.array([[0, 128, 255], [1, 2, 3]], np.uint8)
    expected = policy.compute_actions(whole, explore=False).extras["action_dist_inputs"]
    for same in (whole.astype(np.float32), whole.astype(np.int64), whole.tolist()):
        acted = policy.compute_actions(same, explore=False)
        np.testing.assert_array_equal(acted.extras["action_dist_inputs"], expected)
    scaled = (whole / 255).astype(np.float32)
    assert_refused(policy, scaled, r"numbers of uint8, .*\] is 0\.[05]\d+\. Pass")
    for value in (256, -1):
        with pytest.raises(ObservationError, match=rf"obs_batch\[1, 2\] is {value}\. Pass"):
            policy.compute_actions(np.array([[0, 0, 0], [0, 0, value]]))


def test_the_leaf_of_a_nested_observation_is_named():
    policy = make(obs=NESTED)
    obs = {"camera": np.zeros((2, 2, 2), np.float32), "speed": np.zeros((2, 1), np.float32)}
    obs["camera"][1, 0, 1] = np.inf
    with pytest.raises(ObservationError, match=r"obs_camera\[1, 0, 1\] is inf"):
        policy.compute_actions(obs)


def test_memory_and_previous_rewards_that_are_not_finite_are_refused():
    settings = {"use_lstm": True, "lstm_cell_size": 2, "lstm_use_prev_reward": True}
    policy = make(model={"fcnet_hiddens": [4], **settings})
    state, obs = policy.get_initial_state(), np.zeros(3, np.float32)
    with pytest.raises(ObservationError, match=r"prev_rewards\[0\] is nan"):
        policy.compute_single_action(obs, state, prev_reward=np.nan)
    with pytest.raises(ObservationError, match=r"state_in_1\[0, 1\] is inf"):
        policy.compute_single_action(obs, [state[0], np.array([0, np.inf])], prev_reward=0.0)
    with pytest.raises(ObservationError, match="real numbers"):
        policy.compute_single_action(obs, state, prev_reward="1.0")
    session = policy.session()
    with pytest.raises(ObservationError, match="reward"):
        session.act(obs, np.nan)
    session.act(obs, 1.0)


@pytest.mark.parametrize(
    ("actions", "mask", "words"),
    [
        (spaces.Discrete(5), [0, 0, 0, 0, 0], "row 1 is"),
        (spaces.MultiDiscrete([2, 3]), [1, 0, 0, 0, 0], "row 1, columns 2 to 4"),
    ],
)
def test_a_mask_without_an_allowed_action_is_refused(actions, mask, words):
    policy, obs = make(obs=MASKED, actions=actions), make_masked([[1] * 5, mask])
    assert_refused(policy, obs, "allow an action")
    with pytest.raises(ObservationError, match=words):
        policy.compute_actions(obs)
    allowed = policy.compute_actions(make_masked([[1] * 5] * 2)).actions
    policy.compute_log_likelihoods(allowed, obs)  # acts on no row of the mask


@pytest.mark.parametrize(
    ("space", "good", "bad", "words"),
    [
        (spaces.Discrete(7), 6, 9, r"from 0 to 6, but obs\[1\] is 9"),
        (spaces.Discrete(7, start=-2), -2, -3, r"from -2 to 4, but obs\[1\] is -3"),
        (spaces.MultiDiscrete([2, 3]), [1, 2], [1, 3], r"from 0 to 2, but obs\[1, 1\] is 3"),
        (spaces.MultiDiscrete([2, 3]), [1, 2], [-1, 2], r"from 0 to 1, but obs\[1, 0\] is -1"),
    ],
)
def test_choices_that_are_not_of_their_space_are_refused_by_row_and_range(space, good, bad, words):
    policy = make(obs=space)
    policy.compute_actions(np.array([good, good]))
    assert_refused(policy, np.array([good, bad]), "Choices must be in their space")
    with pytest.raises(ObservationError, match=words):
        policy.compute_actions(np.array([good, bad]))
    make(obs=space, check_inputs=False).compute_actions(np.array([good, bad]))


def test_masks_may_forbid_all_bits_of_a_multi_binary_and_have_no_rows():
    policy = make(obs=MASKED, actions=spaces.MultiBinary(5))
    assert policy.compute_actions(make_masked([[0] * 5])).actions.tolist() == [[0] * 5]
    policy = make(obs=MASKED, actions=spaces.Discrete(5))
    assert len(policy.compute_actions(make_masked(np.zeros((0, 5)))).actions) == 0


def test_check_inputs_false_takes_observations_as_they_are():
    policy = make(check_inputs=False)
    for act in get_calls(policy, NAN):
        act()
    masked = make(obs=MASKED, actions=spaces.Discrete(5), check_inputs=False)
    masked.compute_actions(make_masked([[0] * 5]))


def test_many_policies_name_the_one_whose_observations_are_not_finite():
    policies = PolicyMap(capacity=4)
    for name in ("a", "b", "c"):
        policies[name] = make()
    good = np.zeros((2, 3), np.float32)
    with pytest.raises(ObservationError, match=r"Policy 'b': .*obs\[1, 1\] is nan"):
        policies.compute_actions({"a": good, "b": NAN, "c": good})


def test_the_session_of_a_custom_policy_checks_observations():
    with pytest.raises(ObservationError, match="nan"):
        ConstantPolicy(OBS, TWO, {}).session().act(NAN[1])
    ConstantPolicy(OBS, TWO, {"check_inputs": False}).session().act(NAN[1])


def test_algorithms_refuse_infinite_observations():
    algorithm = make_config("CartPole-v1", train_batch_size=128).build()
    with pytest.raises(ObservationError, match="inf"):
        algorithm.compute_single_action(np.array([0, 0, np.inf, 0], np.float32))
    algorithm.stop()


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([["1", "2", "3"]]),
        np.array([[1.0, 2.0, None]], object),
        np.ones((1, 3), complex),
        [["1", "2", "3"]],
    ],
)
def test_texts_objects_and_complex_numbers_are_refused_as_observations(wrong):
    assert_refused(make(), wrong, "real numbers")


def test_texts_and_complex_numbers_are_refused_as_actions_and_columns():
    policy = make(actions=PLANE)
    obs = np.zeros((1, 3), np.float32)
    for wrong in (np.array([["0", "0"]]), np.zeros((1, 2), complex)):
        with pytest.raises(ObservationError, match="real numbers"):
            policy.compute_log_likelihoods(wrong, obs)
    with pytest.raises(ObservationError, match="integers"):
        make(obs=spaces.Discrete(3)).compute_actions(np.array([np.nan]))
    batch = batch_for(policy, 4)
    batch["advantages"] = batch["advantages"].astype(complex)
    with pytest.raises(BatchError, match="real numbers"):
        policy.learn_on_batch(batch)
    assert issubclass(UsageError, ValueError)


class Giving(ShortEnv):
    """Returns the values of its arguments from `step`."""

    observation_space = spaces.Box(-9.0, 9.0, (3,), np.float32)

    def __init__(self, **values):
        self.values = {"obs": np.zeros(3), "reward": 1.0, "ended": False, "cut": False, **values}

    def step(self, action):
        return *self.values.values(), {}


def make_envs(*envs):
    adapter = SyncEnvAdapter(envs)
    adapter.reset(None)
    return adapter


WRONG = [
    ("ended", "False", "terminated='False'"),
    ("cut", "", "truncated=''"),
    ("cut", None, "truncated=None"),
    ("ended", 2, "terminated=2"),
    ("reward", "1.0", "reward of .* must be a finite number, got '1.0'"),
    ("reward", 1j, "reward of .* must be a finite number, got 1j"),
    ("obs", np.array(["1", "2", "3"]), "real numbers"),
    ("obs", np.ones(3, complex), "real numbers"),
    ("obs", np.array([1, 2, 3], object), "real numbers"),
]


@pytest.mark.parametrize(("part", "value", "words"), WRONG)
def test_results_of_an_environment_that_are_not_numbers_or_flags_are_refused(part, value, words):
    envs = make_envs(Giving(), Giving(**{part: value}))
    with pytest.raises(EnvError, match=words) as result:
        envs.step(np.zeros(2, np.int64))
    assert "environment 1" in str(result.value)


def test_flags_may_be_zero_and_one_and_observations_of_other_dtypes():
    envs = make_envs(Giving(ended=0, cut=np.bool_(False), reward=np.int32(2), obs=[1, 2, 3]))
    step = envs.step(np.zeros(1, np.int64))
    assert (step.terminateds.dtype, step.rewards.tolist()) == (bool, [2.0])
    assert step.obs.tolist() == [[1.0, 2.0, 3.0]]
    floats = Giving(obs=np.array([1.0, 2.0, 3.0]))
    floats.observation_space = spaces.Box(0, 255, (3,), np.uint8)
    assert make_envs(floats).step(np.zeros(1, np.int64)).obs.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        (1, np.array([1.0, 1j]), "reward"),
        (1, np.array(["1", "2"]), "reward"),
        (2, np.array(["False", "False"]), "terminated='False'"),
        (3, np.array([0, 2]), "truncated=2"),
        (0, np.ones((2, 3), complex), "real numbers"),
    ],
)
def test_results_of_a_vector_environment_are_checked(part, value, words):
    env = SyncVectorEnv([Giving, Giving])
    results = [np.zeros((2, 3), np.float32), np.ones(2), np.zeros(2, bool), np.zeros(2, bool), {}]
    results[part] = value
    env.step = lambda actions: tuple(results)
    envs = GymVectorEnvAdapter(env)
    envs.reset(None)
    with pytest.raises(EnvError, match=words):
        envs.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("agent", ["a", "__all__"])
def test_flags_of_several_agents_are_flags(agent):
    envs = MultiAgentEnvAdapter([PairEnv(**{agent: "False"})])
    envs.reset(0)
    with pytest.raises(EnvError, match=rf"terminateds\['{agent}'\]='False'"):
        envs.step(0, {"a": 0, "b": 0})
    MultiAgentEnvAdapter([PairEnv(a=0, b=np.False_)]).step(0, {})


def test_flags_of_grouped_agents_are_flags():
    env = PairEnv(a="False").with_agent_groups({"both": ["a", "b"]})
    assert isinstance(env, GroupedAgentsEnv)
    env.reset()
    with pytest.raises(EnvError, match="'False'"):
        env.step({"both": (0, 0)})
