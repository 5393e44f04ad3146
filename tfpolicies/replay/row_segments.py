"""Numbered rows in segments, so that a checkpoint writes only new segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from tfpolicies.errors import CheckpointError
from tfpolicies.storage.segment_files import Segment, SegmentFileRef

Arrays: TypeAlias = Mapping[str, np.ndarray]
NumberedSegments: TypeAlias = Sequence[tuple[int, Segment]]
"""Segments, each with the number of its first row."""


class RowSegments:
    """The segments of rows that are added at one end and dropped at the other.

    Segments begin at multiples of a number. A complete segment does not change, so it is written
    once; checkpoints refer to it while one of its rows is kept.

    Args:
        rows: of a segment.
    """

    def __init__(self, rows: int) -> None:
        self._rows_per_segment = rows
        self._file_refs: dict[
            int, SegmentFileRef
        ] = {}  # of complete segments, by the number of the first row

    def make_segments(
        self, first: int, stop: int, arrays: Callable[[int, int], Arrays]
    ) -> NumberedSegments:
        """Returns the segments with the rows from `first` to `stop`, each with its first number.

        Args:
            first: the oldest row.
            stop: the row after the newest.
            arrays: called with a start and a stop; returns these rows, which must not change.
        """
        oldest = first - first % self._rows_per_segment
        self._file_refs = {
            start: file_ref for start, file_ref in self._file_refs.items() if start >= oldest
        }
        segments = []
        for start in range(oldest, stop, self._rows_per_segment):
            file_ref, end = self._file_refs.get(start), start + self._rows_per_segment
            if file_ref is not None and file_ref.exists:
                segments.append((start, Segment(None, file_ref)))
                continue
            is_whole = first <= start and end <= stop
            file_ref = (
                self._file_refs.setdefault(start, SegmentFileRef())
                if is_whole
                else SegmentFileRef()
            )
            begin = max(start, first)
            segments.append((begin, Segment(arrays(begin, min(end, stop)), file_ref)))
        return segments

    def read(self, stored: NumberedSegments, first: int, stop: int) -> Iterator[tuple[int, Arrays]]:
        """Yields the rows from `first` to `stop` by segment, each with its first number."""
        starts = [int(start) for start, _ in stored]
        ends = [*starts, stop][1:]
        is_complete = starts == [] if first == stop else starts[:1] <= [first] < ends[:1]
        if not is_complete or any(start >= end for start, end in zip(starts, ends, strict=True)):
            raise CheckpointError(
                f"The rows {first} to {stop} cannot be in segments that begin with {starts!s:.200}."
            )
        for (start, segment), end in zip(stored, ends, strict=True):
            arrays = segment.get_arrays()
            if any(np.shape(array)[:1] != (end - start,) for array in arrays.values()):
                raise CheckpointError(
                    f"A segment of the rows {start} to {end} has another number of rows. It is "
                    "damaged."
                )
            if start % self._rows_per_segment == 0 and end - start == self._rows_per_segment:
                self._file_refs[start] = segment.file_ref
            begin = max(start, first)
            yield begin, {name: array[begin - start :] for name, array in arrays.items()}
