"""Action distributions against scipy.stats, against integrals and against their own samples."""

import math

import numpy as np
import pytest
import scipy  # its parts are imported by the tests that use them
import tensorflow as tf
from gymnasium import spaces

from helpers.probability import assert_frequencies, assert_frequency, sigmoid, softmax
from tfpolicies.errors import ConfigError, TfPoliciesError
from tfpolicies.models.distributions import ActionDistribution

pytestmark = pytest.mark.core

LOGITS = np.array([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [30.0, -30.0, 0.0]], np.float32)
OTHER = np.array([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [29.0, -29.0, 1.0]], np.float32)
GAUSS = np.array([[0.0, 1.0, 0.0, -1.0], [-3.0, 0.5, 0.7, 0.1]], np.float32)
SQUASHED = [0.4, -0.8, -0.3, -1.2]  # two means, two logarithms of deviations
GAUSS_OTHER = np.array([[0.5, 1.0, 0.3, -0.5], [1.0, 0.0, 0.0, 0.0]], np.float32)
CELLS = spaces.MultiDiscrete([[3, 2], [4, 3]])
PLANE = spaces.Box(-1, 1, (2,))


def make(space, inputs, custom=None):
    return ActionDistribution.for_space(space, custom)(tf.constant(inputs, tf.float32))


def samples(space, inputs, rows, seed, custom=None):
    """Draws `rows` actions from one row of inputs."""
    dist_class = ActionDistribution.for_space(space, custom)
    noise = dist_class.draw_noise(np.random.default_rng(seed), rows)
    assert (noise.shape, noise.dtype) == ((rows, dist_class.noise_size), np.float32)
    assert np.isfinite(noise).all()
    tiled = tf.constant(np.tile(np.asarray(inputs, np.float32), (rows, 1)))
    return dist_class(tiled).sample(tf.constant(noise)).numpy()


CELL_LOGITS = np.random.default_rng(0).normal(size=(3, 12)).astype(np.float32)
CELL_OTHER = np.random.default_rng(1).normal(size=(3, 12)).astype(np.float32)
CHOICES = {  # a space, logits, others, and the columns of each cell
    "categorical": (spaces.Discrete(3), LOGITS, OTHER, [slice(0, 3)]),
    "cells": (
        CELLS,
        CELL_LOGITS,
        CELL_OTHER,
        [slice(0, 3), slice(3, 5), slice(5, 9), slice(9, 12)],
    ),
}


@pytest.mark.parametrize(("space", "logits", "other", "cells"), CHOICES.values(), ids=CHOICES)
def test_independent_choices_agree_with_scipy(space, logits, other, cells):
    p, q = ([softmax(x[:, cell]) for cell in cells] for x in (logits, other))
    distribution = make(space, logits)
    for shift in range(4):
        chosen = np.stack([(np.arange(3) + shift) % x.shape[1] for x in p], axis=-1)
        actions = tf.constant(chosen.reshape(3, *space.shape))
        expected = sum(np.log(x[range(3), chosen[:, i]]) for i, x in enumerate(p))
        np.testing.assert_allclose(distribution.logp(actions), expected, rtol=1e-5, atol=1e-6)
    expected = sum(scipy.stats.entropy(x, axis=-1) for x in p)
    np.testing.assert_allclose(distribution.entropy(), expected, rtol=1e-5, atol=1e-6)
    expected = sum(scipy.stats.entropy(x, y, axis=-1) for x, y in zip(p, q, strict=True))
    forward, backward = distribution.kl(make(space, other)), make(space, other).kl(distribution)
    np.testing.assert_allclose(forward, expected, rtol=1e-5, atol=1e-6)
    assert abs(forward[1] - backward[1]) > 0.01
    np.testing.assert_array_equal(distribution.kl(distribution), 0.0)
    modes = np.stack([x.argmax(-1) for x in p], axis=-1).reshape(3, *space.shape)
    np.testing.assert_array_equal(distribution.deterministic_sample(), modes)
    assert distribution.deterministic_sample().dtype == tf.int64


