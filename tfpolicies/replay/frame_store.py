"""Frames of images, each stored once, however many observations contain it.

The new observation of a step is the observation of the next one, and all frames but one of a stack
occur again. So each frame is compared to the newest stored ones before it is stored: first by a
hash of its bytes, then by all of them. Frames are numbered in the order in which they are added and
never change; the oldest are dropped first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.errors import CheckpointError
from tfpolicies.replay.allocator import BufferAllocator
from tfpolicies.replay.row_segments import Arrays

_MIN_COMPARED = 1024  # minimum number of stored frames that new ones are compared with
_ARRAY_NAME = "frames"  # of the array in segments
_SEGMENT_BYTES = 8 * 2**20
_MAX_SEGMENTS_PER_CHUNK = 8  # maximum; memory is allocated and freed by chunks
_MIN_CHUNKS = 8  # minimum, if there are enough frames


class FrameStore:
    """Arrays of one shape and dtype, by number.

    Args:
        shape: of a frame.
        dtype: of a frame.
        allocator: allocates their memory.
        expected_frames: the approximate number of frames.

    Attributes:
        first: the number of the oldest stored frame.
        next: the number of the next new frame.
        per_segment: the number of frames in one file.

    >>> frames = FrameStore((2,), np.uint8, BufferAllocator())
    >>> numbers = frames.add(np.array([[1, 2], [3, 4], [1, 2]], np.uint8))
    >>> numbers.tolist(), frames.next, frames[1].tolist()
    ([0, 1, 0], 2, [3, 4])
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype | type,
        allocator: BufferAllocator,
        expected_frames: int = 1024,
    ) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.first = self.next = 0
        size = max(1, math.prod(self.shape) * self.dtype.itemsize)
        self.per_segment = max(1, min(_SEGMENT_BYTES // size, expected_frames))
        segments = min(
            max(1, expected_frames // (_MIN_CHUNKS * self.per_segment)), _MAX_SEGMENTS_PER_CHUNK
        )
        self._per_chunk = self.per_segment * segments
        self._allocator = allocator
        self._chunks: dict[int, np.ndarray] = {}
        self._numbers_by_hash: list[dict[int, int]] = [
            {},
            {},
        ]  # numbers by hash; older ones, newer ones
        self._oldest_compared = [0, 0]  # lower bounds of the numbers in the dicts
        self._row_floors: list[tuple[int, int]] = []  # (row, lowest frame number from that row on)

    def __getitem__(self, number: int) -> np.ndarray:
        chunk, offset = divmod(number, self._per_chunk)
        return self._chunks[chunk][offset]

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks.values())

    @functools.cached_property
    def _hash_factors(self) -> np.ndarray:
        words = -(-math.prod(self.shape) * self.dtype.itemsize // 8)
        return np.random.default_rng(0).integers(2**63, size=words, dtype=np.uint64) | np.uint64(1)

    def begin_row(self, row: int) -> None:
        """Sets the number of the row to which the next frames belong."""
        floor = self._oldest_compared[0]
        if not self._row_floors or self._row_floors[-1][1] != floor:
            self._row_floors.append((row, floor))

    def drop_rows(self, before: int) -> None:
        """Drops frames that only rows before a number may refer to."""
        while len(self._row_floors) > 1 and self._row_floors[1][0] <= before:
            del self._row_floors[0]
        self.first = self._row_floors[0][1]
        for chunk in [k for k in self._chunks if (k + 1) * self._per_chunk <= self.first]:
            del self._chunks[chunk]

    def add(self, frames: np.ndarray) -> np.ndarray:
        """Stores frames `[F, *shape]`; returns their numbers, int64 `[F]`.

        A frame that is equal to one of the newest gets the number of that one.
        """
        frames = np.ascontiguousarray(frames)
        numbers = np.empty(len(frames), np.int64)
        for i, hash_value in enumerate(self._hash_frames(frames)):
            number = self._numbers_by_hash[1].get(
                hash_value, self._numbers_by_hash[0].get(hash_value)
            )
            if number is None or self[number].tobytes() != frames[i].tobytes():
                number = self._append(frames[i])
                self._numbers_by_hash[1][hash_value] = number
            numbers[i] = number
        if len(self._numbers_by_hash[1]) > max(_MIN_COMPARED, len(frames)):
            self._numbers_by_hash = [self._numbers_by_hash[1], {}]
            self._oldest_compared = [self._oldest_compared[1], self.next]
        return numbers

    def get_segment(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the frames of some numbers, `[F, *shape]`, by name; they do not change.

        They must be between two multiples of `per_segment`.
        """
        chunk, offset = divmod(start, self._per_chunk)
        return {_ARRAY_NAME: self._chunks[chunk][offset : offset + stop - start]}

    def make_empty_segment(self) -> dict[str, np.ndarray]:
        return {_ARRAY_NAME: np.empty((0, *self.shape), self.dtype)}

    def get_state(self) -> dict[str, Any]:
        return {"first": self.first, "next": self.next, "floors": [*map(list, self._row_floors)]}

    def set_state(self, state: Mapping[str, Any], segments: Iterable[Arrays]) -> None:
        """Restores the result of `get_state`, with its frames in order, into an empty store."""
        self.first = self.next = int(state["first"])
        self._row_floors = [(int(row), int(number)) for row, number in state["floors"]]
        numbers = [self.first, *(number for _, number in self._row_floors), int(state["next"])]
        if numbers != sorted(numbers) or not self._row_floors:
            raise CheckpointError(
                f"Frames from {numbers[0]} to {numbers[-1]} cannot have the floors "
                f"{self._row_floors!s:.200}. The state is damaged."
            )
        for segment in segments:
            for frame in segment[_ARRAY_NAME]:
                self._append(frame)
        self._oldest_compared = [self.next, self.next]

    def _append(self, frame: np.ndarray) -> int:
        chunk, offset = divmod(self.next, self._per_chunk)
        if chunk not in self._chunks:
            self._chunks[chunk] = self._allocator.allocate(
                (self._per_chunk, *self.shape), self.dtype
            )
        self._chunks[chunk][offset] = frame
        self.next += 1
        return self.next - 1

    def _hash_frames(self, frames: np.ndarray) -> list[int]:
        """Returns a 64-bit hash of each frame."""
        flat = frames.reshape(len(frames), -1).view(np.uint8)
        words = len(self._hash_factors)
        if flat.shape[1] < 8 * words:
            flat = np.pad(flat, ((0, 0), (0, 8 * words - flat.shape[1])))
        return (flat.view(np.uint64) @ self._hash_factors).tolist()
