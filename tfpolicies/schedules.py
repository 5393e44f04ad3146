"""Values that change with time steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def piecewise_linear(points: Sequence[Sequence[float]], timestep: float) -> float:
    """Returns the value at `timestep` on the line through `[[timestep, value], ...]`.

    Before the first point and after the last one the value stays what it is there.

    >>> piecewise_linear([[0, 1.0], [10, 0.0]], 5)
    0.5
    >>> piecewise_linear([[0, 1.0], [10, 0.0]], 99)
    0.0
    """
    times, values = zip(*points, strict=True)
    return float(np.interp(timestep, times, values))