@pytest.mark.parametrize(("space", "logits", "other", "cells"), CHOICES.values(), ids=CHOICES)
def test_gumbel_noise_samples_with_the_probabilities_of_the_logits(space, logits, other, cells):
    actions = samples(space, logits[1], 60_000, seed=3)
    assert actions.shape == (60_000, *space.shape)
    for i, cell in enumerate(cells):
        chosen, p = actions.reshape(60_000, -1)[:, i], softmax(logits[1, cell])
        counts = np.bincount(chosen, minlength=len(p))
        assert scipy.stats.chisquare(counts, p * 60_000).pvalue > 1e-4
        assert_frequencies(chosen, p)


def test_a_box_of_integers_has_one_choice_per_cell_with_bounds_of_its_own():
    space = spaces.Box(np.array([-1, 5]), np.array([1, 6]), dtype=np.int64)
    dist_class = ActionDistribution.for_space(space)
    assert (dist_class.num_inputs, dist_class.mask_size) == (5, 5)
    assert dist_class.noise_blocks == (("gumbel", 5),)
    distribution = make(space, [[0, 0, 3, 4, 0]])
    assert distribution.deterministic_sample().numpy().tolist() == [[2, 0]]
    expected = np.log(softmax([0, 0, 3])[2]) + np.log(softmax([4, 0])[1])
    np.testing.assert_allclose(distribution.logp(tf.constant([[2, 1]])), [expected], rtol=1e-6)


BITS = np.array([[0.3, -2.0, 5.0], [-30.0, 0.01, 30.0]], np.float32)
BITS_OTHER = np.array([[-0.3, 1.0, 4.0], [-20.0, 0.5, 20.0]], np.float32)


def test_bernoulli_quantities_and_samples_agree_with_scipy():
    p, q = sigmoid(BITS), sigmoid(BITS_OTHER)
    distribution, other = (make(spaces.MultiBinary(3), x) for x in (BITS, BITS_OTHER))
    actions = np.array([[1, 0, 1], [0, 1, 1]], np.int8)
    np.testing.assert_allclose(
        distribution.logp(tf.constant(actions)),
        scipy.stats.bernoulli.logpmf(actions, p).sum(-1),
        rtol=1e-5,
    )
    expected = scipy.stats.bernoulli(p).entropy().sum(-1)
    np.testing.assert_allclose(distribution.entropy(), expected, rtol=1e-5)
    expected = (scipy.special.rel_entr(p, q) + scipy.special.rel_entr(1 - p, 1 - q)).sum(-1)
    np.testing.assert_allclose(distribution.kl(other), expected, rtol=1e-5)
    mode = distribution.deterministic_sample()
    assert mode.dtype == tf.int8
    assert mode.numpy().tolist() == [[1, 0, 1], [0, 1, 1]]
    bits = samples(spaces.MultiBinary((1, 3)), BITS[0], 40_000, seed=6)
    assert bits.shape == (40_000, 1, 3)
    for k, probability in enumerate(p[0]):
        assert_frequency(bits[:, 0, k], probability)
    logits = tf.Variable([[0.0]])
    with tf.GradientTape() as tape:
        distribution = ActionDistribution.for_space(spaces.MultiBinary(1))(logits)
        logp = distribution.logp(tf.ones([1, 1], tf.int8))
    assert tape.gradient(logp, logits).numpy().tolist() == [[0.5]]


def test_gaussian_densities_and_entropy_agree_with_scipy():
    actions = np.array([[0.3, -1.0], [-2.0, 0.0]], np.float32)
    normal = scipy.stats.norm(GAUSS[:, :2], np.exp(GAUSS[:, 2:]))
    result = make(PLANE, GAUSS)
    np.testing.assert_allclose(
        result.logp(tf.constant(actions)), normal.logpdf(actions).sum(-1), 1e-5
    )
    np.testing.assert_allclose(result.entropy(), normal.entropy().sum(-1), rtol=1e-5)


