"""Action distributions against scipy.stats and against their own samples."""

import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.errors import UnsupportedSpaceError
from tfpolicies.models.distributions import ActionDistribution

LOGITS = np.array([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [30.0, -30.0, 0.0]], np.float32)
OTHER = np.array([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [29.0, -29.0, 1.0]], np.float32)
GAUSS = np.array([[0.0, 1.0, 0.0, -1.0], [-3.0, 0.5, 0.7, 0.1]], np.float32)
GAUSS_OTHER = np.array([[0.5, 1.0, 0.3, -0.5], [1.0, 0.0, 0.0, 0.0]], np.float32)


def categorical(logits):
    return ActionDistribution.of(spaces.Discrete(3))(tf.constant(logits))


def gaussian(inputs, shape=(2,)):
    return ActionDistribution.of(spaces.Box(-1, 1, shape))(tf.constant(inputs))


def softmax(logits):
    exps = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


@pytest.mark.core
def test_categorical_log_probabilities_and_entropy_agree_with_scipy():
    distribution, p = categorical(LOGITS), softmax(LOGITS)
    for action in range(3):
        got = distribution.logp(tf.constant([action] * 3, tf.int64)).numpy()
        np.testing.assert_allclose(got, np.log(p[:, action]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        distribution.entropy(), scipy.stats.entropy(p, axis=-1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.core
def test_categorical_divergence_agrees_with_scipy_and_is_directed():
    forward = categorical(LOGITS).kl(categorical(OTHER)).numpy()
    wanted = scipy.stats.entropy(softmax(LOGITS), softmax(OTHER), axis=-1)
    np.testing.assert_allclose(forward, wanted, rtol=1e-5, atol=1e-6)
    backward = categorical(OTHER).kl(categorical(LOGITS)).numpy()
    assert abs(forward[1] - backward[1]) > 0.01
    np.testing.assert_array_equal(categorical(LOGITS).kl(categorical(LOGITS)), 0.0)


def test_masked_logits_of_the_smallest_float_keep_everything_finite():
    masked = categorical([[1.0, np.finfo(np.float32).min, 1.0]])
    np.testing.assert_allclose(masked.entropy(), [math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(masked.logp(tf.constant([0])), [-math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(masked.kl(masked), [0.0])


@pytest.mark.core
def test_gaussian_densities_and_entropy_agree_with_scipy():
    actions = np.array([[0.3, -1.0], [-2.0, 0.0]], np.float32)
    normal = scipy.stats.norm(GAUSS[:, :2], np.exp(GAUSS[:, 2:]))
    got = gaussian(GAUSS)
    np.testing.assert_allclose(got.logp(tf.constant(actions)), normal.logpdf(actions).sum(-1), 1e-5)
    np.testing.assert_allclose(got.entropy(), normal.entropy().sum(-1), rtol=1e-5)


def test_gaussian_divergence_agrees_with_numerical_integration():
    x = np.linspace(-15, 15, 60_001)
    wanted = np.zeros(2)
    for row in range(2):
        for k in range(2):
            p = scipy.stats.norm(GAUSS[row, k], np.exp(GAUSS[row, k + 2]))
            q = scipy.stats.norm(GAUSS_OTHER[row, k], np.exp(GAUSS_OTHER[row, k + 2]))
            wanted[row] += np.trapezoid(p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), x)
    got = gaussian(GAUSS).kl(gaussian(GAUSS_OTHER)).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.core
def test_zero_noise_gives_the_mode():
    zeros = tf.zeros([3, 3])
    assert categorical(LOGITS).sample(zeros).numpy().tolist() == [0, 0, 0]
    assert categorical(OTHER).deterministic_sample().numpy().tolist() == [0, 0, 0]
    assert categorical(-LOGITS).deterministic_sample().numpy().tolist() == [0, 1, 1]
    np.testing.assert_array_equal(gaussian(GAUSS).sample(tf.zeros([2, 2])), GAUSS[:, :2])


def test_gumbel_noise_samples_with_the_probabilities_of_the_logits():
    space, rows = spaces.Discrete(3), 60_000
    dist_class = ActionDistribution.of(space)
    noise = dist_class.draw_noise(np.random.default_rng(3), rows)
    assert noise.shape == (rows, 3)
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    actions = dist_class(tf.constant(np.tile(LOGITS[1], (rows, 1)))).sample(tf.constant(noise))
    counts = np.bincount(actions.numpy(), minlength=3)
    wanted = softmax(LOGITS[1:2])[0] * rows
    assert scipy.stats.chisquare(counts, wanted).pvalue > 1e-4


def test_normal_noise_samples_with_the_means_and_deviations():
    rows, dist_class = 50_000, ActionDistribution.of(spaces.Box(-1, 1, (2,)))
    noise = dist_class.draw_noise(np.random.default_rng(4), rows)
    actions = dist_class(tf.constant(np.tile(GAUSS[1], (rows, 1)))).sample(tf.constant(noise))
    for k in range(2):
        law = scipy.stats.norm(GAUSS[1, k], np.exp(GAUSS[1, k + 2]))
        assert scipy.stats.kstest(actions.numpy()[:, k], law.cdf).pvalue > 1e-4


def test_noise_of_many_rows_is_the_noise_of_its_rows_in_turn():
    for space in (spaces.Discrete(3), spaces.Box(-1, 1, (2, 2))):
        dist_class = ActionDistribution.of(space)
        together = dist_class.draw_noise(np.random.default_rng(0), 4)
        rng = np.random.default_rng(0)
        one_by_one = np.concatenate([dist_class.draw_noise(rng, 1) for _ in range(4)])
        np.testing.assert_array_equal(together, one_by_one)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_gaussian_actions_have_the_shape_of_the_space(shape):
    dist_class = ActionDistribution.of(spaces.Box(-1, 1, shape))
    k = math.prod(shape)
    assert (dist_class.num_inputs, dist_class.noise_size) == (2 * k, k)
    distribution = dist_class(tf.zeros([5, 2 * k]))
    actions = distribution.sample(tf.ones([5, k]))
    assert actions.shape == (5, *shape)
    assert distribution.logp(actions).shape == (5,)


def test_other_action_spaces_are_refused():
    for space in (spaces.MultiBinary(2), spaces.Box(0, 3, (2,), np.int64)):
        with pytest.raises(UnsupportedSpaceError, match="Discrete and Box"):
            ActionDistribution.of(space)
