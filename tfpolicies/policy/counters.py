"""Integers with TensorFlow's `numpy()`, for counters of policies."""

from __future__ import annotations


class Counter(int):
    """An integer with a `numpy` method, like a TensorFlow variable's.

    >>> Counter(3), Counter(3).numpy()
    (3, 3)
    """

    def numpy(self) -> int:
        """Returns the number."""
        return int(self)
