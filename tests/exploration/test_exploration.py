"""Exploration strategies: frequencies of actions, states, schedules, refusals."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.arrays import assert_arrays_close, assert_arrays_equal
from helpers.onnx_runtime import load_in_onnx_runtime
from helpers.probability import assert_frequencies, softmax
from tfpolicies.errors import ConfigError, WeightsError
from tfpolicies.exploration.exploration import Exploration
from tfpolicies.exploration.exploration_factory import STRATEGIES, make_exploration
from tfpolicies.exploration.strategies import EpsilonGreedy
from tfpolicies.models.distributions import MASKED_LOGIT, ActionDistribution

pytestmark = pytest.mark.usefixtures("kept_programs")

DISCRETE = spaces.Discrete(4)
CELLS = spaces.MultiDiscrete([2, 4, 3])
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
NESTED = spaces.Dict(
    bits=spaces.MultiBinary(2), cells=spaces.Box(3, 5, (2,), np.int64), one=spaces.Discrete(3)
)
MIXED = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,))])
STOCHASTIC = ["StochasticSampling", "Random"]
GREEDY = ["EpsilonGreedy", "PerWorkerEpsilonGreedy"]
NOISES = ["GaussianNoise", "OrnsteinUhlenbeckNoise", "ParameterNoise"]
DISCRETE_KINDS = [*STOCHASTIC, *GREEDY, "SoftQ", "ParameterNoise"]
CASES = [
    *[(kind, space) for space in (DISCRETE, CELLS) for kind in DISCRETE_KINDS],
    *[(kind, NESTED) for kind in [*STOCHASTIC, *GREEDY]],
    *[(kind, MIXED) for kind in STOCHASTIC],
    *[(kind, BOX) for kind in [*STOCHASTIC, *NOISES]],
]
ONNX_CASES = [
    ("StochasticSampling", NESTED),
    ("Random", MIXED),
    ("EpsilonGreedy", NESTED),
    ("EpsilonGreedy", CELLS),
    ("PerWorkerEpsilonGreedy", DISCRETE),
    ("SoftQ", CELLS),
    *[(kind, BOX) for kind in NOISES],
]
EXTREME = {  # a temperature that takes masked logits beyond what float32 holds
    "SoftQ": {"random_timesteps": 10, "temperature": 0.01},
    "StochasticSampling": {"random_timesteps": 10},
}


def ids(cases):
    return [f"{kind}-{type(space).__name__}" for kind, space in cases]


def make(kind, space, *, normalize_actions=False, worker_index=0, num_workers=0, **settings):
    dist_class = ActionDistribution.for_space(space)
    exploration = make_exploration(
        {"type": kind, **settings},
        dist_class,
        worker_index=worker_index,
        num_workers=num_workers,
        normalize_actions=normalize_actions,
    )
    return exploration, dist_class


def act_at(timestep, exploration, dist_class, inputs):
    return act(exploration, dist_class, inputs, exploration.get_params(timestep, explore=True))


def act(exploration, dist_class, inputs, params, noise=None):
    if noise is None:
        noise = exploration.draw_noise(np.random.default_rng(0), len(inputs), params)
    assert noise.shape == (len(inputs), exploration.transform.noise_size)
    assert noise.dtype == params.dtype == np.float32
    assert params.shape == (exploration.transform.num_params,)
    distribution = dist_class(tf.constant(inputs, tf.float32))
    actions, logp = exploration.transform.apply(
        distribution, tf.constant(noise), tf.constant(params)
    )
    return [action.numpy() for action in actions], logp.numpy()


def tile(row, rows=100_000):
    return np.tile(np.array(row, np.float32), (rows, 1))


def random_inputs(dist_class, rows=64):
    return np.random.default_rng(5).normal(size=(rows, dist_class.num_inputs)).astype(np.float32)


@pytest.mark.parametrize(("kind", "space"), CASES, ids=ids(CASES))
def test_zero_noise_is_greedy_whatever_the_parameters(kind, space):
    exploration, dist_class = make(kind, space)
    inputs = 3 * random_inputs(dist_class)  # beyond the Box's bounds, too
    greedy = dist_class(tf.constant(inputs)).sample_leaves(tf.zeros([64, dist_class.noise_size]))
    noise = np.zeros((64, exploration.transform.noise_size), np.float32)
    reached = [exploration.get_params(t, explore) for t in (0, 10**7) for explore in (True, False)]
    for params in (*reached, np.zeros(exploration.transform.num_params, np.float32)):
        actions, logp = act(exploration, dist_class, inputs, params, noise=noise)
        assert logp.shape == (64,)
        assert [action.dtype for action in actions] == [x.numpy().dtype for x in greedy]
        assert_arrays_equal(actions, greedy)


@pytest.mark.parametrize(("kind", "space"), ONNX_CASES, ids=ids(ONNX_CASES))
def test_onnx_runtime_acts_alike(kind, space):
    exploration, dist_class = make(kind, space, **EXTREME.get(kind, {}))
    inputs = random_inputs(dist_class)
    if space in (DISCRETE, CELLS):
        inputs[::2, 1] = MASKED_LOGIT

    @tf.function(autograph=False)
    def function(inputs, noise, params):
        actions, logp = exploration.transform.apply(dist_class(inputs), noise, params)
        return [*[tf.cast(action, tf.float32) for action in actions], logp]

    signature = [
        tf.TensorSpec([None, dist_class.num_inputs], tf.float32, name="inputs"),
        tf.TensorSpec([None, exploration.transform.noise_size], tf.float32, name="noise"),
        tf.TensorSpec([exploration.transform.num_params], tf.float32, name="params"),
    ]
    names = [f"out_{i}" for i in range(len(dist_class.leaves) + 1)]
    run = load_in_onnx_runtime(function, signature, names)
    for timestep in (0, 5_000, 10**7):
        params = exploration.get_params(timestep, explore=True)
        noise = exploration.draw_noise(np.random.default_rng(timestep), 64, params)
        outputs = run({"inputs": inputs, "noise": noise, "params": params})
        actions, logp = act(exploration, dist_class, inputs, params, noise=noise)
        assert_arrays_close(outputs, [*actions, logp], rtol=1e-5)


@pytest.mark.parametrize("timestep", [0, 50_000])
@pytest.mark.parametrize("kind", DISCRETE_KINDS)
def test_masked_actions_are_never_picked(kind, timestep):
    one, cells = (make(kind, space, **EXTREME.get(kind, {})) for space in (DISCRETE, CELLS))
    row = [0.0, MASKED_LOGIT, -50.0, MASKED_LOGIT]
    (actions,), logp = act_at(timestep, *one, tile(row))
    assert set(actions.tolist()) <= {0, 2}
    assert np.isfinite(logp).all()
    row = [1.0, MASKED_LOGIT, *row, MASKED_LOGIT, MASKED_LOGIT, 0.0]
    (actions,), logp = act_at(timestep, *cells, tile(row))
    assert set(map(tuple, actions.tolist())) <= {(0, 0, 2), (0, 2, 2)}
    assert np.isfinite(logp).all()
    (actions,), logp = act_at(timestep, *cells, tile([MASKED_LOGIT] * 9, 50))  # none is allowed
    assert (actions >= 0).all()
    assert (actions < [2, 4, 3]).all()
    assert np.isfinite(logp).all()


@pytest.mark.parametrize(("kind", "space"), CASES, ids=ids(CASES))
def test_a_restored_state_continues_alike(kind, space):
    exploration, dist_class = make(kind, space)
    for timestep in (2_000, 20_000):
        params = exploration.get_params(timestep, explore=True)
        exploration.draw_noise(np.random.default_rng(1), 3, params)
    state = exploration.get_state()
    plain = json.loads(json.dumps(state, default=np.ndarray.tolist))
    copy, _ = make(kind, space)
    copy.set_state(plain)
    assert json.dumps(copy.get_state(), default=np.ndarray.tolist) == json.dumps(plain)
    inputs = random_inputs(dist_class)
    actions, expected = (act_at(20_000, x, dist_class, inputs)[0] for x in (copy, exploration))
    assert_arrays_equal(actions, expected)
    with pytest.raises(WeightsError, match="another `exploration_config`"):
        exploration.set_state({"foreign": 1})


def test_sampling_is_that_of_the_distribution():
    exploration, dist_class = make(None, DISCRETE)
    inputs, rng = random_inputs(dist_class), np.random.default_rng(0)
    noise = dist_class.draw_noise(rng, 64)
    distribution = dist_class(tf.constant(inputs))
    (actions,), logp = act_at(0, exploration, dist_class, inputs)
    np.testing.assert_array_equal(actions, distribution.sample(noise))
    np.testing.assert_allclose(logp, distribution.logp(actions), rtol=1e-6)
    assert (exploration.transform.num_params, exploration.transform.noise_size) == (0, 4)
    assert exploration.get_state() == {}


def test_first_steps_are_random_and_later_ones_sampled():
    exploration, dist_class = make("StochasticSampling", DISCRETE, random_timesteps=10)
    row = [2.0, 0.0, MASKED_LOGIT, 1.0]
    for timestep, expected in ((9, [1 / 3, 1 / 3, 0, 1 / 3]), (10, softmax([2, 0, -99, 1]))):
        (actions,), logp = act_at(timestep, exploration, dist_class, tile(row))
        assert_frequencies(actions, expected)  # but logp is the distribution's in both cases
        np.testing.assert_allclose(logp, np.log(softmax([2, 0, -99, 1]))[actions], rtol=1e-5)
    assert exploration.get_params(9, explore=False).tolist() == [0]


def test_soft_q_samples_logits_divided_by_the_temperature():
    row = [1.0, 0.5, -1.0, 0.0]
    for temperature in (0.5, 2.0):
        (actions,), logp = act_at(0, *make("SoftQ", DISCRETE, temperature=temperature), tile(row))
        expected = softmax(np.array(row) / temperature)
        assert_frequencies(actions, expected)
        np.testing.assert_allclose(logp, np.log(expected)[actions], rtol=1e-5)


def test_random_is_uniform_over_every_kind_of_space():
    integers = [spaces.Discrete(3), spaces.MultiBinary(1), spaces.Box(3, 5, (1,), np.int64)]
    bounds = [(-2.0, 6.0), (-np.inf, np.inf), (0.0, np.inf)]
    space = spaces.Tuple([*integers, *(spaces.Box(low, high, (1,)) for low, high in bounds)])
    exploration, dist_class = make("Random", space)
    rows = np.zeros((100_000, dist_class.num_inputs), np.float32)
    actions, logp = act_at(0, exploration, dist_class, rows)
    one, bit, cell, box, free, positive = actions
    assert_frequencies(one, [1 / 3] * 3)
    assert_frequencies(bit, [0.5, 0.5])
    assert_frequencies(cell, [1 / 3] * 3)
    assert_frequencies((box.ravel() + 2).astype(int), [1 / 8] * 8)
    assert (box >= -2).all()
    assert (box <= 6).all()
    assert abs(free.mean()) < 4 / math.sqrt(100_000)
    assert abs(free.var() - 1) < 4 * math.sqrt(2 / 100_000)
    assert (positive >= 0).all()
    assert_frequencies((positive.ravel() > 0).astype(int), [0.5, 0.5])
    assert not logp.any()


def test_random_actions_of_normalised_policies_are_normalised():
    for kind, timestep in (("Random", 10**6), ("GaussianNoise", 0), ("GaussianNoise", 10**6)):
        settings = {"stddev": 5.0} if kind == "GaussianNoise" else {}
        exploration = make(kind, BOX, normalize_actions=True, **settings)
        (actions,), _ = act_at(timestep, *exploration, tile([0.0] * 4, 1000))
        assert (np.abs(actions) <= 1).all()
    huge = np.finfo(np.float32).max
    exploration = make("Random", spaces.Box(-huge, huge, (1,)))
    (actions,), _ = act_at(0, *exploration, tile([0.0] * 2, 100))
    assert np.isfinite(actions).all()


def test_epsilon_greedy_picks_valid_actions_at_the_rate_of_epsilon():
    exploration = make("EpsilonGreedy", DISCRETE, epsilon_schedule=0.3)
    (actions,), logp = act_at(0, *exploration, tile([1.0, MASKED_LOGIT, 2.0, 0.0]))
    assert_frequencies(actions, [0.1, 0, 0.8, 0.1])
    assert not logp.any()
    exploration = make("EpsilonGreedy", NESTED, epsilon_schedule=0.5)
    row = [1.0, -1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]  # greedy: 1 0, 1 1, 2
    (bits, cells, one), _ = act_at(0, *exploration, tile(row))
    assert_frequencies(one, [1 / 6, 1 / 6, 2 / 3])
    greedy = (bits == [1, 0]).all(1) & (cells == [1, 1]).all(1) & (one == 2)
    share = 0.5 + 0.5 / (4 * 9 * 3)  # one coin for the whole row
    assert_frequencies(greedy.astype(int), [1 - share, share])


def test_epsilon_follows_its_schedule():
    settings = {"initial_epsilon": 0.8, "final_epsilon": 0.2}
    settings |= {"warmup_timesteps": 10, "epsilon_timesteps": 20}
    exploration, _ = make("EpsilonGreedy", DISCRETE, **settings)
    for timestep, epsilon in {0: 0.8, 10: 0.8, 20: 0.5, 30: 0.2, 99: 0.2}.items():
        assert exploration.get_params(timestep, explore=True) == pytest.approx([epsilon])
        assert exploration.get_params(timestep, explore=False).tolist() == [0]
        state = {"cur_epsilon": pytest.approx(epsilon), "last_timestep": timestep}
        assert exploration.get_state() == state
    at_once, _ = make("EpsilonGreedy", DISCRETE, epsilon_timesteps=0)
    assert at_once.get_params(0, explore=True) == pytest.approx([0.05])
    for schedule in ([[0, 1.0], [4, 0.0]], lambda timestep: 1 - timestep / 4):
        exploration, _ = make("EpsilonGreedy", DISCRETE, epsilon_schedule=schedule)
        numbers = [exploration.get_params(t, explore=True)[0] for t in (0, 1, 4, 9)]
        assert numbers == [1.0, 0.75, 0.0, 0.0]


def test_each_worker_has_its_own_epsilon():
    epsilons = []
    for index in range(4):
        exploration, _ = make("PerWorkerEpsilonGreedy", DISCRETE, worker_index=index, num_workers=3)
        epsilons.append(float(exploration.get_params(123, explore=True)[0]))
    assert epsilons == pytest.approx([0.0, 0.4, 0.4**4.5, 0.4**8])
    alone, _ = make("PerWorkerEpsilonGreedy", DISCRETE, worker_index=1, num_workers=1)
    assert alone.get_params(0, explore=True) == pytest.approx([0.4])
    local, _ = make("PerWorkerEpsilonGreedy", DISCRETE, initial_epsilon=0.7)
    assert local.get_params(0, explore=True) == pytest.approx([0.7])


def test_gaussian_noise_has_its_deviation_and_stays_within_bounds():
    exploration, dist_class = make("GaussianNoise", BOX, stddev=0.5, scale_timesteps=100)
    assert exploration.get_params(1050, explore=True) == pytest.approx([0, 0.5 * 0.51])
    assert exploration.get_state() == {"cur_scale": pytest.approx(0.51), "last_timestep": 1050}
    assert exploration.get_params(0, explore=True)[0] == 1
    assert exploration.get_params(0, explore=False)[0] == 0
    (actions,), logp = act_at(1000, exploration, dist_class, tile([0.0, 0.0, 9.0, 9.0]))
    assert abs(actions[:, 0].std() - 0.5) < 4 * 0.5 / math.sqrt(2e5)
    assert abs(actions[:, 0].mean()) < 4 * 0.5 / math.sqrt(1e5)
    assert_frequencies((actions[:, 1] > 0).astype(int), [0.5, 0.5])
    assert actions[:, 1].min() == 0
    assert not logp.any()


def test_ornstein_uhlenbeck_noise_wanders_for_all_rows_together():
    exploration, dist_class = make(
        "OrnsteinUhlenbeckNoise", BOX, random_timesteps=0, ou_base_scale=0.5, initial_scale=2.0
    )
    rng, same = np.random.default_rng(3), np.random.default_rng(3)
    expected = np.zeros(2)
    inputs = np.tile(np.array([0.5, 2.5, 0.0, 0.0], np.float32), (3, 1))
    for step in range(4):
        params = exploration.get_params(0, explore=True)
        noise = exploration.draw_noise(rng, 3, params)
        expected = 0.85 * expected + 0.2 * same.standard_normal(2, np.float32)
        (actions,), _ = act(exploration, dist_class, inputs, params, noise=noise)
        clipped = np.clip([0.5, 2.5] + 2 * 0.5 * expected * [4, 5], [-2, 0], [2, 5])
        np.testing.assert_allclose(actions, np.tile(clipped, (3, 1)), rtol=1e-5, err_msg=str(step))
    np.testing.assert_allclose(exploration.get_state()["ou_state"], expected, rtol=1e-5)
    with pytest.raises(WeightsError, match="`ou_state` must have 2 numbers"):
        exploration.set_state({"last_timestep": 5, "ou_state": [0.0]})
    assert exploration.get_state()["last_timestep"] == 0


class Cautious(EpsilonGreedy):
    """A strategy of a user with one more setting."""

    def __init__(self, setting, *, share: float = 0.5, **settings):
        super().__init__(setting, **settings)
        self.share = share

    def get_params(self, timestep, explore):
        return self.share * super().get_params(timestep, explore)


def test_types_are_names_classes_and_paths():
    dist_class = ActionDistribution.for_space(DISCRETE)
    for config in (None, {}, {"type": None}, {"type": "StochasticSampling"}):
        assert type(make_exploration(config, dist_class)).__name__ == "StochasticSampling"
    for name, strategy in STRATEGIES.items():
        space = BOX if "Noise" in name else DISCRETE
        assert type(make(name, space)[0]) is type(make(strategy, space)[0]) is strategy
    path = f"{Cautious.__module__}.Cautious"
    for kind in (Cautious, path, f"{Cautious.__module__}:Cautious"):
        exploration, _ = make(kind, DISCRETE, share=0.25, epsilon_schedule=1.0)
        assert exploration.get_params(0, explore=True).tolist() == [0.25]


@pytest.mark.parametrize(
    ("space", "config", "message"),
    [
        (DISCRETE, {"type": "EpsilonGredy"}, "Did you mean 'EpsilonGreedy'"),
        (DISCRETE, {"type": "no.such.Module"}, "not a strategy"),
        (DISCRETE, {"type": "json.JSONDecoder"}, "not a strategy"),
        (DISCRETE, {"type": dict}, "not a strategy"),
        (DISCRETE, "EpsilonGreedy", "must be a dict"),
        (DISCRETE, {"type": "EpsilonGreedy", "inital_epsilon": 1}, "mean 'initial_epsilon'"),
        (DISCRETE, {"type": "PerWorkerEpsilonGreedy", "epsilon": 1}, "final_epsilon"),
        (DISCRETE, {"type": Cautious, "shore": 1}, "Did you mean 'share'"),
        (DISCRETE, {"type": "Random", "seed": 1}, "has none"),
        (DISCRETE, {"random_timesteps": -1}, "`random_timesteps`"),
        (DISCRETE, {"type": "EpsilonGreedy", "initial_epsilon": 1.5}, "`initial_epsilon`"),
        (DISCRETE, {"type": "EpsilonGreedy", "epsilon_schedule": [[5, 1], [5, 0]]}, "increasing"),
        (DISCRETE, {"type": "EpsilonGreedy", "epsilon_schedule": "fast"}, "'fast'"),
        (DISCRETE, {"type": "SoftQ", "temperature": 0}, "`temperature`"),
        (BOX, {"type": "GaussianNoise", "stddev": math.nan}, "`stddev`"),
        (BOX, {"type": "EpsilonGreedy"}, "supports the action spaces Discrete"),
        (MIXED, {"type": "SoftQ"}, "supports the action spaces Discrete"),
        (MIXED, {"type": "GaussianNoise"}, "supports the action spaces Boxes of floats"),
        (DISCRETE, {"type": "OrnsteinUhlenbeckNoise"}, "Boxes of floats"),
        (DISCRETE, {"type": "ParameterNoise", "sub_exploration": {"type": "SoftQ"}}, "`sub_expl"),
    ],
)
def test_settings_that_are_unknown_or_do_not_fit_are_refused(space, config, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_exploration(config, ActionDistribution.for_space(space))
    assert isinstance(error.value, ValueError)


def test_numbers_of_one_policy_do_not_change_the_key():
    def key(kind, space, **settings):
        exploration, _ = make(kind, space, **settings)
        assert isinstance(exploration, Exploration)
        return hash(exploration.transform.key) and exploration.transform.key

    assert key("EpsilonGreedy", DISCRETE, final_epsilon=0.1) == key(
        "PerWorkerEpsilonGreedy", DISCRETE, worker_index=2, num_workers=3
    )
    assert key("SoftQ", DISCRETE, temperature=2.0) == key("SoftQ", DISCRETE, temperature=3.0)
    assert key("GaussianNoise", BOX, stddev=1.0) == key("OrnsteinUhlenbeckNoise", BOX)
    assert key("StochasticSampling", DISCRETE) != key("SoftQ", DISCRETE)
    assert key("GaussianNoise", BOX) != key("GaussianNoise", BOX, normalize_actions=True)
    first, second = (key("StochasticSampling", DISCRETE, random_timesteps=n) for n in (5, 9))
    assert first == second != key("StochasticSampling", DISCRETE)


def test_parameters_are_inputs_so_that_one_trace_serves_all():
    exploration, dist_class = make("EpsilonGreedy", DISCRETE)
    traces = []

    @tf.function(reduce_retracing=True)
    def function(inputs, noise, params):
        traces.append(1)
        return exploration.transform.apply(dist_class(inputs), noise, params)

    for timestep in (0, 50_000, 10**6):
        params = exploration.get_params(timestep, explore=True)
        noise = exploration.draw_noise(np.random.default_rng(0), 5, params)
        function(tf.zeros([5, 4]), tf.constant(noise), tf.constant(params))
    assert len(traces) == 1