def test_gaussian_divergence_agrees_with_numerical_integration():
    x = np.linspace(-15, 15, 60_001)
    expected = np.zeros(2)
    for row in range(2):
        for k in range(2):
            p = scipy.stats.norm(GAUSS[row, k], np.exp(GAUSS[row, k + 2]))
            q = scipy.stats.norm(GAUSS_OTHER[row, k], np.exp(GAUSS_OTHER[row, k + 2]))
            expected[row] += np.trapezoid(p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), x)
    result = make(PLANE, GAUSS).kl(make(PLANE, GAUSS_OTHER)).numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("custom", "inputs", "inverse"),
    [("diag_gaussian", GAUSS[1], np.asarray), ("squashed_gaussian", SQUASHED, np.arctanh)],
)
def test_normal_noise_samples_with_the_means_and_deviations(custom, inputs, inverse):
    actions = samples(PLANE, inputs, 50_000, seed=4, custom=custom)
    for k in range(2):
        law = scipy.stats.norm(inputs[k], np.exp(inputs[k + 2]))
        assert scipy.stats.kstest(inverse(actions[:, k]), law.cdf).pvalue > 1e-4
        assert_frequency(inverse(actions[:, k]) < law.ppf(0.2), 0.2)


@pytest.mark.parametrize("custom", ["diag_gaussian", "squashed_gaussian"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (1, 2, 2)])
def test_gaussian_actions_have_the_shape_of_the_space(shape, custom):
    dist_class = ActionDistribution.for_space(spaces.Box(-1, 1, shape), custom)
    k = math.prod(shape)
    assert (dist_class.num_inputs, dist_class.noise_size) == (2 * k, k)
    assert dist_class.noise_blocks == (("normal", k),)
    distribution = dist_class(tf.zeros([5, 2 * k]))
    actions = distribution.sample(tf.ones([5, k]))
    assert actions.shape == (5, *shape)
    assert distribution.logp(actions).shape == (5,)


def make_squashed(inputs):
    return make(PLANE, inputs, "squashed_gaussian")


def squashed_logpdf(actions, mean, log_std):
    """Returns the density of tanh(normal) by the change of variables, in double precision."""
    u = np.arctanh(actions)
    return scipy.stats.norm(mean, np.exp(log_std)).logpdf(u) - np.log1p(-np.square(actions))


def test_squashed_densities_agree_with_scipy_and_integrate_to_one():
    actions = np.random.default_rng(0).uniform(-0.999, 0.999, (200, 2)).astype(np.float32)
    result = make_squashed(np.tile(SQUASHED, (200, 1))).logp(tf.constant(actions)).numpy()
    expected = squashed_logpdf(actions.astype(np.float64), SQUASHED[:2], SQUASHED[2:]).sum(-1)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    grid = np.linspace(-0.99999, 0.99999, 200_001, dtype=np.float32)
    line = ActionDistribution.for_space(spaces.Box(-1, 1), "squashed_gaussian")
    inputs = tf.constant(np.tile(np.float32([0.4, -0.3]), (len(grid), 1)))
    density = np.exp(line(inputs).logp(tf.constant(grid[:, None])).numpy().astype(np.float64))
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=1e-4)


def test_the_log_density_is_exact_or_finite_where_tanh_is_saturated():
    noise = np.array([[0.0, 0.0], [1.0, -1.0], [9.0, -9.0]], np.float32)
    result = make_squashed(np.tile(SQUASHED, (3, 1))).sampled_logp(tf.constant(noise)).numpy()
    u = np.array(SQUASHED[:2]) + np.exp(SQUASHED[2:]) * noise.astype(np.float64)
    slope = 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
    expected = (scipy.stats.norm.logpdf(noise) - np.array(SQUASHED[2:]) - slope).sum(-1)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    distribution = make_squashed(np.tile(SQUASHED, (3, 1)))
    from_action = distribution.logp(distribution.sample(tf.constant(noise))).numpy()
    np.testing.assert_allclose(from_action[:2], expected[:2], rtol=1e-5)
    inputs = tf.Variable([SQUASHED])
    with tf.GradientTape() as tape:
        distribution = ActionDistribution.for_space(PLANE, "squashed_gaussian")(inputs)
        logp = distribution.logp(tf.constant([[1.0, -1.0]]))
    assert np.isfinite(logp.numpy()).all()
    assert np.isfinite(tape.gradient(logp, inputs).numpy()).all()


def test_modes_are_squashed_means_and_extreme_deviations_are_clipped():
    mode = make_squashed([SQUASHED]).deterministic_sample()
    np.testing.assert_allclose(mode, [np.tanh(SQUASHED[:2])], rtol=1e-6)
    wide, narrow = make_squashed([[0, 0, 2, 99]]), make_squashed([[0, 0, -5, -99]])
    noise = tf.constant([[0.1, 0.1]])
    for distribution in (wide, narrow):
        left, right = distribution.sample(noise).numpy()[0]
        assert left == right


