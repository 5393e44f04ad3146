"""Bitwise comparison of nested values, such as the states of policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfpolicies.storage.segment_files import Segment


def get_owned(policy: Any) -> dict[str, Any]:
    """Returns the whole state of a policy, without its description."""
    return {key: x for key, x in policy.get_state().items() if key != "policy_spec"}


def find_differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Yields where two nested values are not equal to the bit."""
    if isinstance(left, Segment) and isinstance(right, Segment):
        left, right = left.get_arrays(), right.get_arrays()
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if list(left) != list(right):
            yield f"{path}: {list(left)} != {list(right)}"
            return
        for key in left:
            yield from find_differences(left[key], right[key], f"{path}/{key}")
        return
    if isinstance(left, np.ndarray | np.generic):
        x, y = np.asarray(left), np.asarray(right)
        is_same = x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    else:
        is_same = left == right or (left != left and right != right)
    if not is_same:
        yield f"{path}: {left!r} != {right!r}"


def require_same(left: Any, right: Any, what: str) -> None:
    """Raises an AssertionError that says where two values differ, if they do."""
    difference = next(find_differences(left, right), None)
    if difference is not None:
        raise AssertionError(f"{what} differs at {difference}")


def require_same_policy(policy: Any, expected: Any, what: str) -> None:
    """Raises an AssertionError if two policies differ in what they own."""
    require_same(get_owned(policy), get_owned(expected), what)
