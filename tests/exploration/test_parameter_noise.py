"""Exploration by disturbed weights, against numbers computed by hand."""

import math

import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies.exploration.exploration_factory import make_exploration
from tfpolicies.exploration.parameter_noise import compute_action_distance, compute_softmax_distance
from tfpolicies.models.distributions import MASKED_LOGIT, ActionDistribution

pytestmark = pytest.mark.core

BIT, BOX = spaces.Discrete(2), spaces.Box(-1, 1, (2,))


def make(space=BIT, kind="ParameterNoise", **settings):
    return make_exploration({"type": kind, **settings}, ActionDistribution.for_space(space))


def test_weights_get_noise_of_deviation_sigma_and_other_variables_stay():
    exploration = make(initial_stddev=0.3)
    kernel, vector = np.ones((300, 300), np.float32), np.ones(9, np.float32)
    weights = {"layer_0/kernel": kernel, "layer_1/gamma": vector, "layer_1/beta#1": vector}
    weights |= {"layer_2/seed_generator_state": np.ones(2, np.uint32), "layer_3/kernel": kernel}
    disturbed = exploration.perturb(weights, np.random.default_rng(0))
    assert list(disturbed) == list(weights)
    for key, array in disturbed.items():
        assert (array.dtype, array.shape) == (weights[key].dtype, weights[key].shape)
        assert (weights[key] == 1).all()
        if key.endswith("kernel"):
            assert abs((array - 1).std() - 0.3) < 4 * 0.3 / math.sqrt(2 * 90_000)
        else:
            assert (array == 1).all()
    assert not np.array_equal(disturbed["layer_0/kernel"], disturbed["layer_3/kernel"])
    again = exploration.perturb(weights, np.random.default_rng(0))
    np.testing.assert_array_equal(again["layer_0/kernel"], disturbed["layer_0/kernel"])


def test_sigma_adapts_to_what_epsilon_greedy_would_do():
    sub = {"type": "EpsilonGreedy", "epsilon_schedule": 0.5}
    exploration = make(initial_stddev=1.0, sub_exploration=sub)
    exploration.get_params(0, explore=True)
    assert exploration.threshold == pytest.approx(-math.log(0.75))  # 0.2877
    clean = np.log(np.array([[0.5, 0.5]], np.float32))
    near = np.log(np.array([[0.25, 0.75]], np.float32))
    # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75) = 0.1438
    assert exploration.adapt(clean, near) == pytest.approx(0.5 * math.log(4 / 3), rel=1e-5)
    assert exploration.stddev == pytest.approx(1.01)
    far = np.log(np.array([[0.01, 0.99]], np.float32))
    assert exploration.adapt(clean, far) > 1
    assert exploration.stddev == pytest.approx(1.0)


def test_distances_of_cells_add_up_and_masked_actions_do_not_count():
    clean = np.log(np.array([[0.5, 0.5, 0.5, 0.5, 1.0], [0.5, 0.5, 0.5, 0.5, 1.0]]))
    clean[:, 4] = MASKED_LOGIT
    other = clean.copy()
    other[0, :2] = np.log([0.25, 0.75])
    other[:, 2:4] = np.log([0.75, 0.25])
    one = 0.5 * math.log(4 / 3)
    assert compute_softmax_distance(clean, other, [2, 3]) == pytest.approx(one / 2 + one)
    assert compute_softmax_distance(clean, clean, [2, 3]) == 0
    cells = make(spaces.MultiDiscrete([2, 3]), random_timesteps=0)
    expected = -math.log(0.99 + 0.01 / 2) - math.log(0.99 + 0.01 / 3)
    assert cells.threshold == pytest.approx(expected)


def test_sigma_adapts_to_what_action_noise_would_do():
    sub = {"type": "GaussianNoise", "stddev": 0.4, "initial_scale": 0.5, "random_timesteps": 0}
    exploration = make(BOX, sub_exploration=sub)
    exploration.get_params(0, explore=True)
    assert exploration.threshold == pytest.approx(0.2)
    clean = np.array([[0.0, 0.0, 5.0, 5.0]], np.float32)  # two means, two deviations
    assert exploration.adapt(clean, clean + np.array([0.1, -0.1, 3, 3])) == pytest.approx(0.1)
    assert exploration.stddev == pytest.approx(1.01)
    distance = exploration.adapt(clean, clean + np.array([0.3, -0.4, 0, 0]))
    assert distance == pytest.approx(math.sqrt(0.125))
    assert exploration.stddev == pytest.approx(1.0)
    assert compute_action_distance(clean, clean) == 0
    default = make(BOX, random_timesteps=0)
    default.get_params(0, explore=True)
    assert default.threshold == pytest.approx(0.2)


def test_new_noise_is_due_when_an_episode_begins():
    exploration = make()
    assert exploration.needs_complete_episodes
    assert not make(kind="StochasticSampling").needs_complete_episodes
    assert exploration.needs_perturbation
    exploration.perturb({}, np.random.default_rng(0))
    exploration.on_episode_end()
    assert not exploration.needs_perturbation
    exploration.on_episode_start()
    assert exploration.needs_perturbation


def test_first_steps_are_random_and_later_ones_hardly():
    exploration = make(random_timesteps=100)
    epsilons = [float(exploration.get_params(t, explore=True)[0]) for t in (0, 100, 101, 10**6)]
    assert epsilons == pytest.approx([1, 1, 0.01, 0.01])
    box = make(BOX, random_timesteps=100)
    assert [float(box.get_params(t, explore=True)[0]) for t in (99, 100)] == [1, 0]


def test_sigma_and_the_sub_exploration_are_kept():
    exploration = make(initial_stddev=0.5)
    exploration.get_params(77, explore=True)
    exploration.stddev = 0.25
    state = exploration.get_state()
    sub = {"cur_epsilon": 1.0, "last_timestep": 77}
    assert state == {"cur_stddev": 0.25, "sub_exploration": sub}
    copy = make()
    copy.set_state(state)
    assert copy.get_state() == state
