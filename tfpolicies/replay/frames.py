"""Frames of images, each kept once, however many observations it is in.

What a step reaches is what the next one begins with, and of a stack of frames all but one come
again. So a frame is looked for among the newest ones before it is kept: by a sum over its bytes
first, then by all of them. Frames are numbered in the order in which they came and never change;
the oldest are forgotten first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.errors import CheckpointError
from tfpolicies.replay.room import Room
from tfpolicies.replay.segments import Arrays

_REMEMBERED = 1024  # frames that new ones are compared with, at least
_NAME = "frames"  # of the array in segments
_SEGMENT_BYTES = 8 * 2**20
_SEGMENTS_PER_CHUNK = 8  # at most; so much memory is taken and let go of at a time
_CHUNKS = 8  # that there are at least, if there are enough frames


class Frames:
    """Arrays of one shape and dtype, by number.

    Args:
        shape: of a frame.
        dtype: likewise.
        room: where they lie.
        expected: how many frames there will be, roughly.

    Attributes:
        first: the number of the oldest frame that is kept.
        next: the number of the next new frame.
        per_segment: how many frames go to a file together.

    >>> frames = Frames((2,), np.uint8, Room())
    >>> numbers = frames.add(np.array([[1, 2], [3, 4], [1, 2]], np.uint8))
    >>> numbers.tolist(), frames.next, frames[1].tolist()
    ([0, 1, 0], 2, [3, 4])
    """

    def __init__(
        self, shape: Sequence[int], dtype: np.dtype | type, room: Room, expected: int = 1024
    ) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.first = self.next = 0
        size = max(1, math.prod(self.shape) * self.dtype.itemsize)
        self.per_segment = max(1, min(_SEGMENT_BYTES // size, expected))
        segments = min(max(1, expected // (_CHUNKS * self.per_segment)), _SEGMENTS_PER_CHUNK)
        self._per_chunk = self.per_segment * segments
        self._room = room
        self._chunks: dict[int, np.ndarray] = {}
        self._known: list[dict[int, int]] = [{}, {}]  # by sum of bytes; older ones, newer ones
        self._oldest_known = [0, 0]  # numbers; those in the dicts are not below
        self._floors: list[tuple[int, int]] = []  # (row, number): rows from there have none below

    def __getitem__(self, number: int) -> np.ndarray:
        """Returns one frame, which is not to be written to."""
        chunk, place = divmod(number, self._per_chunk)
        return self._chunks[chunk][place]

    @property
    def nbytes(self) -> int:
        """The bytes reserved."""
        return sum(chunk.nbytes for chunk in self._chunks.values())

    @functools.cached_property
    def _factors(self) -> np.ndarray:
        words = -(-math.prod(self.shape) * self.dtype.itemsize // 8)
        return np.random.default_rng(0).integers(2**63, size=words, dtype=np.uint64) | np.uint64(1)

    def begin_row(self, row: int) -> None:
        """Is told the number of the row that the next frames are of."""
        floor = self._oldest_known[0]
        if not self._floors or self._floors[-1][1] != floor:
            self._floors.append((row, floor))

    def forget_rows(self, before: int) -> None:
        """Lets go of frames that only rows below a number may have."""
        while len(self._floors) > 1 and self._floors[1][0] <= before:
            del self._floors[0]
        self.first = self._floors[0][1]
        for chunk in [k for k in self._chunks if (k + 1) * self._per_chunk <= self.first]:
            del self._chunks[chunk]

    def add(self, frames: np.ndarray) -> np.ndarray:
        """Keeps frames `[F, *shape]`; returns their numbers, int64 `[F]`.

        Frames that are as one of the newest are have its number.
        """
        frames = np.ascontiguousarray(frames)
        numbers = np.empty(len(frames), np.int64)
        for i, mark in enumerate(self._sums(frames)):
            known = self._known[1].get(mark, self._known[0].get(mark))
            if known is None or self[known].tobytes() != frames[i].tobytes():
                known = self._append(frames[i])
                self._known[1][mark] = known
            numbers[i] = known
        if len(self._known[1]) > max(_REMEMBERED, len(frames)):
            self._known = [self._known[1], {}]
            self._oldest_known = [self._oldest_known[1], self.next]
        return numbers

    def piece(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the frames of some numbers, `[F, *shape]`, by name; they do not change.

        They must lie between two multiples of `per_segment`.
        """
        chunk, place = divmod(start, self._per_chunk)
        return {_NAME: self._chunks[chunk][place : place + stop - start]}

    def empty(self) -> dict[str, np.ndarray]:
        """Returns a piece without frames."""
        return {_NAME: np.empty((0, *self.shape), self.dtype)}

    def get_state(self) -> dict[str, Any]:
        """Returns all but the frames: whole numbers."""
        return {"first": self.first, "next": self.next, "floors": [*map(list, self._floors)]}

    def set_state(self, state: Mapping[str, Any], pieces: Iterable[Arrays]) -> None:
        """Puts back what `get_state` returned, before there are frames.

        Args:
            state: as returned.
            pieces: the frames, in order.

        Raises:
            CheckpointError: if the state is damaged.
        """
        self.first = self.next = int(state["first"])
        self._floors = [(int(row), int(number)) for row, number in state["floors"]]
        numbers = [self.first, *(number for _, number in self._floors), int(state["next"])]
        if numbers != sorted(numbers) or not self._floors:
            raise CheckpointError(
                f"Frames from {numbers[0]} to {numbers[-1]} cannot have the floors "
                f"{self._floors!s:.200}. The state is damaged."
            )
        for piece in pieces:
            for frame in piece[_NAME]:
                self._append(frame)
        self._oldest_known = [self.next, self.next]

    def _append(self, frame: np.ndarray) -> int:
        chunk, place = divmod(self.next, self._per_chunk)
        if chunk not in self._chunks:
            self._chunks[chunk] = self._room.array((self._per_chunk, *self.shape), self.dtype)
        self._chunks[chunk][place] = frame
        self.next += 1
        return self.next - 1

    def _sums(self, frames: np.ndarray) -> list[int]:
        """Returns a number for each frame that two different ones hardly ever share."""
        flat = frames.reshape(len(frames), -1).view(np.uint8)
        words = len(self._factors)
        if flat.shape[1] < 8 * words:
            flat = np.pad(flat, ((0, 0), (0, 8 * words - flat.shape[1])))
        return (flat.view(np.uint64) @ self._factors).tolist()
