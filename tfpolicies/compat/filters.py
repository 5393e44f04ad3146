"""What filters have under names that only code written for RLlib asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.models.running_filter import RunningFilter
from tfpolicies.models.running_stat import RunningStat


class Statistics(NamedTuple):
    """A filter's statistics of one quantity."""

    n: int
    mean: np.ndarray
    var: np.ndarray
    std: np.ndarray
    shape: tuple[int, ...]

    @classmethod
    def of(cls, stat: RunningStat) -> Statistics:
        """Returns those of a `RunningStat`."""
        return cls(int(stat.count), stat.mean, stat.var, stat.std, stat.shape)


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


OF_FILTERS: dict[str, Callable[[RunningFilter], Any]] = {
    "as_serializable": lambda held: held.snapshot,
    "buffer": lambda held: _told(held._pending),
    "copy": lambda held: held.snapshot,
    "reset_buffer": lambda held: held.forget_pending,
    "running_stats": lambda held: _told(_all_seen(held)),
}
