"""Numbered rows in segments, so that a checkpoint writes only new segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from tfpolicies.errors import CheckpointError
from tfpolicies.storage.segments import Home, Segment

Arrays: TypeAlias = Mapping[str, np.ndarray]
Numbered: TypeAlias = Sequence[tuple[int, Segment]]
"""Segments, each with the number of its first row."""


class Segments:
    """The segments of rows that are added at one end and dropped at the other.

    Segments begin at multiples of a number. A complete segment does not change, so it is written
    once; checkpoints refer to it while one of its rows is kept.

    Args:
        rows: of a segment.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._homes: dict[int, Home] = {}  # of complete segments, by the number of the first row

    def of(self, first: int, stop: int, arrays: Callable[[int, int], Arrays]) -> Numbered:
        """Returns the segments with the rows from `first` to `stop`, each with its first number.

        Args:
            first: the oldest row.
            stop: the row after the newest.
            arrays: called with a start and a stop; returns these rows, which must not change.
        """
        oldest = first - first % self._rows
        self._homes = {start: home for start, home in self._homes.items() if start >= oldest}
        found = []
        for start in range(oldest, stop, self._rows):
            home, end = self._homes.get(start), start + self._rows
            if home is not None and home.is_there:
                found.append((start, Segment(None, home)))
                continue
            is_whole = first <= start and end <= stop
            home = self._homes.setdefault(start, Home()) if is_whole else Home()
            begin = max(start, first)
            found.append((begin, Segment(arrays(begin, min(end, stop)), home)))
        return found

    def read(self, stored: Numbered, first: int, stop: int) -> Iterator[tuple[int, Arrays]]:
        """Yields the rows from `first` to `stop` by segment, each with its first number.

        Raises:
            CheckpointError: if they are not these rows, or one is missing or damaged.
        """
        starts = [int(start) for start, _ in stored]
        ends = [*starts, stop][1:]
        whole = starts == [] if first == stop else starts[:1] <= [first] < ends[:1]
        if not whole or any(start >= end for start, end in zip(starts, ends, strict=True)):
            raise CheckpointError(
                f"The rows {first} to {stop} cannot be in segments that begin with {starts!s:.200}."
            )
        for (start, segment), end in zip(stored, ends, strict=True):
            arrays = segment.arrays()
            if any(np.shape(array)[:1] != (end - start,) for array in arrays.values()):
                raise CheckpointError(
                    f"A segment of the rows {start} to {end} has another number of rows. It is "
                    "damaged."
                )
            if start % self._rows == 0 and end - start == self._rows:
                self._homes[start] = segment.home
            begin = max(start, first)
            yield begin, {name: array[begin - start :] for name, array in arrays.items()}
