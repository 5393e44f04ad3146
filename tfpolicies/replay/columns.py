"""How a buffer keeps a column: as rows, or, where these are images, as the numbers of frames."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfpolicies.replay.frames import Frames
from tfpolicies.replay.room import Room

IMAGE_BYTES = 4096
"""Observations of at least so many bytes are kept as frames; smaller ones cost less as rows."""

_MOST_CHANNELS = 16


class RowColumn:
    """A column that is kept row by row.

    Args:
        capacity: how many rows there are.
        like: an array `[..., *shape]` of the rows' shape and dtype.
        room: where they lie.

    Attributes:
        kept: `[capacity, ...]`, what is kept of each row.
    """

    def __init__(self, capacity: int, like: np.ndarray, room: Room) -> None:
        self.shape, self.dtype = like.shape[1:], like.dtype
        self.kept = room.array((capacity, *self.shape), self.dtype)

    def to_keep(self, rows: np.ndarray) -> np.ndarray:
        """Returns what is to be kept of rows `[B, *shape]`."""
        return rows

    def take(self, places: np.ndarray) -> np.ndarray:
        """Returns the rows at `places` `[B]`, as copies."""
        return self.kept.take(places, 0)


class ImageColumn:
    """A column of images, each a frame or a stack of frames that are kept apart.

    Args:
        capacity: how many rows there are.
        like: an array `[..., *shape]` of the rows' shape and dtype.
        room: where they lie.
        frames: shared with other columns.

    Attributes:
        kept: int64 `[capacity, C]`, the numbers of each row's frames.
    """

    def __init__(self, capacity: int, like: np.ndarray, room: Room, frames: Frames) -> None:
        self.shape, self.dtype, self.frames = like.shape[1:], like.dtype, frames
        self._axis = channel_axis(self.shape)
        channels = 1 if self._axis is None else self.shape[self._axis]
        self.kept = room.array((capacity, channels), np.int64)

    def to_keep(self, rows: np.ndarray) -> np.ndarray:
        """Returns what is to be kept of rows `[B, *shape]`: the numbers of their frames.

        Raises:
            ConfigError: if there is no room for the frames.
        """
        by_frame = self._by_frame(rows).reshape(-1, *self.frames.shape)
        return self.frames.add(by_frame).reshape(len(rows), self.kept.shape[1])

    def take(self, places: np.ndarray) -> np.ndarray:
        """Returns the rows at `places` `[B]`, as copies."""
        found = np.empty((len(places), *self.shape), self.dtype)
        frames = self.frames
        for row, numbers in zip(self._by_frame(found), self.kept[places].tolist(), strict=True):
            for channel, number in zip(row, numbers, strict=True):
                channel[...] = frames[number]
        return found

    def _by_frame(self, rows: np.ndarray) -> np.ndarray:
        """Returns a view `[B, C, *frame]` of rows."""
        return rows[:, None] if self._axis is None else np.moveaxis(rows, self._axis + 1, 1)


Column = RowColumn | ImageColumn


def frames_for(like: np.ndarray, room: Room, capacity: int) -> Frames:
    """Returns where the frames of rows such as `like` `[..., *shape]` will be kept."""
    shape, axis = like.shape[1:], channel_axis(like.shape[1:])
    frame = shape if axis is None else shape[:axis] + shape[axis + 1 :]
    return Frames(frame, like.dtype, room, capacity)


def is_image(leaf: np.ndarray) -> bool:
    """Whether rows `[B, *shape]` are so large that they are kept as frames."""
    return bool(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize >= IMAGE_BYTES)


def channel_axis(shape: Sequence[int]) -> int | None:
    """Returns the axis of an image along which it is cut into frames, if there is one.

    >>> channel_axis((84, 84, 4)), channel_axis((4, 84, 84)), channel_axis((84, 84))
    (2, 0, None)
    """
    if len(shape) != 3:
        return None
    return next((axis for axis in (2, 0) if 1 < shape[axis] <= _MOST_CHANNELS), None)
