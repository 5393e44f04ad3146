"""From the newest values to the columns that acting reads, as view requirements say."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.batch.leaves import map_leaves
from tfpolicies.batch.view_builder import map_together
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import BatchUsageError, MissingColumnError, SpaceError


class ActingViews:
    """The last values of N trajectories, and what acting sees of them.

    Before each action, `views` gives the inputs; after it, `append` stores what the step brought.
    A requirement with one shift gives values `[M, *shape]`; one with several gives windows
    `[M, shifts, *shape]`. What lies before an episode's beginning is zero, or the initial value.

    Args:
        requirements: by the name of the resulting column; those not used for acting are left out.
        num_rows: the number N of trajectories (environments, or agents in them).
        initial: by name of a collected column, its value before an episode's beginning (without the
            batch axis), instead of zeros of the requirement's space.

    Attributes:
        remembered: the columns that `append` reads.
        current: the columns that `views` reads.

    Raises:
        BatchError: if a requirement looks ahead.
        BatchUsageError: if one has an absolute `index`.
        SpaceError: if the space of a remembered column has no fixed shape.

    >>> seen = ActingViews({"prev_rewards": ViewRequirement("rewards", shift=-1)}, num_rows=2)
    >>> seen.append({"rewards": [1.0, 2.0]})
    >>> seen.reset(1)
    >>> seen.views({})
    {'prev_rewards': array([1., 0.], dtype=float32)}
    """

    def __init__(
        self,
        requirements: Mapping[str, ViewRequirement],
        num_rows: int,
        *,
        initial: Mapping[str, Any] | None = None,
    ) -> None:
        self._wanted = {
            k: view for k, view in requirements.items() if view.used_for_compute_actions
        }
        depths: dict[str, int] = {}
        current: list[str] = []
        for name, view in self._wanted.items():
            view.require_causal(name)
            if view.index is not None:
                raise BatchUsageError(
                    f"Acting sees no absolute positions of a trajectory, but {name!r} has the "
                    f"index {view.index}. Set `used_for_compute_actions=False`, or use a shift."
                )
            source = view.data_col or name
            depths[source] = max(depths.get(source, 0), -int(view.shift_arr.min()))
            if view.shift_arr.max() == 0 and source not in current:
                current.append(source)
        self.current = tuple(current)
        self.remembered = tuple(source for source, depth in depths.items() if depth)
        self._initial = {
            source: _initial_value(source, requirements, (initial or {}).get(source))
            for source in self.remembered
        }
        self._past = {
            source: map_leaves(partial(_repeated, num_rows, depths[source]), start)
            for source, start in self._initial.items()
        }

    def reset(self, rows: Any) -> None:
        """Begins new episodes: rows are numbers, int or `[K]`, or a bool mask `[N]`."""
        for source in self.remembered:
            map_together(
                lambda past, start: past.__setitem__(rows, start),
                self._past[source],
                self._initial[source],
            )

    def views(self, current: Mapping[str, Any], rows: Any = None) -> dict[str, Any]:
        """Returns what acting reads now, as arrays that later calls do not write.

        Args:
            current: the columns of `self.current`, `[M, *shape]`, as they are now.
            rows: which trajectories act, int `[M]`; None for all N.

        Raises:
            MissingColumnError: if `current` lacks a column.
        """
        _require(self.current, current, "views")
        chosen = slice(None) if rows is None else np.asarray(rows)
        found = {}
        for name, view in self._wanted.items():
            source, shifts = view.data_col or name, view.shift_arr
            past, now = self._past.get(source), current.get(source)
            if len(shifts) == 1 and shifts[0] == 0:
                found[name] = now
            else:
                seen = partial(_window, chosen, shifts)
                found[name] = map_together(seen, past, now if shifts.max() == 0 else None)
        return found

    def append(self, columns: Mapping[str, Any], rows: Any = None) -> None:
        """Stores the values of one step, after it.

        Args:
            columns: at least those of `self.remembered`, `[M, *shape]`.
            rows: which trajectories acted, int `[M]`; None for all N.

        Raises:
            MissingColumnError: if a column is missing; nothing has changed then.
        """
        _require(self.remembered, columns, "append")
        chosen = slice(None) if rows is None else np.asarray(rows)

        def store(past: np.ndarray, value: Any) -> None:
            if past.shape[1] > 1:
                past[chosen, :-1] = past[chosen, 1:]
            past[chosen, -1] = value

        for source in self.remembered:
            map_together(store, self._past[source], columns[source])


def _repeated(num_rows: int, depth: int, start: np.ndarray) -> np.ndarray:
    return np.broadcast_to(start, (num_rows, depth, *start.shape)).copy()


def _window(chosen: Any, shifts: np.ndarray, past: np.ndarray, now: Any) -> np.ndarray:
    """Returns copies of the values at `shifts` from now; `past` `[N, D, ...]` ends a step ago."""
    seen = past[chosen]
    if now is not None:
        seen = np.concatenate([seen, np.asarray(now, past.dtype)[:, None]], axis=1)
        shifts = shifts - 1
    if len(shifts) == 1:
        return seen[:, shifts[0]].copy()
    return seen.take(shifts + seen.shape[1], axis=1)


def _require(names: tuple[str, ...], columns: Mapping[str, Any], method: str) -> None:
    missing = [name for name in names if name not in columns]
    if missing:
        raise MissingColumnError(
            f"`{method}` needs the columns {list(names)}, but {missing} is missing in "
            f"{sorted(columns)}. Pass it, or drop the view requirement."
        )


def _initial_value(source: str, requirements: Mapping[str, ViewRequirement], given: Any) -> Any:
    if given is not None:
        return map_leaves(np.asarray, given)
    own = requirements.get(source)
    users = [view for view in requirements.values() if view.data_col == source]
    space = (own or users[0]).space
    return _zeros(source, space)


def _zeros(source: str, space: Any) -> Any:
    """Returns zeros in the structure of a space; float64 becomes float32, as in batches."""
    if isinstance(space, spaces.Dict):
        return {key: _zeros(source, part) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_zeros(source, part) for part in space)
    if space.shape is None or space.dtype is None:
        raise SpaceError(
            f"Acting remembers {source!r}, so its space must have a fixed shape, but it is "
            f"{space}. Give the view requirement another space, or pass `initial`."
        )
    dtype = np.dtype(space.dtype)
    return np.zeros(space.shape, np.float32 if dtype == np.float64 else dtype)
