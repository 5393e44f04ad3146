"""Fast checks that numbers are real and finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

NON_NUMERIC_KINDS = "cSUOMm"
"""Kinds of dtypes that are not real numbers, though NumPy would convert most of them."""

_LARGE_SIZE = 4096


def require_real(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind in NON_NUMERIC_KINDS:
        raise TypeError(f"{array.dtype} is not a real number type")
    return array


def is_finite(array: np.ndarray) -> bool:
    """Returns True if an array of floats has neither NaN nor infinity; True for other dtypes.

    >>> is_finite(np.array([1.0, 1e200])), is_finite(np.array([1.0, np.nan]))
    (True, False)
    """
    return all_finite((array,))


def all_finite(arrays: Iterable[np.ndarray]) -> bool:
    """Returns True if all of some arrays are finite.

    Bytes of few numbers are searched much faster than `all` reduces. For many, a finite sum of
    squares is enough. Large numbers overflow it, so only if it is not finite, all numbers are
    examined. `vdot` does not warn of that, unlike `dot`.
    """
    for array in arrays:
        if array.dtype.kind != "f":
            continue
        if array.size < _LARGE_SIZE:
            if 0 in np.isfinite(array).tobytes("A"):
                return False
        elif not (math.isfinite(np.vdot(array, array)) or np.isfinite(array).all()):
            return False
    return True


def find_first_non_finite(arrays: Mapping[str, Any]) -> tuple[str, float] | None:
    """Returns the location of the first number of named arrays that is not finite, and its value.

    >>> arrays = {"weights['bias']": np.zeros(2), "weights['kernel']": np.array([[1.0, np.nan]])}
    >>> find_first_non_finite(arrays)
    ("weights['kernel'][0, 1]", nan)
    """
    for name, values in arrays.items():
        array = np.asarray(values)
        if not is_finite(array):
            position = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
            index = [int(i) for i in position]
            return f"{name}{index if index else ''}", float(array[position])
    return None
