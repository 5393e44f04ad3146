"""Observation filters in RLlib's form, and RLlib's attributes of this package's filters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.compat.utils import make_missing_method_error
from tfpolicies.models.running_filter import RunningFilter
from tfpolicies.models.running_stat import RunningStat


class Filter:
    """Base class of filters for `observation_filter=lambda shape: MyFilter(shape)`.

    A subclass is called as `filter(observation, update=True)`. `tfpolicies.connectors.OwnFilter`
    describes the methods that workers call.
    """

    def copy(self) -> Any:
        """Returns an independent copy."""
        raise make_missing_method_error(self, "copy(self)")

    def sync(self, other: Any) -> None:
        """Copies the whole state of another filter."""
        raise make_missing_method_error(self, "sync(self, other)")

    def apply_changes(self, other: Any, *args: Any, **kwargs: Any) -> None:
        """Adds the observations of another filter since its `reset_buffer`."""
        raise make_missing_method_error(self, "apply_changes(self, other, with_buffer=False)")

    def reset_buffer(self) -> None:
        """Clears the observations that `apply_changes` would add to another filter."""
        raise make_missing_method_error(self, "reset_buffer(self)")

    def as_serializable(self) -> Any:
        """Returns a copy."""
        return self.copy()


class FilterStatistics(NamedTuple):
    """Statistics of a filter's observations."""

    n: int
    mean: np.ndarray
    var: np.ndarray
    std: np.ndarray
    shape: tuple[int, ...]

    @classmethod
    def from_stat(cls, stat: RunningStat) -> FilterStatistics:
        return cls(int(stat.count), stat.mean, stat.var, stat.std, stat.shape)


class MeanStdFilter(Filter):
    """Subtracts the running mean and divides by the running standard deviation.

    Statistics take effect immediately. `observation_filter="MeanStdFilter"` normalizes within the
    policy, so that exports do it as well.

    Args:
        shape: the shape of one observation.
        demean: whether to subtract the mean.
        destd: whether to divide by the standard deviation.
        clip: the largest magnitude of a result; None for no limit.

    >>> scaled = MeanStdFilter((1,))
    >>> [round(float(scaled(np.array([x]))[0]), 4) for x in (0.0, 1.0, 2.0)]
    [0.0, 0.7071, 1.0]
    >>> scaled.copy().running_stats.n
    3
    """

    def __init__(
        self, shape: Any, demean: bool = True, destd: bool = True, clip: float | None = 10.0
    ) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.demean, self.destd, self.clip = demean, destd, clip
        self._total, self._recent = RunningStat(self.shape), RunningStat(self.shape)

    @property
    def running_stats(self) -> FilterStatistics:
        """The statistics of all observations."""
        return FilterStatistics.from_stat(self._total)

    @property
    def buffer(self) -> FilterStatistics:
        """The statistics of the observations since `reset_buffer`."""
        return FilterStatistics.from_stat(self._recent)

    def __call__(self, x: Any, update: bool = True) -> np.ndarray:
        """Returns a normalized observation, or a batch, as float32.

        Raises:
            ObservationError: if it has another shape.
        """
        x = np.asarray(x, np.float32)
        if update:
            for stat in (self._total, self._recent):
                stat.push_batch(x[None] if x.ndim == len(self.shape) else x)
        result = x - self._total.mean * self.demean
        result = result / (self._total.std + 1e-8) if self.destd else result
        result = result if self.clip is None else np.clip(result, -self.clip, self.clip)
        return np.asarray(result, np.float32)

    def copy(self) -> MeanStdFilter:
        return copy.deepcopy(self)

    def sync(self, other: MeanStdFilter) -> None:
        self._total, self._recent = other._total.copy(), other._recent.copy()

    def apply_changes(
        self, other: MeanStdFilter, with_buffer: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self._total.merge(other._recent)
        if with_buffer:
            self._recent = other._recent.copy()

    def reset_buffer(self) -> None:
        self._recent = RunningStat(self.shape)


# -- RLlib's attributes of the policies' filters --------------------------------------------------


def _merge_pending(running_filter: RunningFilter) -> list[RunningStat]:
    """Returns the statistics of a filter, including pending ones."""
    merged = list(running_filter.statistics)
    for stat, change in zip(merged, running_filter._pending, strict=True):
        stat.merge(change)
    return merged


def _convert_statistics(stats: Any) -> Any:
    """Returns the statistics of a filter's only quantity, or a list if there are several."""
    result = [FilterStatistics.from_stat(stat) for stat in stats]
    return result[0] if len(result) == 1 else result


FILTER_ATTRIBUTES: dict[str, Callable[[RunningFilter], Any]] = {
    "as_serializable": lambda held: held.snapshot,
    "buffer": lambda held: _convert_statistics(held._pending),
    "copy": lambda held: held.snapshot,
    "reset_buffer": lambda held: held.forget_pending,
    "running_stats": lambda held: _convert_statistics(_merge_pending(held)),
}
