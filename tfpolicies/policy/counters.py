"""Counters of policies."""

from __future__ import annotations


class Counter(int):
    """A whole number that is also read as a TensorFlow variable is.

    >>> Counter(3), Counter(3).numpy()
    (3, 3)
    """

    def numpy(self) -> int:
        """Returns the number."""
        return int(self)
