"""Chooses how many minibatches run per call, so that each call stays short."""

from __future__ import annotations

_TARGET_SECONDS = 0.5  # seconds per call; on a busy machine a call takes longer


class ChunkSizer:
    """Chooses the number of minibatches per call from measured times.

    This does not change results: an update gives the same numbers in chunks of any size.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of one minibatch, by its items

    def get_chunk_size(self, size: int) -> int:
        """Returns the number of minibatches with `size` items for one call.

        It is 1 for the first call, which is measured.
        """
        seconds = self._seconds.get(size)
        return 1 if seconds is None else max(1, int(_TARGET_SECONDS / seconds))

    def record(self, size: int, count: int, seconds: float) -> None:
        self._seconds[size] = max(seconds, 1e-9) / count
