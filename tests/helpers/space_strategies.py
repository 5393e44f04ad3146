"""Strategies of Hypothesis that draw spaces of actions, nested or not."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st

SHAPES = st.sampled_from([(), (1,), (3,), (2, 2)])


@st.composite
def float_boxes(draw: st.DrawFn) -> spaces.Box:
    """Boxes of any float type: bounded, half-bounded, unbounded or of one point, cell by cell."""
    dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    width = np.dtype(dtype).itemsize * 8
    number = st.floats(width=width, allow_nan=False, allow_infinity=False, allow_subnormal=False)
    shape = draw(SHAPES)
    size = int(np.prod(shape))
    numbers, flags = (
        st.lists(values, min_size=size, max_size=size) for values in (number, st.booleans())
    )
    one, two, open_below, open_above = (draw(x) for x in (numbers, numbers, flags, flags))
    low = np.where(open_below, -np.inf, np.minimum(one, two)).astype(dtype).reshape(shape)
    high = np.where(open_above, np.inf, np.maximum(one, two)).astype(dtype).reshape(shape)
    point = draw(st.booleans())
    return spaces.Box(low, np.where(point & np.isfinite(low), low, high).astype(dtype), dtype=dtype)


@st.composite
def int_boxes(draw: st.DrawFn) -> spaces.Box:
    dtype = draw(st.sampled_from([np.int8, np.uint8, np.int16, np.int32, np.int64]))
    limits = np.iinfo(dtype)
    low = draw(st.integers(int(limits.min), int(limits.max)))
    high = draw(st.integers(low, min(low + 20, int(limits.max))))
    return spaces.Box(low, high, draw(SHAPES), dtype)


@st.composite
def multi_discretes(draw: st.DrawFn) -> spaces.MultiDiscrete:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    start = draw(st.lists(st.integers(-9, 9), min_size=len(sizes), max_size=len(sizes)))
    return spaces.MultiDiscrete(
        sizes, start=start, dtype=draw(st.sampled_from([np.int8, np.int64]))
    )


ACTION_SPACES = st.recursive(
    float_boxes()
    | int_boxes()
    | multi_discretes()
    | st.builds(spaces.Discrete, st.integers(1, 5), start=st.integers(-9, 9))
    | st.just(spaces.MultiBinary((2, 1))),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: spaces.Dict({f"part_{i}": part for i, part in enumerate(parts)})
        )
        | st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
    ),
    max_leaves=3,
)
