"""Data sources: tables of recorded steps that are read in chunks, from any position.

A source consists of tables, usually files. Positions within a table grow with its rows: they are
row numbers, or byte offsets of lines. A source has no other state, so a reader that knows its
position can continue in another process.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfpolicies.errors import BatchError

Columns = dict[str, np.ndarray]
"""Arrays `[rows, ...]` by name; texts are arrays of objects."""


TRUST_ADVICE = (
    "If the file is yours, read it in this process, without limits: input_config={'trusted': True}."
)


class Unit(NamedTuple):
    """A part of a table that is read as a whole: the order of units is shuffled, not their rows.

    Attributes:
        table: the index of the table.
        start: the position of its first row.
        stop: the position after its last row.
    """

    table: int
    start: int
    stop: int


@dataclasses.dataclass
class Chunk:
    """Consecutive rows of a table, or of one policy in it.

    Attributes:
        columns: the columns that were asked for and exist.
        rows: the number of rows.
        table: the name of the table, for messages.
        first_row: the number of the first row in the table; -1 if rows are in lines.
        line_offsets: int64 `[rows]`, the byte offset of each row's line; None without lines.
        policy_id: the policy that the rows belong to; None if the table does not say it.
        row_numbers: int64 `[rows]`, the number of each row in the table, or in its line; None if
            they follow each other.
        row_tables: objects `[rows]`, the name of each row's table; None if all are of `table`.
    """

    columns: Columns
    rows: int
    table: str
    first_row: int = 0
    line_offsets: np.ndarray | None = None
    policy_id: str | None = None
    row_numbers: np.ndarray | None = None
    row_tables: np.ndarray | None = None

    def describe_row(self, row: int) -> str:
        """Returns where a row is: table and row number, or file, line and row in the line."""
        number = int(self.get_row_numbers()[row])
        table = self.table if self.row_tables is None else str(self.row_tables[row])
        if self.line_offsets is None:
            return f"row {number} of {table}"
        line = count_lines(table, int(self.line_offsets[row]))
        return f"row {number} in line {line} of {table}"

    def get_row_numbers(self) -> np.ndarray:
        """Returns the number of each row in the table, or in its line."""
        if self.row_numbers is not None:
            return self.row_numbers
        rows = np.arange(self.rows)
        if self.line_offsets is None:
            return rows + self.first_row
        is_first = np.append(True, self.line_offsets[1:] != self.line_offsets[:-1])[: self.rows]
        return rows - np.maximum.accumulate(np.where(is_first, rows, 0))

    def get_row_tables(self) -> np.ndarray:
        """Returns the name of each row's table, as objects `[rows]`."""
        if self.row_tables is not None:
            return self.row_tables
        return np.full(self.rows, self.table, object)

    def reorder(self, order: np.ndarray) -> Chunk:
        """Returns the rows in another order."""
        return dataclasses.replace(
            self,
            columns={name: column[order] for name, column in self.columns.items()},
            line_offsets=_take(self.line_offsets, order),
            row_numbers=self.get_row_numbers()[order],
            row_tables=_take(self.row_tables, order),
        )

    def take(self, rows: slice) -> Chunk:
        """Returns some of the rows, as views."""
        start, stop, _ = rows.indices(self.rows)
        numbers = self.row_numbers
        if self.line_offsets is not None:
            numbers = self.get_row_numbers()  # the first line may be cut
        return dataclasses.replace(
            self,
            columns={name: column[rows] for name, column in self.columns.items()},
            rows=max(0, stop - start),
            first_row=self.first_row + start if self.first_row >= 0 else -1,
            line_offsets=_take(self.line_offsets, rows),
            row_numbers=_take(numbers, rows),
            row_tables=_take(self.row_tables, rows),
        )


def _take(array: np.ndarray | None, rows: slice | np.ndarray) -> np.ndarray | None:
    return None if array is None else array[rows]


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Joins chunks of one policy.

    Raises:
        BatchError: if their columns differ, or the shapes of rows.
    """
    first = chunks[0]
    if len(chunks) == 1:
        return first
    for chunk in chunks[1:]:
        if chunk.columns.keys() != first.columns.keys():
            different = sorted(chunk.columns.keys() ^ first.columns.keys())
            raise BatchError(
                f"All rows must have the same columns, but {chunk.describe_row(0)} and "
                f"{first.describe_row(0)} differ in {different!s:.200}."
            )
        for name, column in chunk.columns.items():
            expected = first.columns[name].shape[1:]
            if column.shape[1:] != expected:
                raise BatchError(
                    f"Column {name!r:.100} must have the shape {expected} in all rows, but "
                    f"{chunk.describe_row(0)} has {column.shape[1:]}."
                )
    offsets = [chunk.line_offsets for chunk in chunks]
    tables = None
    if any(chunk.table != first.table or chunk.row_tables is not None for chunk in chunks):
        tables = np.concatenate([chunk.get_row_tables() for chunk in chunks])
    return Chunk(
        {name: np.concatenate([x.columns[name] for x in chunks]) for name in first.columns},
        sum(chunk.rows for chunk in chunks),
        first.table,
        first.first_row,
        None if first.line_offsets is None else np.concatenate(offsets),  # type: ignore[arg-type]
        first.policy_id,
        np.concatenate([chunk.get_row_numbers() for chunk in chunks]),
        tables,
    )


def count_lines(path: str, offset: int) -> int:
    """Returns the number of the line that begins at an offset of a file; the first is 1."""
    number = 1
    with open(path, "rb") as file:
        while offset > 0 and (content := file.read(min(offset, 1 << 20))):
            number += content.count(b"\n")
            offset -= len(content)
    return number


class ReadRequest(NamedTuple):
    """A request for rows of a table.

    Attributes:
        table: the index of the table.
        position: where to begin.
        stop: rows that begin here or later are not read.
        max_rows: how many rows to read.
        names: the columns to decode; None for all.
    """

    table: int
    position: int
    stop: int
    max_rows: int
    names: tuple[str, ...] | None


class ReadResult(NamedTuple):
    """The result of reading.

    Attributes:
        chunks: consecutive rows; one for each policy if the table names policies.
        position: the position after them.
    """

    chunks: list[Chunk]
    position: int


class DataSource(abc.ABC):
    """Tables of recorded steps.

    Attributes:
        tables: their names, for messages.
        units: the parts whose order is shuffled, in the order of the tables.
        ends: the position after the last row of each table.
        column_names: of all tables.
        has_contiguous_episodes: whether an episode's rows follow each other, also from unit to unit
            of a table. Otherwise episodes that run at the same time alternate.
        can_seek: whether any position can be read again.
        metadata: statements of the tables about themselves, such as their spaces, as JSON values.
    """

    tables: Sequence[str]
    units: Sequence[Unit]
    ends: Sequence[int]
    column_names: tuple[str, ...]
    has_contiguous_episodes: bool = True
    can_seek: bool = True
    metadata: Mapping[str, object] = {}

    @abc.abstractmethod
    def read(self, request: ReadRequest) -> ReadResult:
        """Returns the rows from a position on: at least one, and at most about `max_rows`.

        Raises:
            BatchError: if the table is damaged; the message names file, place and problem.
        """

    def prefetch(self, request: ReadRequest) -> None:  # noqa: B027
        """Announces a call of `read`, so that a source may begin to read in the background."""

    def close(self) -> None:  # noqa: B027
        """Closes files and processes; may be called again."""
