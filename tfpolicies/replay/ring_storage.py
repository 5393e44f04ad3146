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

from tfpolicies.batch.leaves import iterate_named_leaves, map_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import CheckpointError
from tfpolicies.replay.allocator import BufferAllocator
from tfpolicies.replay.frame_store import FrameStore
from tfpolicies.replay.row_segments import Arrays, RowSegments

IMAGE_BYTES = 4096
"""Observations of this size or more are stored as frames; smaller ones cost less as rows."""

_MAX_CHANNELS = 16


class RowColumn:
    """A column that is stored row by row; `example` `[..., *shape]` has its row shape and dtype."""

    def __init__(self, capacity: int, example: np.ndarray, allocator: BufferAllocator) -> None:
        self.shape, self.dtype = example.shape[1:], example.dtype
        self.stored = allocator.allocate((capacity, *self.shape), self.dtype)

    def encode(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def take(self, indices: np.ndarray) -> np.ndarray:
        return self.stored.take(indices, 0)


class ImageColumn:
    """A column of images, each a frame or a stack of frames, which are stored separately.

    `kept`, int64 `[capacity, C]`, has the numbers of each row's frames.
    """

    def __init__(
        self, capacity: int, example: np.ndarray, allocator: BufferAllocator, frames: FrameStore
    ) -> None:
        self.shape, self.dtype, self.frames = example.shape[1:], example.dtype, frames
        self._axis = find_channel_axis(self.shape)
        channels = 1 if self._axis is None else self.shape[self._axis]
        self.stored = allocator.allocate((capacity, channels), np.int64)

    def encode(self, rows: np.ndarray) -> np.ndarray:
        by_frame = self._split_frames(rows).reshape(-1, *self.frames.shape)
        return self.frames.add(by_frame).reshape(len(rows), self.stored.shape[1])

    def take(self, indices: np.ndarray) -> np.ndarray:
        images = np.empty((len(indices), *self.shape), self.dtype)
        frames = self.frames
        for row, numbers in zip(
            self._split_frames(images), self.stored[indices].tolist(), strict=True
        ):
            for channel, number in zip(row, numbers, strict=True):
                channel[...] = frames[number]
        return images

    def _split_frames(self, rows: np.ndarray) -> np.ndarray:
        """Returns a view `[B, C, *frame]` of rows."""
        return rows[:, None] if self._axis is None else np.moveaxis(rows, self._axis + 1, 1)


Column = RowColumn | ImageColumn


def make_frame_store(example: np.ndarray, allocator: BufferAllocator, capacity: int) -> FrameStore:
    """Returns a frame store for rows such as `example` `[..., *shape]`."""
    shape, axis = example.shape[1:], find_channel_axis(example.shape[1:])
    frame = shape if axis is None else shape[:axis] + shape[axis + 1 :]
    return FrameStore(frame, example.dtype, allocator, capacity)


def is_image(leaf: np.ndarray) -> bool:
    """Returns whether rows `[B, *shape]` are large enough to be stored as frames."""
    return bool(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize >= IMAGE_BYTES)


def find_channel_axis(shape: Sequence[int]) -> int | None:
    """Returns the axis along which an image is split into frames; None if it is one frame.

    >>> find_channel_axis((84, 84, 4)), find_channel_axis((4, 84, 84)), find_channel_axis((84, 84))
    (2, 0, None)
    """
    if len(shape) != 3:
        return None
    return next((axis for axis in (2, 0) if 1 < shape[axis] <= _MAX_CHANNELS), None)


_SEGMENT_BYTES = 8 * 2**20
_UNLIMITED = 2**63
_OBSERVATIONS = (SampleBatch.OBS, SampleBatch.NEXT_OBS)


class RingStorage:
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

    def __init__(
        self, capacity: int, examples: Mapping[str, Any], allocator: BufferAllocator
    ) -> None:
        self.capacity = capacity
        self.num_added = 0
        self._frame_stores: dict[
            str, FrameStore
        ] = {}  # by the path of the first column that uses them
        self.leaves: dict[str, Column] = {
            path: self._make_column(path, leaf, allocator)
            for path, leaf in iterate_named_leaves(examples)
        }
        columns = iter(self.leaves.values())
        self._nested = {
            name: map_leaves(lambda _: next(columns), x) for name, x in examples.items()
        }
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in self.leaves.values()]
        self.row_bytes = sum(sizes)
        bytes_per_row = sum(column.stored[:1].nbytes for column in self.leaves.values())
        self._segments = RowSegments(max(1, min(_SEGMENT_BYTES // max(1, bytes_per_row), capacity)))
        self._frame_segments = {
            path: RowSegments(x.per_segment) for path, x in self._frame_stores.items()
        }

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    @property
    def first(self) -> int:
        return self.num_added - len(self)

    @property
    def nbytes(self) -> int:
        columns = sum(column.stored.nbytes for column in self.leaves.values())
        return columns + sum(frames.nbytes for frames in self._frame_stores.values())

    def add(self, leaves: Sequence[np.ndarray]) -> None:
        """Copies rows into the storage, over the oldest ones once it is full.

        Args:
            leaves: in the order of `self.leaves`, `[B, ...]` each.

        Raises:
            ConfigError: if there is not enough memory for more frames. No row is changed then.
        """
        rows = len(leaves[0])
        skipped = max(rows - self.capacity, 0)
        for frames in self._frame_stores.values():
            frames.begin_row(self.num_added + skipped)
        columns = self.leaves.values()
        pairs = zip(columns, leaves, strict=True)
        encoded = [column.encode(leaf[skipped:]) for column, leaf in pairs]
        start = (self.num_added + skipped) % self.capacity
        head = min(rows - skipped, self.capacity - start)
        wraps = skipped + head < rows
        for column, new in zip(columns, encoded, strict=True):
            column.stored[start : start + head] = new[:head]
            if wraps:
                column.stored[: rows - skipped - head] = new[head:]
        self.num_added += rows
        for frames in self._frame_stores.values():
            frames.drop_rows(self.first)

    def take(self, indices: np.ndarray) -> SampleBatch:
        return SampleBatch(map_leaves(lambda column: column.take(indices), self._nested))

    def get_state(self) -> dict[str, Any]:
        """Returns all rows, as copies: JSON values, arrays without rows, and segments."""
        frames = {
            path: {
                **store.get_state(),
                "segments": self._frame_segments[path].make_segments(
                    store.first, store.next, store.get_segment
                ),
            }
            for path, store in self._frame_stores.items()
        }
        return {
            "columns": map_leaves(lambda x: np.empty((0, *x.shape), x.dtype), self._nested),
            "rows": self._segments.make_segments(self.first, self.num_added, self._copy_rows),
            "frames": frames,
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], capacity: int, num_added: int, allocator: BufferAllocator
    ) -> RingStorage:
        """Returns the storage of a result of `get_state`.

        Older states have all rows in `columns`, in the order of the ring. Raises a
        `CheckpointError` if the state is damaged.
        """
        columns = dict(state["columns"])
        if "rows" in state:
            cls(1, columns, BufferAllocator(_UNLIMITED))._check_first_segments(state)
            rows = cls(capacity, columns, allocator)
            rows._set_state(state, num_added)
            return rows
        rows = cls(capacity, columns, allocator)
        filled = min(num_added, capacity)
        rows.num_added = num_added - filled
        order = np.arange(rows.num_added, num_added) % capacity
        rows.add([leaf[order] for _, leaf in iterate_named_leaves(columns)])
        return rows

    def _check_first_segments(self, state: Mapping[str, Any]) -> None:
        """Checks the first segments of a state, before the whole memory is allocated."""
        if state["frames"].keys() != self._frame_stores.keys():
            raise CheckpointError(
                f"The state has frames of {[*state['frames']]}, but the columns have images in "
                f"{[*self._frame_stores]}. The state is damaged."
            )
        for _, segment in state["rows"][:1]:
            _check_arrays(self._make_empty(), segment.get_arrays())
        for path, frames in self._frame_stores.items():
            for _, segment in state["frames"][path]["segments"][:1]:
                _check_arrays(frames.make_empty_segment(), segment.get_arrays())

    def _set_state(self, state: Mapping[str, Any], num_added: int) -> None:
        for path, frames in self._frame_stores.items():
            stored = state["frames"][path]
            first, stop = int(stored["first"]), int(stored["next"])
            segments = self._frame_segments[path].read(stored["segments"], first, stop)
            frames.set_state(
                stored, (_check_arrays(frames.make_empty_segment(), x) for _, x in segments)
            )
        self.num_added = num_added
        for start, arrays in self._segments.read(state["rows"], self.first, num_added):
            checked = _check_arrays(self._make_empty(), arrays)
            indices = np.arange(start, start + len(next(iter(checked.values())))) % self.capacity
            for path, column in self.leaves.items():
                if isinstance(column, ImageColumn):
                    _check_frame_numbers(column, checked[path])
                column.stored[indices] = checked[path]

    def _make_empty(self) -> Arrays:
        return {path: column.stored[:0] for path, column in self.leaves.items()}

    def _copy_rows(self, start: int, stop: int) -> Arrays:
        indices = np.arange(start, stop) % self.capacity
        return {path: column.stored.take(indices, 0) for path, column in self.leaves.items()}

    def _make_column(self, path: str, leaf: np.ndarray, allocator: BufferAllocator) -> Column:
        name, _, inner = path.partition("/")
        if name not in _OBSERVATIONS or not is_image(leaf):
            return RowColumn(self.capacity, leaf, allocator)
        store = make_frame_store(leaf, allocator, self.capacity)
        for other in _OBSERVATIONS:
            existing = self._frame_stores.get(f"{other}/{inner}" if inner else other)
            if existing is not None and (existing.shape, existing.dtype) == (
                store.shape,
                store.dtype,
            ):
                store = existing
        if store not in self._frame_stores.values():
            self._frame_stores[path] = store
        return ImageColumn(self.capacity, leaf, allocator, store)


def _check_arrays(examples: Arrays, arrays: Arrays) -> Arrays:
    """Returns arrays if they have the names, row shapes and dtypes of `examples`, or raises."""
    expected, actual = (
        {name: (array.shape[1:], array.dtype) for name, array in named_arrays.items()}
        for named_arrays in (examples, arrays)
    )
    if actual != expected:
        raise CheckpointError(
            f"A segment should have rows of {expected!s:.300}, but has {actual!s:.300}. It is "
            "damaged."
        )
    return arrays


def _check_frame_numbers(column: ImageColumn, numbers: np.ndarray) -> None:
    first, stop = column.frames.first, column.frames.next
    if not first <= numbers.min() <= numbers.max() < stop:
        raise CheckpointError(
            f"Rows refer to frames {numbers.min()} to {numbers.max()}, but there are {first} to "
            f"{stop - 1}. The state is damaged."
        )
