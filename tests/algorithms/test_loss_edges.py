"""Losses of tiny and huge numbers, and of batches that are nearly all padding."""

import numpy as np
import pytest
import tensorflow as tf

from soak import loss_edges
from tfpolicies.models.losses import clip_gradients, huber


@pytest.mark.core
def test_the_gradient_of_the_huber_loss_of_a_small_error_is_the_error():
    errors = tf.constant([-2.0, -1e-8, 3e-7, 0.5, 1.5], tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(errors)
        losses = huber(errors)
    np.testing.assert_allclose(losses, [1.5, 5e-17, 4.5e-14, 0.125, 1.0], rtol=1e-6)
    slopes = tape.gradient(losses, errors)
    np.testing.assert_allclose(slopes, [-1.0, -1e-8, 3e-7, 0.5, 1.0], rtol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("clip_by", ["norm", "global_norm"])
def test_gradients_whose_norm_is_beyond_float32_are_left_where_nothing_is_clipped(clip_by):
    pairs = [(tf.constant([1e20, -2e20]), None), (tf.constant([3.0]), None)]

    @tf.function
    def clip(limit):
        return [g for g, _ in clip_gradients(pairs, limit, clip_by)]

    for clipped, (gradient, _) in zip(clip(tf.constant(np.inf)), pairs, strict=True):
        np.testing.assert_array_equal(clipped, gradient)


@pytest.mark.soak
@pytest.mark.parametrize("name", list(loss_edges.KINDS))
def test_losses_and_gradients_at_their_edges_are_those_of_the_papers(name, capsys):
    assert loss_edges.run(name, 24, seed=3) == 0, capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.parametrize("name", list(loss_edges.SAMPLED))
def test_rows_of_episodes_that_end_with_fragments_are_true_in_all_modes(name, capsys):
    assert loss_edges.run_modes(name, 3, seed=4) == 0, capsys.readouterr().out
