"""Integers with TensorFlow's `numpy()`, for counters of policies."""

from __future__ import annotations


class VariableLikeInt(int):
    """An integer with a `numpy` method, like a TensorFlow variable's.

    >>> VariableLikeInt(3), VariableLikeInt(3).numpy()
    (3, 3)
    """

    def numpy(self) -> int:
        return int(self)
