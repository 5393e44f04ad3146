"""Values that change with time steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def piecewise_linear(points: Sequence[Sequence[float]], timestep: float) -> float:
    """Returns the value at `timestep` on the line through `[[timestep, value], ...]`.

    The value is constant before the first point and after the last one.

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
