"""`progress.csv`: one row per training iteration, written to disk immediately."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path

import numpy as np

from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.reporting.progress_row import FIXED_COLUMNS, to_number
from tfpolicies.system.atomic import write_atomically
from tfpolicies.system.regular_files import get_size, open_regular, read_content, read_regular

Row = dict[str, float]

_TAIL_BYTES = 1 << 16  # more than two rows have


class ProgressCsv:
    """Appends rows to a CSV file that is complete and without duplicates at any time.

    No file stays open between rows. Usually a row is one short write at the end of the file; a
    process killed during it leaves an incomplete last line, which the next reader ignores and the
    next writer removes. All other changes (a new column, rows that a resumed run repeats) replace
    the file atomically.

    Args:
        path: the file; created with the first row if missing.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._columns: list[str] | None = None  # of the file; None until it has been read
        self._last_iteration = -math.inf

    def append(self, row: Mapping[str, float]) -> None:
        """Writes one row and flushes it to the operating system.

        A row whose iteration the file already has replaces that row and all later ones, as when a
        run resumes from an older checkpoint. A row with a new column adds it to the file (older
        rows are empty there); a missing column is left empty.

        Args:
            row: numbers by column, with all of `FIXED_COLUMNS`; see `make_progress_row`.

        Raises:
            UsageError: if a fixed column is missing, a value is not a single number or `iteration`
                is not a count. The file is unchanged then.
            CheckpointError: if the existing file is not a progress file.
        """
        row = _validate_row(row)
        if self._columns is None:
            self._rewrite(_read_rows(self.path))
        is_repeated = row["iteration"] <= self._last_iteration
        has_new_columns = not set(row) <= set(self._columns or ())
        if is_repeated or has_new_columns:
            earlier_rows = [
                old_row
                for old_row in _read_rows(self.path)
                if old_row["iteration"] < row["iteration"]
            ]
            self._rewrite([*earlier_rows, row])
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_format_rows([row], self._columns or []))
        self._last_iteration = row["iteration"]

    def drop_after(self, iteration: int) -> int:
        """Removes the rows after `iteration`, which a resumed run will repeat.

        Returns:
            How many these were.

        Raises:
            CheckpointError: if the existing file is not a progress file.
        """
        rows = _read_rows(self.path)
        kept_rows = [row for row in rows if row["iteration"] <= iteration]
        self._rewrite(kept_rows)
        return len(rows) - len(kept_rows)

    def _rewrite(self, rows: list[Row]) -> None:
        extra = {name for row in rows for name in row} - set(FIXED_COLUMNS)
        columns = [*FIXED_COLUMNS, *sorted(extra)]
        text = _format_rows([dict(zip(columns, columns, strict=True)), *rows], columns)
        write_atomically(self.path, text.encode())
        self._columns = columns
        self._last_iteration = rows[-1]["iteration"] if rows else -math.inf


def read_progress(path: str | PathLike[str]) -> list[Row]:
    """Reads the rows of a progress file, one `{column: number}` per iteration.

    Every row has every column; empty cells are NaN. Counts are ints, other numbers floats. An
    incomplete last line of a killed process is ignored.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if it is not a progress file or another line than the last one is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"No progress file at {str(path)!r}. `path` must be the `progress.csv` of a run folder."
        )
    rows = _read_rows(path)
    columns = {name: math.nan for row in rows for name in row}
    return [{**columns, **row} for row in rows]


def _validate_row(row: Mapping[str, float]) -> Row:
    missing = [name for name in FIXED_COLUMNS if name not in row]
    if missing:
        raise UsageError(
            f"`row` must have every fixed column, but lacks {missing}. Use `progress_row(result)`."
        )
    numbers = {name: to_number(value) for name, value in row.items()}
    invalid = {name: row[name] for name, number in numbers.items() if number is None}
    if invalid:
        raise UsageError(f"`row` must hold single numbers, got {invalid!r}. Leave these out.")
    if not isinstance(numbers["iteration"], int) or numbers["iteration"] < 0:
        raise UsageError(f"`row['iteration']` must be a count, got {row['iteration']!r}.")
    return {name: number for name, number in numbers.items() if number is not None}


def _format_rows(rows: Iterable[Mapping[str, float | str]], columns: list[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()


def read_progress_columns(path: str | PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a progress file by columns, float64 `[iterations]`; NaN where a cell is empty.

    It is faster than `read_progress` for long files, and has the same errors for damaged ones; a
    missing file has no columns.
    """
    path = Path(path)
    names, lines = _read_cells(path)
    if not lines:
        return {}
    try:
        cells = zip(*lines, strict=True)
        columns = {
            name: np.array([float(cell) if cell else math.nan for cell in column])
            for name, column in zip(names, cells, strict=True)
        }
        is_valid = bool(np.isfinite(columns["iteration"]).all())
    except ValueError:
        is_valid = False
    if not is_valid:
        _read_rows(path)  # names the damaged line
    return columns


def read_last_row(path: str | PathLike[str]) -> Row:
    """Reads the last complete row of a progress file; empty if there is none, or it is damaged."""
    try:
        with open_regular(path) as file:
            size = get_size(file)
            start = read_content(file, size) if size <= 2 * _TAIL_BYTES else file.read(_TAIL_BYTES)
            if size > 2 * _TAIL_BYTES:
                file.seek(size - _TAIL_BYTES)
                start = start.partition(b"\n")[0] + b"\n" + file.read(_TAIL_BYTES)
        lines = start.decode("utf-8", errors="replace").split("\n")[:-1]
        names, *rows = csv.reader([lines[0], *lines[-1:]])
        return _parse_row(Path(path), len(lines), names, rows[0]) if len(lines) > 1 else {}
    except (OSError, IndexError, CheckpointError):
        return {}


def _read_rows(path: Path) -> list[Row]:
    """Returns the complete rows of the file, without empty cells; [] if there is no file."""
    columns, lines = _read_cells(path)
    return [_parse_row(path, number, columns, line) for number, line in enumerate(lines, start=2)]


def _read_cells(path: Path) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and the cells of the complete rows; none if there is no file."""
    if not path.exists():
        return [], []
    complete, newline, unfinished = _read_bytes(path).rpartition(b"\n")
    text = (complete if newline else unfinished).decode("utf-8", errors="replace")
    lines = list(csv.reader(io.StringIO(text, newline="")))
    if not lines:
        return [], []
    columns, *lines = lines
    if tuple(columns[: len(FIXED_COLUMNS)]) != FIXED_COLUMNS:
        raise CheckpointError(
            f"{str(path)!r} is not a progress file: its first line must begin with "
            f"{','.join(FIXED_COLUMNS)!r}, got {','.join(columns)[:80]!r}. Move it away."
        )
    return columns, lines


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}. Move it away.") from error


def _parse_row(path: Path, number: int, columns: list[str], cells: list[str]) -> Row:
    try:
        row = {
            name: int(cell) if cell.isdecimal() else float(cell)
            for name, cell in zip(columns, cells, strict=True)
            if cell
        }
        if not isinstance(row.get("iteration"), int):
            raise ValueError("no iteration")
    except ValueError:
        raise CheckpointError(
            f"Line {number} of {str(path)!r} is damaged: it must hold {len(columns)} numbers "
            f"with an iteration, got {','.join(cells)[:80]!r}. Delete that line."
        ) from None
    return row