def test_entropy_and_divergence_of_a_squashed_gaussian_are_refused():
    distribution = make_squashed([SQUASHED])
    with pytest.raises(ConfigError, match=r"no entropy in closed form.*sampled_logp"):
        distribution.entropy()
    with pytest.raises(ValueError, match="no KL divergence"):
        distribution.kl(distribution)
    assert issubclass(ConfigError, TfPoliciesError)


def test_a_deterministic_distribution_gives_its_inputs_and_is_certain():
    space = spaces.Box(-1, 1, (2, 1))
    dist_class = ActionDistribution.for_space(space, "deterministic")
    assert (dist_class.num_inputs, dist_class.noise_size, dist_class.mask_size) == (2, 0, 0)
    assert dist_class.noise_blocks == ()
    noise = dist_class.draw_noise(np.random.default_rng(0), 3)
    assert (noise.shape, noise.dtype) == ((3, 0), np.float32)
    inputs = tf.constant([[0.5, -3.0], [0.0, 1.0], [2.0, 2.0]])
    distribution = dist_class(inputs)
    actions = distribution.sample(tf.constant(noise))
    assert actions.numpy().tolist() == [[[0.5], [-3]], [[0], [1]], [[2], [2]]]
    np.testing.assert_array_equal(distribution.deterministic_sample(), actions)
    kl, entropy = distribution.kl(distribution), distribution.entropy()
    for zeros in (distribution.logp(actions), entropy, kl):
        assert zeros.numpy().tolist() == [0, 0, 0]


def test_certain_actions_can_be_brought_into_bounds():
    inputs = [[0.5, -9.0, 9.0], [0.0, 0.5, -9.0]]
    tanh = np.tanh(inputs)
    squashed = ActionDistribution.for_space(spaces.Box(-5, 5, (3,)), "squashed_deterministic")
    np.testing.assert_allclose(squashed(tf.constant(inputs)).deterministic_sample(), tanh, 1e-6)
    box = spaces.Box(np.array([-1, 0, 2], np.float32), np.array([3, np.inf, 2.5], np.float32))
    bounded = ActionDistribution.for_space(box, "bounded_deterministic")
    assert (bounded.num_inputs, bounded.noise_size) == (3, 0)
    actions = bounded(tf.constant(inputs)).deterministic_sample().numpy()
    expected = [[1 + 2 * tanh[0, 0], 0, 2.5], [1, tanh[1, 1], 2]]
    np.testing.assert_allclose(actions, expected, rtol=1e-6)
    assert all(action in box for action in actions)


def test_zero_noise_gives_the_mode():
    zeros = tf.zeros([3, 3])
    assert make(spaces.Discrete(3), LOGITS).sample(zeros).numpy().tolist() == [0, 0, 0]
    mode = make(spaces.Discrete(3), -LOGITS).deterministic_sample()
    assert mode.numpy().tolist() == [0, 1, 1]
    np.testing.assert_array_equal(make(PLANE, GAUSS).sample(tf.zeros([2, 2])), GAUSS[:, :2])


def test_noise_of_many_rows_is_the_noise_of_its_rows_in_turn():
    pair = spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2)])
    for space in (spaces.Discrete(3), PLANE, CELLS, spaces.MultiBinary(3), pair):
        dist_class = ActionDistribution.for_space(space)
        together = dist_class.draw_noise(np.random.default_rng(0), 4)
        rng = np.random.default_rng(0)
        one_by_one = np.concatenate([dist_class.draw_noise(rng, 1) for _ in range(4)])
        np.testing.assert_array_equal(together, one_by_one)


def test_the_noise_of_a_seed_stays_the_same():
    exponential = np.random.default_rng(0).standard_exponential((2, 3), np.float32)
    normal = np.random.default_rng(0).standard_normal((2, 2), np.float32)
    for space, expected in ((spaces.Discrete(3), -np.log(exponential)), (PLANE, normal)):
        noise = ActionDistribution.for_space(space).draw_noise(np.random.default_rng(0), 2)
        np.testing.assert_array_equal(noise, expected)
