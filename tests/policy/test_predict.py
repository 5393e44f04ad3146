"""`policy.predict`: greedy actions for the environment, by one call."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import PLANE as PAIR
from helpers.factories import make
from helpers.linear_policies import make_linear
from helpers.short_envs import ShortEnv
from helpers.workers import make_config
from tfpolicies import Policy, PPOTF1Policy, PPOTF2Policy, SACTF2Policy
from tfpolicies.errors import ObservationError, UsageError
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.policy.policy import ActionBatch

TEN = spaces.Box(0.0, 10.0, (1,))
NESTED = spaces.Dict(place=PAIR, mode=spaces.Discrete(3))
LSTM = {"fcnet_hiddens": [3], "use_lstm": True, "lstm_cell_size": 4}


def make_identity(policy_class=PPOTF2Policy):
    """Makes a policy of Box(0, 10) whose normalised mean is x0: 0.5 is 7.5 for the environment."""
    return make_linear(1.0, policy_class, obs=PAIR, actions=TEN)


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_actions_are_in_the_units_of_the_environment(policy_class):
    policy = make_identity(policy_class)
    np.testing.assert_allclose(policy.predict(np.float32([0.5, 0.0])), [7.5], atol=1e-5)
    np.testing.assert_allclose(policy.predict([[0.5, 0], [-1, 0]]), [[7.5], [0.0]], atol=1e-5)
    assert policy.predict(np.zeros((0, 2), np.float32)).shape == (0, 1)


def test_actions_are_greedy_by_default():
    policy, obs = make_identity(), np.float32([[0.5, 0.0]] * 20)
    assert np.ptp(policy.predict(obs)) == 0.0
    assert np.ptp(policy.predict(obs, explore=True)) > 0.0
    assert np.ptp(policy.predict(obs, explore=None)) > 0.0  # as the config says
    greedy = policy.session(explore=False)
    assert greedy.act(obs[0]) == policy.predict(obs[0])
    assert np.ptp([greedy.act(obs[0], explore=True) for _ in range(20)]) > 0.0


def test_nested_observations_are_distinguished_from_batches():
    policy = make(PPOTF2Policy, NESTED, spaces.Discrete(4))
    one = {"place": np.float32([0.1, 0.2]), "mode": 2}
    two = {"place": np.float32([[0.1, 0.2], [0.5, 0.5]]), "mode": np.array([2, 0])}
    action, actions = policy.predict(one), policy.predict(two)
    assert (np.shape(action), actions.shape) == ((), (2,))
    assert actions[0] == action
    assert policy.predict({"place": [[0.1, 0.2]], "mode": [2]}, batched=True) == [action]


def test_a_discrete_observation_is_one_and_a_list_of_them_a_batch():
    policy = make(PPOTF2Policy, spaces.Discrete(5), PAIR)
    assert policy.predict(3).shape == (2,)
    np.testing.assert_array_equal(policy.predict([3, 1])[0], policy.predict(3))


@pytest.mark.parametrize("memory", [LSTM, {"use_attention": True, "fcnet_hiddens": [3]}])
def test_a_recurrent_state_passes_from_call_to_call(memory):
    policy = make(PPOTF2Policy, PAIR, TEN, model=memory)
    session, pair = policy.session(explore=False), policy.session(2, explore=False)
    state = states = None
    for step in np.random.default_rng(0).uniform(-1, 1, (4, 2, 2)).astype(np.float32):
        action, state = policy.predict(step[0], state)
        np.testing.assert_allclose(action, session.act(step[0]), atol=1e-6)
        actions, states = policy.predict(step, states)
        np.testing.assert_allclose(actions, pair.act(step), atol=1e-6)


def test_initial_states_are_a_state():
    policy = make(PPOTF2Policy, PAIR, spaces.Discrete(2), model=LSTM)
    obs = np.float32([[0.5, 0.5], [0.1, 0.3]])
    first, _ = policy.predict(obs)
    np.testing.assert_array_equal(policy.predict(obs, policy.get_initial_state())[0], first)
    half = [np.full((2, 4), 0.5, np.float32)] * 2
    _, after = policy.predict(obs, half)
    again = policy.compute_actions(obs, half, explore=False)
    np.testing.assert_allclose(after["state_0"], again.state_outs[0], atol=1e-6)


@pytest.mark.parametrize("state", [[np.zeros(3)], {"state_0": np.zeros((1, 4))}, 3, "now"])
def test_a_state_of_something_else_is_refused(state):
    policy = make(PPOTF2Policy, PAIR, spaces.Discrete(2), model=LSTM)
    words = "state must be the state that the last call of predict returned"
    state_of_one = policy.predict([0.0, 0.0])[1]
    for obs, wrong in (([0.0, 0.0], state), ([[0.0, 0.0]] * 2, state_of_one)):
        with pytest.raises(UsageError, match=words):
            policy.predict(obs, wrong)


def test_predictions_are_those_of_the_export(tmp_path):
    policy = make(SACTF2Policy, PAIR, spaces.Box(-2.0, 3.0, (1,)))
    policy.export_model(tmp_path, onnx=True)
    obs = np.random.default_rng(0).uniform(-1, 1, (32, 2)).astype(np.float32)
    np.testing.assert_allclose(policy.predict(obs), OnnxPolicy(tmp_path).act(obs), atol=1e-5)


def test_a_custom_policy_predicts():
    class Halves(Policy):
        def compute_actions(self, obs_batch, state_batches=None, explore=None, **kwargs):
            assert explore is False
            return ActionBatch(np.asarray(obs_batch)[:, :1] / 2, [], {})

    policy = Halves(PAIR, TEN, {})
    np.testing.assert_allclose(policy.predict([0.5, 0.0]), [6.25])
    np.testing.assert_allclose(policy.predict([[0.5, 0.0], [0.0, 0.0]]), [[6.25], [5.0]])


@pytest.mark.parametrize("obs", [[np.nan, 0.0], [0.0, 0.0, 0.0], [[[0.0, 0.0]]], "left"])
def test_observations_that_do_not_fit_are_refused(obs):
    with pytest.raises(ObservationError):
        make_identity().predict(obs)


def test_the_caller_may_change_a_prediction():
    policy = make_identity()
    first = policy.predict([0.5, 0.0])
    first += 1.0
    np.testing.assert_allclose(policy.predict([0.5, 0.0]), [7.5], atol=1e-5)
    np.testing.assert_allclose(first, [8.5], atol=1e-5)


def test_predict_is_what_the_algorithm_computes_greedily():
    class Env(ShortEnv):
        observation_space, action_space = PAIR, TEN

    algorithm = make_config(Env).build()
    obs = np.float32([0.5, 0.0])
    expected = algorithm.compute_single_action(obs, explore=False)
    np.testing.assert_allclose(algorithm.get_policy().predict(obs), expected, atol=1e-6)
    algorithm.stop()
