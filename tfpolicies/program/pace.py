"""How much of an update goes into one call, so that no call takes long."""

from __future__ import annotations

_GOAL = 0.5  # seconds of a call; on a busy machine one takes longer


class Pace:
    """How many minibatches a call has, from how long they took.

    This changes no number, since an update gives the same in any pieces.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of one minibatch, by its items

    def minibatches(self, size: int) -> int:
        """Returns how many minibatches of so many items a call may have.

        The first call has one: it is measured, and then as many as fit follow.
        """
        seconds = self._seconds.get(size)
        return 1 if seconds is None else max(1, int(_GOAL / seconds))

    def took(self, size: int, count: int, seconds: float) -> None:
        """Takes down how long a call with `count` minibatches took."""
        self._seconds[size] = max(seconds, 1e-9) / count
