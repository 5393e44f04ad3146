"""Builds the columns that view requirements describe from collected columns.

Values before an episode's start or after a trajectory's end are zero, except that the observation
one step after the last row is that row's `new_obs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tfpolicies.batch.leaves import Columns, iterate_leaves, map_leaves
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import MissingColumnError

Requirements: TypeAlias = Mapping[str, ViewRequirement]
_REACHED = {"obs": "new_obs"}
"""By column, the column with its value one step after each row."""


@dataclass(frozen=True)
class Past:
    """The last rows of P trajectories before the current ones.

    Attributes:
        num_rows: int64 `[P]`: the number of rows of the running episode, at most H.
        leaves: by collected column, its leaves `[P, H, ...]`, the newest row last.
    """

    known: np.ndarray
    leaves: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)

    def of(self, rows: np.ndarray | slice | Sequence[int]) -> Past:
        """Returns the history of some of the trajectories, int `[K]`."""
        leaves = {name: [x[rows] for x in parts] for name, parts in self.leaves.items()}
        return Past(self.known[rows], leaves)


class Trajectories:
    """R rows of P trajectories, one after the other, each in the order of time.

    Args:
        ends: bool `[R]`: the last row of each.
        history: the rows before them; None without any.

    Attributes:
        firsts: int64 `[P]`: the first row of each.
        lasts: int64 `[P]`: the last row of each.
    """

    def __init__(self, ends: np.ndarray, past: Past | None = None) -> None:
        stops = np.flatnonzero(ends) + 1
        lengths = np.diff(stops, prepend=0)
        self.firsts, self.lasts = stops - lengths, stops - 1
        self._number = np.repeat(np.arange(len(stops)), lengths)  # of each row's trajectory
        self._past = past or Past(np.zeros(len(stops), np.int64))

    def views(self, columns: Columns, requirements: Requirements) -> dict[str, Any]:
        """Returns the required columns, by name.

        One shift gives values `[R, *shape]`, several give windows `[R, shifts, *shape]`. A column
        without a shift that was not collected is left out: postprocessing adds it.

        Args:
            columns: the collected columns: `[R, *shape]` each, possibly nested.
            requirements: by the name of the resulting column.

        Raises:
            MissingColumnError: if a source column was not collected.
        """
        found = {}
        for name, view in requirements.items():
            source = view.data_col or name
            if source in columns:
                found[name] = self._view(columns, source, view)
            elif source != name:
                raise MissingColumnError(
                    f"The view {name!r} needs the column {source!r}, which was not collected; "
                    f"there are {sorted(columns)}. Correct its data_col; columns that "
                    "`postprocess_trajectory` adds can be shifted there."
                )
        return found

    def _view(self, columns: Columns, source: str, view: ViewRequirement) -> Any:
        rows = np.arange(len(self._number))
        if view.index is None:
            at = rows[:, None] + view.shift_arr
        else:
            origins = self.firsts if view.index >= 0 else self.lasts + 1
            at = (origins[self._number] + view.index)[:, None]
        if len(view.shift_arr) == 1 and (at[:, 0] == rows).all():
            return columns[source]
        arrays = self._gathered(columns, source, self._number, at, view.index is None)
        only = at.shape[1] == 1
        return map_leaves(lambda _: next(arrays)[:, 0] if only else next(arrays), columns[source])

    def _gathered(
        self,
        columns: Columns,
        source: str,
        number: np.ndarray,
        at: np.ndarray,
        looks_back: bool = True,
    ) -> Iterator[np.ndarray]:
        """Yields the leaves of a column at rows `row_indices` `[K, S]` of trajectories, `[K, S, ...]` each.

        Args:
            columns: `[R, ...]` each.
            source: the name of the column.
            trajectories: int64 `[K]`: the trajectories.
            row_indices: row numbers; those outside of a trajectory are before or after it.
            uses_history: whether rows before the trajectory are used.
        """
        reached = columns.get(_REACHED.get(source, ""))
        after = iter(()) if reached is None else iterate_leaves(reached)
        past = self._past.leaves.get(source, ()) if looks_back else ()
        first, last = (x[number][:, None] for x in (self.firsts, self.lasts))
        before = first - at  # number of rows before the first one
        is_known = (before > 0) & (before <= self._past.known[number][:, None])
        for i, leaf in enumerate(iterate_leaves(columns[source])):
            later = next(after, None)
            pieces, width = [leaf, np.zeros((1, *leaf.shape[1:]), leaf.dtype)], len(leaf)
            where = np.where((at >= first) & (at <= last), at, width)
            if later is not None:
                pieces.append(later[self.lasts])
                where = np.where(at == last + 1, width + 1 + number[:, None], where)
            if past:
                start, steps = sum(map(len, pieces)), past[i].shape[1]
                pieces.append(past[i].reshape(-1, *leaf.shape[1:]))
                row = start + (number[:, None] + 1) * steps - before
                where = np.where(is_known, row, where)
            # Taking rows by number from one array is several times faster than by two indices.
            yield np.concatenate(pieces, dtype=leaf.dtype).take(where, axis=0)

    def tails(self, columns: Columns, sources: Sequence[str], steps: int) -> Past:
        """Returns the last `steps` rows of each trajectory, including rows before it."""
        at = self.lasts[:, None] + np.arange(1 - steps, 1)
        number = np.arange(len(self.lasts))
        lengths = self.lasts - self.firsts + 1
        leaves = {s: list(self._gathered(columns, s, number, at)) for s in sources}
        return Past(np.minimum(self._past.known + lengths, steps), leaves)


def steps_back(requirements: Requirements) -> dict[str, int]:
    """Returns how many earlier rows the views need, by collected column.

    >>> steps_back({"old": ViewRequirement("obs", shift="-3:1"), "r": ViewRequirement("rewards")})
    {'obs': 3}
    """
    found: dict[str, int] = {}
    for name, view in requirements.items():
        source, back = view.data_col or name, -int(view.shift_arr.min())
        if back > 0 and view.index is None:
            found[source] = max(back, found.get(source, 0))
    return found
