"""Action distributions of RLlib: their numbers, the catalog, and policies that use them."""

import functools

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import OBS, PLANE, assert_equal, batch_for, make, rows_of
from tfpolicies import PGTF2Policy, PPOConfig, PPOTF2Policy, compat
from tfpolicies.compat.distribution_noise import sample_gamma
from tfpolicies.errors import ConfigError, ExportError, UnsupportedMethodError
from tfpolicies.models import distributions as own

FIVE = rows_of(OBS, 5, seed=3)
PAIR = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])
MIXED = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2,)), c=spaces.MultiDiscrete([2, 3]))
INPUTS = np.array([[0.3, -1.0, 0.5, 2.0], [1.0, 0.0, -2.0, 0.1]], np.float32)


@pytest.mark.core
def test_numbers_equal_those_of_the_core():
    first, other = compat.Categorical(INPUTS), compat.Categorical(INPUTS[::-1])
    core, core_other = (own.Categorical(x.inputs, spaces.Discrete(4)) for x in (first, other))
    actions = tf.constant([2, 0])
    np.testing.assert_array_equal(first.logp(actions), core.logp(actions))
    np.testing.assert_array_equal(first.multi_entropy(), core.entropy())
    np.testing.assert_array_equal(first.multi_kl(other), core.kl(core_other))
    normal = compat.DiagGaussian(INPUTS, None, action_space=PLANE)
    np.testing.assert_array_equal(normal.deterministic_sample(), INPUTS[:, :2])
    density = scipy.stats.norm(INPUTS[:, :2], np.exp(INPUTS[:, 2:])).logpdf(0.5).sum(axis=-1)
    np.testing.assert_allclose(normal.logp(np.full((2, 2), 0.5)), density, rtol=1e-5)
    certain = compat.Deterministic(INPUTS)
    assert (certain.logp(INPUTS).numpy().tolist(), certain.sample().shape) == ([0, 0], (2, 4))


def test_a_sample_is_drawn_once_and_its_probability_is_known():
    normal = compat.DiagGaussian(INPUTS)
    np.testing.assert_array_equal(normal.sample(), normal.sample())
    np.testing.assert_array_equal(normal.sampled_action_logp(), normal.logp(normal.sample()))
    assert not np.array_equal(normal.sample(), compat.DiagGaussian(INPUTS).sample())


def test_in_a_graph_each_run_draws_a_new_sample():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        dist = compat.DiagGaussian(INPUTS)
        expected = [dist.sample(), dist.logp(dist.sample()), dist.sampled_action_logp()]
        (first, *logp), (second, *_) = session.run(expected), session.run(expected)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(*logp)


def test_a_class_may_have_a_temperature():
    warm = compat.get_categorical_class_with_temperature(2.0)
    np.testing.assert_array_equal(warm(INPUTS).inputs, INPUTS / 2)
    np.testing.assert_array_equal(warm(INPUTS, None, 4.0).inputs, INPUTS / 4)
    with pytest.raises(ConfigError, match=r"temperature must be a positive number, got 0"):
        compat.Categorical(INPUTS, temperature=0)


def test_actions_of_cells_are_a_tensor_by_row_or_a_list_by_cell():
    dist = compat.MultiCategorical(INPUTS, None, [1, 3])
    by_row = tf.constant([[0, 2], [0, 1]])
    by_cell = [np.array([0, 0]), np.array([2, 1])]
    np.testing.assert_array_equal(dist.logp(by_row), dist.logp(by_cell))
    np.testing.assert_allclose(
        tf.reduce_sum(dist.multi_entropy(), axis=1), dist.entropy(), rtol=1e-6
    )
    np.testing.assert_array_equal(dist.multi_kl(dist), np.zeros((2, 2)))


