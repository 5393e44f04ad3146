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
_NEXT_COLUMNS = {"obs": "new_obs"}
"""By column, the column with its value one step after each row."""


@dataclass(frozen=True)
class TrajectoryHistory:
    """The last rows of P trajectories before the current ones.

    Attributes:
        num_rows: int64 `[P]`: the number of rows of the running episode, at most H.
        leaves: by collected column, its leaves `[P, H, ...]`, the newest row last.
    """

    num_rows: np.ndarray
    leaves: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)

    def select(self, rows: np.ndarray | slice | Sequence[int]) -> TrajectoryHistory:
        """Returns the history of some of the trajectories, int `[K]`."""
        leaves = {name: [x[rows] for x in parts] for name, parts in self.leaves.items()}
        return TrajectoryHistory(self.num_rows[rows], leaves)


class Trajectories:
    """R rows of P trajectories, one after the other, each in the order of time.

    Args:
        ends: bool `[R]`: the last row of each.
        history: the rows before them; None without any.

    Attributes:
        firsts: int64 `[P]`: the first row of each.
        lasts: int64 `[P]`: the last row of each.
    """

    def __init__(self, ends: np.ndarray, history: TrajectoryHistory | None = None) -> None:
        stops = np.flatnonzero(ends) + 1
        lengths = np.diff(stops, prepend=0)
        self.firsts, self.lasts = stops - lengths, stops - 1
        self._trajectory_indices = np.repeat(
            np.arange(len(stops)), lengths
        )  # of each row's trajectory
        self._history = history or TrajectoryHistory(np.zeros(len(stops), np.int64))

    def build_views(self, columns: Columns, requirements: Requirements) -> dict[str, Any]:
        """Returns the required columns, by name.

        One shift gives values `[R, *shape]`, several give windows `[R, shifts, *shape]`. A column
        without a shift that was not collected is left out: postprocessing adds it.

        Args:
            columns: the collected columns: `[R, *shape]` each, possibly nested.
            requirements: by the name of the resulting column.
        """
        result = {}
        for name, view in requirements.items():
            source = view.data_col or name
            if source in columns:
                result[name] = self._build_view(columns, source, view)
            elif source != name:
                raise MissingColumnError(
                    f"The view {name!r} needs the column {source!r}, which was not collected; "
                    f"there are {sorted(columns)}. Correct its data_col; columns that "
                    "`postprocess_trajectory` adds can be shifted there."
                )
        return result

    def _build_view(self, columns: Columns, source: str, view: ViewRequirement) -> Any:
        rows = np.arange(len(self._trajectory_indices))
        if view.index is None:
            row_indices = rows[:, None] + view.shift_arr
        else:
            origins = self.firsts if view.index >= 0 else self.lasts + 1
            row_indices = (origins[self._trajectory_indices] + view.index)[:, None]
        if len(view.shift_arr) == 1 and (row_indices[:, 0] == rows).all():
            return columns[source]
        arrays = self._gather(
            columns, source, self._trajectory_indices, row_indices, view.index is None
        )
        is_single_shift = row_indices.shape[1] == 1
        return map_leaves(
            lambda _: next(arrays)[:, 0] if is_single_shift else next(arrays), columns[source]
        )

    def _gather(
        self,
        columns: Columns,
        source: str,
        trajectories: np.ndarray,
        row_indices: np.ndarray,
        uses_history: bool = True,
    ) -> Iterator[np.ndarray]:
        """Yields the leaves `[K, S, ...]` of a column at rows `row_indices` `[K, S]`.

        Args:
            columns: `[R, ...]` each.
            source: the name of the column.
            trajectories: int64 `[K]`: the trajectories.
            row_indices: row numbers; those outside of a trajectory are before or after it.
            uses_history: whether rows before the trajectory are used.
        """
        next_column = columns.get(_NEXT_COLUMNS.get(source, ""))
        next_leaves = iter(()) if next_column is None else iterate_leaves(next_column)
        history_leaves = self._history.leaves.get(source, ()) if uses_history else ()
        first, last = (x[trajectories][:, None] for x in (self.firsts, self.lasts))
        distance = first - row_indices  # number of rows before the first one
        is_in_history = (distance > 0) & (distance <= self._history.num_rows[trajectories][:, None])
        for i, leaf in enumerate(iterate_leaves(columns[source])):
            next_leaf = next(next_leaves, None)
            pieces, width = [leaf, np.zeros((1, *leaf.shape[1:]), leaf.dtype)], len(leaf)
            positions = np.where((row_indices >= first) & (row_indices <= last), row_indices, width)
            if next_leaf is not None:
                pieces.append(next_leaf[self.lasts])
                positions = np.where(
                    row_indices == last + 1, width + 1 + trajectories[:, None], positions
                )
            if history_leaves:
                start, steps = sum(map(len, pieces)), history_leaves[i].shape[1]
                pieces.append(history_leaves[i].reshape(-1, *leaf.shape[1:]))
                row = start + (trajectories[:, None] + 1) * steps - distance
                positions = np.where(is_in_history, row, positions)
            # Taking rows by number from one array is several times faster than by two indices.
            yield np.concatenate(pieces, dtype=leaf.dtype).take(positions, axis=0)

    def get_history(
        self, columns: Columns, sources: Sequence[str], steps: int
    ) -> TrajectoryHistory:
        """Returns the last `steps` rows of each trajectory, including rows before it."""
        row_indices = self.lasts[:, None] + np.arange(1 - steps, 1)
        trajectories = np.arange(len(self.lasts))
        lengths = self.lasts - self.firsts + 1
        leaves = {s: list(self._gather(columns, s, trajectories, row_indices)) for s in sources}
        return TrajectoryHistory(np.minimum(self._history.num_rows + lengths, steps), leaves)


def get_history_lengths(requirements: Requirements) -> dict[str, int]:
    """Returns how many earlier rows the views need, by collected column.

    >>> views = {"old": ViewRequirement("obs", shift="-3:1"), "r": ViewRequirement("rewards")}
    >>> get_history_lengths(views)
    {'obs': 3}
    """
    result: dict[str, int] = {}
    for name, view in requirements.items():
        source, num_steps = view.data_col or name, -int(view.shift_arr.min())
        if num_steps > 0 and view.index is None:
            result[source] = max(num_steps, result.get(source, 0))
    return result
