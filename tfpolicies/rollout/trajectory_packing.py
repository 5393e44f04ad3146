"""Packs trajectories of different lengths next to each other into arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np


class Packing:
    """Positions of rows in an array `[N, T]` that keeps each trajectory contiguous.

    T is the length of the longest trajectory; shorter ones share a row of the array while they fit.

    >>> packing = Packing.from_ends(np.array([0, 0, 1, 1, 1], bool))
    >>> packing.pack(np.array([1, 2, 3, 4, 5]))
    array([[1, 2, 3],
           [4, 5, 0]])
    """

    def __init__(self, shape: tuple[int, int], positions: np.ndarray | None = None) -> None:
        self.shape = shape
        self._positions = positions  # int [R], in the flat array; None if the rows fill it in order

    @classmethod
    def from_ends(cls, ends: np.ndarray) -> Packing:
        """Returns the packing of trajectories whose last rows are marked, bool `[R]`."""
        stops = np.flatnonzero(ends) + 1
        lengths = np.diff(stops, prepend=0)
        width = int(lengths.max())
        if (lengths == width).all():
            return cls((len(lengths), width))
        starts, row, used = [], 0, 0
        for length in lengths.tolist():
            if used + length > width:
                row, used = row + 1, 0
            starts.append(row * width + used)
            used += length
        positions = np.repeat(np.array(starts) - (stops - lengths), lengths) + np.arange(len(ends))
        return cls((row + 1, width), positions)

    def pack(self, column: np.ndarray) -> np.ndarray:
        """Returns a column `[R, ...]` as `[N, T, ...]`, padded with zeros."""
        packed = column
        if self._positions is not None:
            packed = np.zeros((self.shape[0] * self.shape[1], *column.shape[1:]), column.dtype)
            packed[self._positions] = column
        result: np.ndarray = packed.reshape(*self.shape, *column.shape[1:])
        return result

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """Returns the rows `[R, ...]` of a packed column `[N, T, ...]`."""
        flat = packed.reshape((-1, *packed.shape[2:]))
        return flat if self._positions is None else flat[self._positions]

    def get_positions(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions `(n, t)` of rows, int `[K]` each."""
        positions = rows if self._positions is None else self._positions[rows]
        row, column = np.divmod(positions, self.shape[1])
        return row, column

    def get_rows_at(self, steps: np.ndarray) -> np.ndarray:
        """Returns, for each row, the row at step `steps` of its line in the array."""
        positions, width = self._positions, self.shape[1]
        if positions is None:
            positions, row_at = np.arange(len(steps)), None
        else:
            row_at = np.zeros(self.shape[0] * width, np.int64)
            row_at[positions] = np.arange(len(positions))
        step_positions: np.ndarray = positions // width * width + steps
        return step_positions if row_at is None else row_at[step_positions]


class PackedColumns(Mapping[str, np.ndarray]):
    """Columns `[R, ...]` that are packed to `[N, T, ...]` when they are read.

    Args:
        columns: by name.
        packing: the positions of their rows.
    """

    def __init__(self, columns: Mapping[str, np.ndarray], packing: Packing) -> None:
        self._columns = columns
        self._packing = packing

    def __getitem__(self, name: str) -> np.ndarray:
        return self._packing.pack(self._columns[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)