def test_squashed_actions_are_within_their_bounds():
    dist = compat.SquashedGaussian(INPUTS, None, low=-2.0, high=1.0)
    expected = (np.tanh(INPUTS[:, :2]) + 1) / 2 * 3 - 2
    np.testing.assert_allclose(dist.deterministic_sample(), expected, atol=1e-6)
    plain = own.SquashedGaussian(tf.constant(INPUTS), PLANE)
    half = tf.fill([2, 2], 0.5)
    np.testing.assert_allclose(dist.logp(half * 1.5 - 0.5), plain.logp(half), rtol=1e-5)
    with pytest.raises(ConfigError, match="no entropy in closed form"):
        dist.entropy()
    with pytest.raises(ConfigError, match=r"low must be less than high; got low=1, high=1"):
        compat.SquashedGaussian(INPUTS, low=1, high=1)


def test_beta_and_dirichlet_are_those_of_scipy():
    dist, other = compat.Beta(INPUTS, None, low=-1.0, high=3.0), compat.Beta(INPUTS[::-1])
    alpha, beta = np.split(np.log(np.exp(INPUTS) + 1) + 1, 2, axis=-1)
    expected = scipy.stats.beta(alpha, beta)
    share = np.array([[0.2, 0.9], [0.5, 0.7]])
    np.testing.assert_allclose(dist.deterministic_sample(), expected.mean() * 4 - 1, rtol=1e-5)
    np.testing.assert_allclose(dist.logp(share * 4 - 1), expected.logpdf(share).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(dist.entropy(), expected.entropy().sum(-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dist.kl(dist), 0.0, atol=1e-5)
    assert (dist.kl(other).numpy() > 0.0).all()
    shares, logs = np.array([[0.1, 0.2, 0.3, 0.4]] * 2), np.exp(INPUTS.astype(np.float64))
    dist = compat.Dirichlet(INPUTS)
    results = [scipy.stats.dirichlet(a).logpdf(x) for a, x in zip(logs, shares, strict=True)]
    np.testing.assert_allclose(dist.logp(shares), results, rtol=1e-4)
    results = [scipy.stats.dirichlet(a).entropy() for a in logs]
    np.testing.assert_allclose(dist.entropy(), results, rtol=1e-4)
    np.testing.assert_allclose(tf.reduce_sum(dist.sample(), axis=-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 9.0])
def test_gamma_variates_have_their_distribution(alpha):
    tf.random.set_seed(3)
    samples = sample_gamma(tf.fill([4000], alpha)).numpy()
    assert scipy.stats.kstest(samples, scipy.stats.gamma(alpha).cdf).pvalue > 1e-3


def test_nearly_one_hot_vectors_sum_to_one():
    dist = compat.GumbelSoftmax(INPUTS, temperature=0.5)
    np.testing.assert_allclose(tf.reduce_sum(dist.sample(), axis=-1), 1.0, rtol=1e-5)
    actions = tf.constant([1, 3])
    expected = compat.Categorical(INPUTS).logp(actions)
    np.testing.assert_allclose(dist.logp(actions), expected, rtol=1e-6)


@pytest.mark.core
def test_the_catalog_gives_classes_and_their_numbers_of_inputs():
    get = compat.ModelCatalog.get_action_dist
    assert get(spaces.Discrete(3), {}, framework="tf") == (compat.Categorical, 3)
    assert get(PLANE, {}, dist_type="deterministic") == (compat.Deterministic, 2)
    assert get(spaces.Discrete(3), {}, dist_type="gumbel_softmax") == (compat.GumbelSoftmax, 3)
    kind, width = get(PLANE)
    assert (kind.func, width) == (compat.DiagGaussian, 4)
    kind, width = get(spaces.MultiBinary(3))
    assert (kind(np.ones((2, 3))).deterministic_sample().shape, width) == ((2, 3), 3)
    with pytest.raises(ConfigError, match=r"dist_type must be one of .*got 'foo'"):
        get(PLANE, {}, "foo")


def test_parts_of_a_dict_are_independent():
    kind, width = compat.ModelCatalog.get_action_dist(MIXED, {"fcnet_hiddens": [4]})
    assert (kind.func, width) == (compat.MultiActionDistribution, 3 + 4 + 5)
    dist = kind(np.random.default_rng(0).normal(size=(2, width)), None)
    actions = dist.sample()
    assert {name: x.shape for name, x in actions.items()} == {"a": (2,), "b": (2, 2), "c": (2, 2)}
    core = own.ActionDistribution.for_space(MIXED)(dist.inputs)
    np.testing.assert_allclose(dist.logp(actions), core.logp(actions), rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(), core.entropy(), rtol=1e-5)
    parts = [tf.cast(x, tf.float32) for x in actions.values()]
    rows = tf.concat([parts[0][:, None], *parts[1:]], axis=-1)
    for form in (rows, rows.numpy(), list(actions.values())):
        np.testing.assert_allclose(dist.logp(form), dist.logp(actions), rtol=1e-5)
    np.testing.assert_array_equal(dist.sampled_action_logp(), dist.logp(actions))


class ChainModel(compat.TFModelV2):
    """Has a part that the distribution calls."""

    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        self.context = keras.layers.Dense(num_outputs, activation="tanh")
        inputs = keras.Input((num_outputs,)), keras.Input((1,))
        outputs = [keras.layers.Dense(n)(x) for n, x in zip((2, 3), inputs, strict=True)]
        self.action_model = keras.Model(list(inputs), outputs)
        self.value = keras.layers.Dense(1)

    def forward(self, input_dict, state, seq_lens):
        self.features = self.context(input_dict["obs"])
        return self.features, state

    def value_function(self):
        return tf.reshape(self.value(self.features), [-1])


class Chain(compat.ActionDistribution):
    """P(a, b) = P(a) P(b | a); entropy and KL are estimated from samples."""

    def _parts(self, first=None):
        zeros = tf.zeros([tf.shape(self.inputs)[0], 1])
        columns = zeros if first is None else tf.cast(first, tf.float32)[:, None]
        return [compat.Categorical(x) for x in self.model.action_model([self.inputs, columns])]

    def _both(self, method):
        first = self._parts()[0]
        a = getattr(first, method)()
        second = self._parts(a)[1]
        b = getattr(second, method)()
        self._logp = first.logp(a) + second.logp(b)
        return a, b

    def sample(self):
        return self._both("sample")

    def deterministic_sample(self):
        return self._both("deterministic_sample")

    def sampled_action_logp(self):
        return self._logp

    def logp(self, actions):
        first, second = self._parts(actions[:, 0])
        return first.logp(actions[:, 0]) + second.logp(actions[:, 1])

    def entropy(self):
        first = self._parts()[0]
        return first.entropy() + self._parts(first.sample())[1].entropy()

    def kl(self, other):
        first = self._parts()[0]
        a = first.sample()
        rest = self._parts(a)[1].kl(other._parts(a)[1])
        return first.kl(other._parts()[0]) + rest

    @staticmethod
    def required_model_output_shape(action_space, model_config):
        return 4


def make_chain(**config):
    compat.ModelCatalog.register_custom_model("chain", ChainModel)
    compat.ModelCatalog.register_custom_action_dist("chain", Chain)
    model = {"custom_model": "chain", "custom_action_dist": "chain"}
    return make(PPOTF2Policy, actions=PAIR, model=model, **config)


@pytest.fixture(scope="module")
def chain():
    return make_chain()


def assert_greedy(policy, obs):
    """Asserts that greedy actions are those of the distribution's `deterministic_sample`."""
    inputs = tf.constant(policy.compute_actions(obs).extras["action_dist_inputs"])
    dist = policy.dist_class(inputs, policy.model)
    actions = policy.compute_actions(obs, explore=False).actions
    np.testing.assert_array_equal(actions, dist.deterministic_sample())


def test_an_autoregressive_policy_acts_alike_in_graph_mode_and_through_onnx(chain, tmp_path):
    obs = rows_of(OBS, 40)
    chain = chain.copy()
    rng = chain.get_state()["rng"]
    batch = chain.compute_actions(obs)
    logp = batch.extras["action_logp"]
    likelihoods = chain.compute_log_likelihoods(batch.actions, obs)
    np.testing.assert_allclose(likelihoods, logp, atol=1e-5)
    for inference in ("onnx", "session"):
        other = make_chain(inference=inference)
        other.set_weights(chain.get_weights())
        other.driver.acting.state.rng.bit_generator.state = rng
        result = other.compute_actions(obs)
        np.testing.assert_array_equal(result.actions, batch.actions)
        np.testing.assert_allclose(result.extras["action_logp"], logp, atol=1e-5)
    assert_greedy(chain, obs)
    assert chain.export_model(tmp_path, onnx=True).parity.largest_difference < 1e-5


def test_samples_in_a_loss_are_seeded_by_the_policy(chain):
    batch = batch_for(chain, 12)
    one, two = make_chain(), make_chain()
    stats = one.learn_on_batch(batch.copy())["learner_stats"]
    tf.random.uniform([3])  # the global generator does not matter
    other_stats = two.learn_on_batch(batch.copy())["learner_stats"]
    assert 0.0 < stats["entropy"] <= np.log(2) + np.log(3)
    assert (stats["entropy"], stats["kl"]) == (other_stats["entropy"], other_stats["kl"])
    assert_equal(one.get_weights(), two.get_weights())


def test_a_ported_distribution_explores_by_epsilon_greedy():
    policy = make_chain(exploration_config={"type": "EpsilonGreedy", "epsilon_timesteps": 1})
    obs = rows_of(OBS, 300)
    a, b = policy.compute_actions(obs, timestep=0).actions  # epsilon is 1
    assert (set(a.tolist()), set(b.tolist())) == ({0, 1}, {0, 1, 2})
    assert_greedy(policy, obs)


class RandomDraws(compat.TFActionDistribution):
    """A Gaussian that draws its noise from TensorFlow."""

    def _build_sample_op(self):
        return self.inputs + tf.random.normal(tf.shape(self.inputs))

    def deterministic_sample(self):
        return self.inputs

    def logp(self, x):
        return -0.5 * tf.reduce_sum(tf.square(x - self.inputs), axis=-1)

    @staticmethod
    def required_model_output_shape(action_space, model_config):
        return np.prod(action_space.shape, dtype=np.int32)


def test_a_distribution_that_draws_noise_acts_through_tensorflow_with_a_line(caplog, tmp_path):
    settings = {"custom_action_dist": RandomDraws, "fcnet_hiddens": [4]}
    policy = make(PGTF2Policy, actions=PLANE, model=settings, inference="auto")
    means = policy.compute_actions(FIVE, explore=False)
    (line,) = [x.getMessage() for x in caplog.records]
    assert "acting through TensorFlow instead of ONNX Runtime" in line
    assert "draws random numbers (RandomStandardNormal)" in line
    np.testing.assert_array_equal(means.actions, means.extras["action_dist_inputs"])
    first, second = (policy.compute_actions(FIVE).actions for _ in range(2))
    assert not np.array_equal(first, second)
    with pytest.raises(ExportError, match=r"returns other"):
        policy.export_model(tmp_path)


def test_action_distribution_fn_may_return_a_class_of_rllib():
    class Sharp(PGTF2Policy):
        def make_model(self):
            return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

        def action_distribution_fn(self, model, *, obs_batch, state_batches, **kwargs):
            logits, state = model(kwargs["input_dict"])
            return logits, functools.partial(compat.Categorical, temperature=1e-3), state

    batch = make(Sharp).compute_actions(FIVE)
    modes = np.argmax(batch.extras["action_dist_inputs"], axis=-1)
    np.testing.assert_array_equal(batch.actions, modes)


def test_missing_methods_of_a_class_are_named():
    class Empty(compat.ActionDistribution):
        pass

    for call, words in (
        (lambda: Empty(INPUTS, None).logp(0), r"Empty has no `logp`.*Write `logp\(self, x\)`"),
        (
            lambda: make(PGTF2Policy, model={"custom_action_dist": Empty}),
            r"must define its number of inputs",
        ),
        (
            compat.TFActionDistribution(INPUTS, None).sample,
            r"TFActionDistribution has no `_build_sample_op`",
        ),
    ):
        with pytest.raises(UnsupportedMethodError, match=words):
            call()


def test_algo_class_may_be_a_name_of_the_same_class():
    config = PPOConfig()
    config.algo_class = "PPO"
    assert config.algo_class.__name__ == "PPO"
    with pytest.raises(ConfigError, match=r"algo_class must be a class such as.*got 'DQN'"):
        config.algo_class = "DQN"
