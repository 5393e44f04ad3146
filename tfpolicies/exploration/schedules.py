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
    for (start_step, start_value), (end_step, end_value) in pairwise(points):
        if timestep < end_step:
            slope = (end_value - start_value) / (end_step - start_step or 1)
            return float(start_value + slope * max(timestep - start_step, 0))
    return float(points[-1][1])
