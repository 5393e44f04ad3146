"""Estimates over seeds with hand-made numbers."""

import numpy as np
import pytest

from tfpolicies.analysis.seed_statistics import (
    aggregate_curves,
    compute_interval,
    compute_iqm,
    compute_probability_of_improvement,
    interpolate,
)

NAN = np.nan


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], 5.0),
        ([1.0, 2.0, 9.0], 4.0),  # a quarter of 3 is none
        ([0.0, 2.0, 3.0, 100.0], 2.5),
        ([0.0, 2.0, 3.0, 4.0, 100.0], 3.0),
        ([-100, -50, 1, 2, 3, 4, 5, 6, 70, 99], 3.5),  # 2 of 10 from each end
    ],
)
def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end(values, expected):
    assert compute_iqm(np.array(values)) == pytest.approx(expected)


def test_a_run_is_interpolated_between_its_points_and_not_beyond_them():
    x, y = np.array([10.0, 20.0, 30.0, 40.0]), np.array([NAN, 2.0, 6.0, NAN])
    grid = np.array([10.0, 20.0, 25.0, 30.0, 35.0])
    np.testing.assert_array_equal(interpolate(x, y, grid), [NAN, 2.0, 4.0, 6.0, NAN])


def test_a_curve_is_estimated_over_the_runs_that_remain():
    values = np.array([[1.0, 2.0, 3.0], [3.0, 4.0, NAN], [NAN, 9.0, NAN]])
    curve = aggregate_curves(np.arange(3.0), values, "mean")
    np.testing.assert_allclose(curve.estimate, [2.0, 5.0, 3.0])
    np.testing.assert_array_equal(curve.num_runs, [2, 3, 1])
    assert np.isnan([curve.low[2], curve.high[2]]).all()  # one run has no interval
    assert curve.low[0] == 1.0
    assert curve.high[0] == 3.0  # of two runs, the interval is that of both
    assert (curve.low <= curve.estimate)[:2].all()


@pytest.mark.parametrize(("estimator", "expected"), [("mean", 4.0), ("median", 2.0), ("iqm", 4.0)])
def test_the_interval_of_scores_contains_the_estimate(estimator, expected):
    interval = compute_interval(np.array([1.0, 2.0, 9.0, NAN]), estimator)
    assert interval.estimate == pytest.approx(expected)
    assert 1.0 <= interval.low < interval.estimate < interval.high <= 9.0


def test_without_scores_there_is_no_estimate():
    assert np.isnan(compute_interval(np.array([NAN]), "iqm")).all()
    assert np.isnan(compute_probability_of_improvement(np.zeros(0), np.ones(2))).all()


def test_the_probability_of_improvement_is_the_share_of_pairs():
    first, second = np.array([1.0, 3.0, 5.0]), np.array([2.0, 3.0])
    interval = compute_probability_of_improvement(first, second)
    assert interval.estimate == pytest.approx((0 + 0 + 1 + 0.5 + 1 + 1) / 6)
    assert 0.0 <= interval.low <= interval.estimate <= interval.high <= 1.0
    single = compute_probability_of_improvement(np.array([2.0]), second)
    assert single.estimate == 0.25
    assert np.isnan(single.low)
    better = compute_probability_of_improvement(np.array([7.0, 8.0]), second)
    assert better == (1.0, 1.0, 1.0)


def test_the_same_numbers_give_the_same_intervals():
    scores = np.random.default_rng(3).normal(size=7)
    assert compute_interval(scores, "iqm") == compute_interval(scores, "iqm")
