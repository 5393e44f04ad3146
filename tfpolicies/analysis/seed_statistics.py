"""Estimates over the seeds of a group, with bootstrap intervals.

The methods are those of Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the
Statistical Precipice" (arXiv:2108.13264): the interquartile mean, the percentile bootstrap over
whole runs, and the probability of improvement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
_TRIMMED_SHARE = 0.25  # at each end, by the interquartile mean
_BATCH_NUMBERS = 4_000_000  # in memory at a time while resampling


class ConfidenceInterval(NamedTuple):
    """An estimate with its interval; the limits are NaN if there are fewer than two seeds."""

    estimate: float
    low: float
    high: float


class EstimatedCurve(NamedTuple):
    """An estimate along a grid, all `[points]`; NaN where no run remains.

    `low` and `high` are NaN where fewer than two runs remain; `num_runs` counts them.
    """

    grid: np.ndarray
    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_runs: np.ndarray


def compute_iqm(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Returns the interquartile mean: the mean without the lowest and highest quarter.

    From each end, the whole part of a quarter of the values is left out: none of 3, 1 of 5 and 2
    of 10.

    >>> float(compute_iqm(np.array([0.0, 2.0, 3.0, 4.0, 100.0])))
    3.0
    """
    result: np.ndarray = stats.trim_mean(values, _TRIMMED_SHARE, axis=axis)
    return result


ESTIMATORS: dict[str, Callable[..., np.ndarray]] = {
    "iqm": compute_iqm,
    "median": np.median,
    "mean": np.mean,
}
"""Estimates over seeds by name: functions of an array and an axis."""


def interpolate(x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Interpolates linearly between the finite points of a run; NaN outside of them.

    Args:
        x: increasing, `[points]`.
        y: `[points]`; NaN where there is no value.
        grid: where to interpolate.

    >>> interpolate(np.array([0.0, 9.0, 20.0]), np.array([1, np.nan, 3]), np.array([5.0, 30.0]))
    array([1.5, nan])
    """
    is_finite = np.isfinite(x) & np.isfinite(y)
    if not is_finite.any():
        return np.full(len(grid), np.nan)
    return np.interp(grid, x[is_finite], y[is_finite], left=np.nan, right=np.nan)


def aggregate_curves(grid: np.ndarray, values: np.ndarray, estimator: str) -> EstimatedCurve:
    """Returns the estimate over runs at each point of a grid.

    Args:
        grid: `[points]`.
        values: `[runs, points]`, NaN where a run has none.
        estimator: a name in `ESTIMATORS`.
    """
    exists = np.isfinite(values)
    estimate, low, high = np.full((3, len(grid)), np.nan)
    for runs in np.unique(exists, axis=1).T:
        points = (exists == runs[:, None]).all(axis=0)
        if runs.any():
            part = values[np.ix_(runs, points)]
            estimate[points] = ESTIMATORS[estimator](part, axis=0)
            low[points], high[points] = _bootstrap(part, estimator)
    return EstimatedCurve(grid, estimate, low, high, exists.sum(axis=0))


def compute_interval(scores: np.ndarray, estimator: str) -> ConfidenceInterval:
    """Returns the estimate over the finite scores, `[runs]`; NaN if there are none."""
    scores = scores[np.isfinite(scores)]
    if not len(scores):
        return ConfidenceInterval(np.nan, np.nan, np.nan)
    low, high = _bootstrap(scores[:, None], estimator)
    estimate = float(ESTIMATORS[estimator](scores, axis=0))
    return ConfidenceInterval(estimate, float(low[0]), float(high[0]))


def compute_probability_of_improvement(
    scores: np.ndarray, others: np.ndarray
) -> ConfidenceInterval:
    """Returns the probability that a run of one group has a higher score than one of another.

    It is the share of the pairs of runs in which the first is higher, with ties counted half: the
    Mann-Whitney U statistic divided by the number of pairs. The interval resamples the runs of
    both groups.

    Args:
        scores: of the first group, `[runs]`.
        others: of the other group, `[runs]`.

    >>> float(compute_probability_of_improvement(np.array([3.0, 5.0]), np.array([4.0])).estimate)
    0.5
    """
    scores, others = scores[np.isfinite(scores)], others[np.isfinite(others)]
    if not (len(scores) and len(others)):
        return ConfidenceInterval(np.nan, np.nan, np.nan)
    estimate = float(_compare_pairs(scores, others))
    if min(len(scores), len(others)) < 2:
        return ConfidenceInterval(estimate, np.nan, np.nan)
    low, high = _run_bootstrap((scores, others), _compare_pairs)
    return ConfidenceInterval(estimate, float(low), float(high))


def _compare_pairs(scores: np.ndarray, others: np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns the share of pairs in which the first is higher; both `[..., runs]`."""
    gaps = scores[..., :, None] - others[..., None, :]
    result: np.ndarray = np.mean((np.sign(gaps) + 1) / 2, axis=(-2, -1))
    return result


def _bootstrap(values: np.ndarray, estimator: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the interval over runs at each point, from values `[runs, points]`."""
    if len(values) < 2:
        missing = np.full(values.shape[1], np.nan)
        return missing, missing
    # The last axis is that of the runs, where resampling is fastest.
    return _run_bootstrap((np.ascontiguousarray(values.T),), ESTIMATORS[estimator])


def _run_bootstrap(
    samples: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    size = max(1, int(np.prod([sample.shape[-1] for sample in samples]))) * max(
        1, samples[0].size // samples[0].shape[-1]
    )
    result = stats.bootstrap(
        samples,
        statistic,
        n_resamples=NUM_RESAMPLES,
        batch=max(1, _BATCH_NUMBERS // size),
        vectorized=True,
        axis=-1,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(0),
    )
    return result.confidence_interval.low, result.confidence_interval.high
