"""Filters of observations as RLlib's users write them, and what filters here have of those."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.compat.utils import unset
from tfpolicies.models.running_filter import RunningFilter
from tfpolicies.models.running_stat import RunningStat


class Filter:
    """A base of filters, of which `observation_filter=lambda shape: MyFilter(shape)` gives one.

    A subclass is called as `filter(observation, update=True)`. For what workers call see
    `tfpolicies.connectors.OwnFilter`.
    """

    def copy(self) -> Any:
        """Returns a copy that shares nothing."""
        raise unset(self, "copy(self)")

    def sync(self, other: Any) -> None:
        """Takes over all that another filter has."""
        raise unset(self, "sync(self, other)")

    def apply_changes(self, other: Any, *args: Any, **kwargs: Any) -> None:
        """Adds what another filter has seen since its `reset_buffer`."""
        raise unset(self, "apply_changes(self, other, with_buffer=False)")

    def reset_buffer(self) -> None:
        """Forgets what `apply_changes` would add to another one."""
        raise unset(self, "reset_buffer(self)")

    def as_serializable(self) -> Any:
        """Returns what `copy` does."""
        return self.copy()


class Statistics(NamedTuple):
    """What a filter has seen."""

    n: int
    mean: np.ndarray
    var: np.ndarray
    std: np.ndarray
    shape: tuple[int, ...]

    @classmethod
    def of(cls, stat: RunningStat) -> Statistics:
        """Returns those of a `RunningStat`."""
        return cls(int(stat.count), stat.mean, stat.var, stat.std, stat.shape)


class MeanStdFilter(Filter):
    """Subtracts the mean of what it has seen and divides by the standard deviation, at once.

    `observation_filter="MeanStdFilter"` does it within the policy, so that exports do it, too.

    Args:
        shape: of one observation.
        demean: whether the mean is subtracted.
        destd: whether the deviation divides.
        clip: the largest magnitude of a result; None for none.

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
        self._seen, self._recent = RunningStat(self.shape), RunningStat(self.shape)

    @property
    def running_stats(self) -> Statistics:
        """The statistics of all that was seen."""
        return Statistics.of(self._seen)

    @property
    def buffer(self) -> Statistics:
        """Those of what was seen since `reset_buffer`."""
        return Statistics.of(self._recent)

    def __call__(self, x: Any, update: bool = True) -> np.ndarray:
        """Returns an observation, or a batch, as float32.

        Raises:
            ObservationError: if it has another shape.
        """
        x = np.asarray(x, np.float32)
        if update:
            for stat in (self._seen, self._recent):
                stat.push_batch(x[None] if x.ndim == len(self.shape) else x)
        found = x - self._seen.mean * self.demean
        found = found / (self._seen.std + 1e-8) if self.destd else found
        found = found if self.clip is None else np.clip(found, -self.clip, self.clip)
        return np.asarray(found, np.float32)

    def copy(self) -> MeanStdFilter:
        return copy.deepcopy(self)

    def sync(self, other: MeanStdFilter) -> None:
        self._seen, self._recent = other._seen.copy(), other._recent.copy()

    def apply_changes(
        self, other: MeanStdFilter, with_buffer: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self._seen.merge(other._recent)
        if with_buffer:
            self._recent = other._recent.copy()

    def reset_buffer(self) -> None:
        self._recent = RunningStat(self.shape)


# -- names that filters of policies have ----------------------------------------------------------


def _all_seen(held: RunningFilter) -> list[RunningStat]:
    """Returns the statistics of a filter with those that are pending."""
    seen = list(held.statistics)
    for stat, change in zip(seen, held._pending, strict=True):
        stat.merge(change)
    return seen


def _told(stats: Any) -> Any:
    """Returns the statistics of the one quantity of a filter, or a list of those of several."""
    found = [Statistics.of(stat) for stat in stats]
    return found[0] if len(found) == 1 else found


FILTER_ATTRIBUTES: dict[str, Callable[[RunningFilter], Any]] = {
    "as_serializable": lambda held: held.snapshot,
    "buffer": lambda held: _told(held._pending),
    "copy": lambda held: held.snapshot,
    "reset_buffer": lambda held: held.forget_pending,
    "running_stats": lambda held: _told(_all_seen(held)),
}
