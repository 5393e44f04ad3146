"""Comparisons of several arrays at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def assert_arrays_equal(left: Iterable[Any], right: Iterable[Any]) -> None:
    """Asserts that arrays are equal to the bit, one by one, and as many."""
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_arrays_close(
    left: Iterable[Any], right: Iterable[Any], atol: float = 1e-5, rtol: float = 1e-7
) -> None:
    """Asserts that arrays are equal within a tolerance, one by one, and as many."""
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
