"""Values that change with time steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from tfpolicies.rules import is_number


def is_schedule(value: Any, is_one: Callable[[Any], bool] = is_number) -> bool:
    """Whether a value is `[[timestep, number], ...]` with increasing timesteps.

    Args:
        value: anything.
        is_one: what counts as a number.
    """
    if not isinstance(value, list | tuple) or not value:
        return False
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return False
    times = [pair[0] for pair in value]
    return all(is_one(x) for pair in value for x in pair) and times == sorted(set(times))


def piecewise_linear(points: Sequence[Sequence[float]], timestep: float) -> float:
    """Returns the value at `timestep` on the line through `[[timestep, value], ...]`.

    Before the first point and after the last one the value stays what it is there.

    >>> piecewise_linear([[0, 1.0], [10, 0.0]], 5)
    0.5
    >>> piecewise_linear([[0, 1.0], [10, 0.0]], 99)
    0.0
    """
    for (start, first), (stop, last) in pairwise(points):
        if timestep < stop:
            slope = (last - first) / (stop - start or 1)
            return float(first + slope * max(timestep - start, 0))
    return float(points[-1][1])
