"""The storage of a replay buffer: columns in a ring, and the frames of their images.

Row number i is at index i modulo the capacity, so one counter determines all positions. Adding
copies slices and sampling gathers rows; only images need Python code per row. Memory for rows that
were never written is reserved but not used, on operating systems that allocate lazily.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.leaves import leaves_of, map_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import CheckpointError
from tfpolicies.replay.frames import Frames
from tfpolicies.replay.room import Room
from tfpolicies.replay.segments import Arrays, Segments

IMAGE_BYTES = 4096
"""Observations of this size or more are stored as frames; smaller ones cost less as rows."""

_MOST_CHANNELS = 16


class RowColumn:
    """A column that is stored row by row; `example` `[..., *shape]` has its row shape and dtype."""

    def __init__(self, capacity: int, like: np.ndarray, room: Room) -> None:
        self.shape, self.dtype = like.shape[1:], like.dtype
        self.kept = room.array((capacity, *self.shape), self.dtype)

    def to_keep(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def take(self, places: np.ndarray) -> np.ndarray:
        return self.kept.take(places, 0)


class ImageColumn:
    """A column of images, each a frame or a stack of frames, which are stored separately.

    `kept`, int64 `[capacity, C]`, has the numbers of each row's frames.
    """

    def __init__(self, capacity: int, like: np.ndarray, room: Room, frames: Frames) -> None:
        self.shape, self.dtype, self.frames = like.shape[1:], like.dtype, frames
        self._axis = channel_axis(self.shape)
        channels = 1 if self._axis is None else self.shape[self._axis]
        self.kept = room.array((capacity, channels), np.int64)

    def to_keep(self, rows: np.ndarray) -> np.ndarray:
        by_frame = self._by_frame(rows).reshape(-1, *self.frames.shape)
        return self.frames.add(by_frame).reshape(len(rows), self.kept.shape[1])

    def take(self, places: np.ndarray) -> np.ndarray:
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
    """Returns a frame store for rows such as `example` `[..., *shape]`."""
    shape, axis = like.shape[1:], channel_axis(like.shape[1:])
    frame = shape if axis is None else shape[:axis] + shape[axis + 1 :]
    return Frames(frame, like.dtype, room, capacity)


def is_image(leaf: np.ndarray) -> bool:
    """Returns whether rows `[B, *shape]` are large enough to be stored as frames."""
    return bool(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize >= IMAGE_BYTES)


def channel_axis(shape: Sequence[int]) -> int | None:
    """Returns the axis along which an image is split into frames; None if it is one frame.

    >>> channel_axis((84, 84, 4)), channel_axis((4, 84, 84)), channel_axis((84, 84))
    (2, 0, None)
    """
    if len(shape) != 3:
        return None
    return next((axis for axis in (2, 0) if 1 < shape[axis] <= _MOST_CHANNELS), None)


_SEGMENT_BYTES = 8 * 2**20
_ANY_SIZE = 2**63
_OBSERVATIONS = (SampleBatch.OBS, SampleBatch.NEXT_OBS)


class Rows:
    """The newest `capacity` rows of some columns.

    Args:
        capacity: the number of rows to keep.
        examples: columns with rows of the same shapes and dtypes, nested; any number of rows.
        allocator: allocates the memory.

    Attributes:
        leaves: the columns by their paths.
        num_added: the number of rows that were ever added.
        row_bytes: the size of a sampled row.

    Raises:
        ConfigError: if there is not enough memory.
    """

    def __init__(self, capacity: int, like: Mapping[str, Any], room: Room) -> None:
        self.capacity = capacity
        self.added = 0
        self._frames: dict[str, Frames] = {}  # by the path of the first column that uses them
        self.leaves: dict[str, Column] = {
            path: self._column(path, leaf, room) for path, leaf in leaves_of(like)
        }
        columns = iter(self.leaves.values())
        self._nested = {name: map_leaves(lambda _: next(columns), x) for name, x in like.items()}
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in self.leaves.values()]
        self.row_bytes = sum(sizes)
        kept = sum(column.kept[:1].nbytes for column in self.leaves.values())
        self._segments = Segments(max(1, min(_SEGMENT_BYTES // max(1, kept), capacity)))
        self._frame_segments = {path: Segments(x.per_segment) for path, x in self._frames.items()}

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    @property
    def first(self) -> int:
        return self.added - len(self)

    @property
    def nbytes(self) -> int:
        columns = sum(column.kept.nbytes for column in self.leaves.values())
        return columns + sum(frames.nbytes for frames in self._frames.values())

    def add(self, leaves: Sequence[np.ndarray]) -> None:
        """Copies rows into the storage, over the oldest ones once it is full.

        Args:
            leaves: in the order of `self.leaves`, `[B, ...]` each.

        Raises:
            ConfigError: if there is not enough memory for more frames. No row is changed then.
        """
        rows = len(leaves[0])
        skipped = max(rows - self.capacity, 0)
        for frames in self._frames.values():
            frames.begin_row(self.added + skipped)
        columns = self.leaves.values()
        pairs = zip(columns, leaves, strict=True)
        kept = [column.to_keep(leaf[skipped:]) for column, leaf in pairs]
        start = (self.added + skipped) % self.capacity
        head = min(rows - skipped, self.capacity - start)
        wraps = skipped + head < rows
        for column, new in zip(columns, kept, strict=True):
            column.kept[start : start + head] = new[:head]
            if wraps:
                column.kept[: rows - skipped - head] = new[head:]
        self.added += rows
        for frames in self._frames.values():
            frames.forget_rows(self.first)

    def take(self, places: np.ndarray) -> SampleBatch:
        return SampleBatch(map_leaves(lambda column: column.take(places), self._nested))

    def get_state(self) -> dict[str, Any]:
        """Returns all rows, as copies: JSON values, arrays without rows, and segments."""
        frames = {
            path: {
                **each.get_state(),
                "segments": self._frame_segments[path].of(each.first, each.next, each.piece),
            }
            for path, each in self._frames.items()
        }
        return {
            "columns": map_leaves(lambda x: np.empty((0, *x.shape), x.dtype), self._nested),
            "rows": self._segments.of(self.first, self.added, self._copies),
            "frames": frames,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], capacity: int, added: int, room: Room) -> Rows:
        """Returns the storage of a result of `get_state`.

        Older states have all rows in `columns`, in the order of the ring. Raises a
        `CheckpointError` if the state is damaged.
        """
        columns = dict(state["columns"])
        if "rows" in state:
            cls(1, columns, Room(_ANY_SIZE))._require_alike(state)
            rows = cls(capacity, columns, room)
            rows._set_state(state, added)
            return rows
        rows = cls(capacity, columns, room)
        filled = min(added, capacity)
        rows.added = added - filled
        order = np.arange(rows.added, added) % capacity
        rows.add([leaf[order] for _, leaf in leaves_of(columns)])
        return rows

    def _require_alike(self, state: Mapping[str, Any]) -> None:
        """Checks the first segments of a state, before the whole memory is allocated."""
        if state["frames"].keys() != self._frames.keys():
            raise CheckpointError(
                f"The state has frames of {[*state['frames']]}, but the columns have images in "
                f"{[*self._frames]}. The state is damaged."
            )
        for _, segment in state["rows"][:1]:
            _like(self._no_rows(), segment.arrays())
        for path, frames in self._frames.items():
            for _, segment in state["frames"][path]["segments"][:1]:
                _like(frames.empty(), segment.arrays())

    def _set_state(self, state: Mapping[str, Any], added: int) -> None:
        for path, frames in self._frames.items():
            stored = state["frames"][path]
            first, stop = int(stored["first"]), int(stored["next"])
            pieces = self._frame_segments[path].read(stored["segments"], first, stop)
            frames.set_state(stored, (_like(frames.empty(), x) for _, x in pieces))
        self.added = added
        for start, arrays in self._segments.read(state["rows"], self.first, added):
            found = _like(self._no_rows(), arrays)
            places = np.arange(start, start + len(next(iter(found.values())))) % self.capacity
            for path, column in self.leaves.items():
                if isinstance(column, ImageColumn):
                    _require_frames(column, found[path])
                column.kept[places] = found[path]

    def _no_rows(self) -> Arrays:
        return {path: column.kept[:0] for path, column in self.leaves.items()}

    def _copies(self, start: int, stop: int) -> Arrays:
        places = np.arange(start, stop) % self.capacity
        return {path: column.kept.take(places, 0) for path, column in self.leaves.items()}

    def _column(self, path: str, leaf: np.ndarray, room: Room) -> Column:
        name, _, inner = path.partition("/")
        if name not in _OBSERVATIONS or not is_image(leaf):
            return RowColumn(self.capacity, leaf, room)
        new = frames_for(leaf, room, self.capacity)
        for other in _OBSERVATIONS:
            known = self._frames.get(f"{other}/{inner}" if inner else other)
            if known is not None and (known.shape, known.dtype) == (new.shape, new.dtype):
                new = known
        if new not in self._frames.values():
            self._frames[path] = new
        return ImageColumn(self.capacity, leaf, room, new)


def _like(like: Arrays, arrays: Arrays) -> Arrays:
    """Returns arrays if they have the names, row shapes and dtypes of `examples`, or raises."""
    wanted, found = (
        {name: (array.shape[1:], array.dtype) for name, array in each.items()}
        for each in (like, arrays)
    )
    if found != wanted:
        raise CheckpointError(
            f"A segment should have rows of {wanted!s:.300}, but has {found!s:.300}. It is damaged."
        )
    return arrays


def _require_frames(column: ImageColumn, numbers: np.ndarray) -> None:
    first, stop = column.frames.first, column.frames.next
    if not first <= numbers.min() <= numbers.max() < stop:
        raise CheckpointError(
            f"Rows refer to frames {numbers.min()} to {numbers.max()}, but there are {first} to "
            f"{stop - 1}. The state is damaged."
        )
