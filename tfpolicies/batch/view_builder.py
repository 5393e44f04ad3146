"""From collected columns to those that a loss reads, as view requirements say.

What lies before an episode's beginning is zero, or the column's initial value; what lies behind
its end is zero, but `obs` one step after a row is that row's `new_obs`. (`acting_views.py` does the
same for the newest step.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.batch.layout import SEQ_LENS
from tfpolicies.batch.leaves import iterate_leaves, map_leaves
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import BatchError, BatchUsageError, MissingColumnError

_FOLLOWING = {"obs": "new_obs"}  # the collected column with the value one step after each row


class _Pieces(NamedTuple):
    """Where the trajectory of each row of a fragment begins and ends; int64 `[N, T]` each."""

    first: np.ndarray  # its first row in the fragment
    last: np.ndarray  # its last one
    known: np.ndarray  # its first row that is known at all: below 0 for rows before the fragment

    @classmethod
    def of(cls, starts: np.ndarray, known_before: np.ndarray) -> _Pieces:
        """Returns those of a fragment in which episodes begin at `starts`, bool `[N, T]`."""
        count, length = starts.shape
        index = np.arange(length)
        first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
        ends = np.ones((count, length), bool)
        ends[:, :-1] = starts[:, 1:]
        last = np.where(ends, index, length)[:, ::-1]
        last = np.minimum.accumulate(last, axis=1)[:, ::-1]
        continued = (first == 0) & ~starts[:, :1]
        return cls(first, last, np.where(continued, -known_before[:, None], first))


class _Rows(NamedTuple):
    """The rows of a fragment that a column has values for; int64 `[R]` each."""

    env: np.ndarray
    step: np.ndarray
    first: np.ndarray
    last: np.ndarray
    known: np.ndarray

    @classmethod
    def every(cls, pieces: _Pieces, repeat: int) -> _Rows:
        """Returns every `repeat`-th row of each trajectory, from its first in the fragment."""
        index = np.arange(pieces.first.shape[1])
        env, step = np.nonzero((index - pieces.first) % repeat == 0)
        return cls(env, step, *(array[env, step] for array in pieces))


def training_views(
    columns: Mapping[str, Any],
    requirements: Mapping[str, ViewRequirement],
    *,
    episode_starts: Any = None,
    before: Mapping[str, Any] | None = None,
    known_before: Any = None,
    initial: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the columns that training reads, of the fragments of N environments at once.

    A requirement with one shift gives values `[rows, *shape]`; one with several gives windows
    `[rows, shifts, *shape]`. There are N * T rows, environment by environment; for a
    `batch_repeat_value` of k there is one for every k rows of a trajectory (from its first in the
    fragment), and the column `seq_lens` says how many they stand for.

    Args:
        columns: what was collected: `[N, T, *shape]`, possibly nested. A column that is taken as it
            is (shift 0) is a view, if its memory allows it.
        requirements: by the name of the resulting column; those not used for training are left out.
        episode_starts: bool `[N, T]`, True at the first row of each episode; None for nowhere.
        before: columns `[N, H, *shape]` of the H rows before the fragment, H of each column's own.
        known_before: int `[N]`, how many of the rows before belong to the episode that is running
            at the fragment's first row; None for all of them.
        initial: by name of a collected column, its value before an episode's beginning (without N
            and T), instead of zero; a memory's initial state, for example.

    Raises:
        MissingColumnError: if a column was not collected.
        BatchError: if shapes do not fit.
        BatchUsageError: if two requirements have different `batch_repeat_value`s above 1, or a list
            is to be shifted.

    >>> rewards = np.array([[1.0, 2.0, 3.0]])
    >>> previous = {"prev_rewards": ViewRequirement("rewards", shift="-2:-1")}
    >>> training_views({"rewards": rewards}, previous)["prev_rewards"].tolist()
    [[0.0, 0.0], [0.0, 1.0], [1.0, 2.0]]
    """
    wanted = {name: view for name, view in requirements.items() if view.used_for_training}
    repeat = _common_repeat(wanted)
    count, length = _fragment_shape(columns)
    starts = np.zeros((count, length), bool) if episode_starts is None else episode_starts
    starts = _of_shape("episode_starts", starts, (count, length))
    before = before or {}
    _require_rows(before, count)
    if known_before is None:
        rows = [leaf.shape[1] for column in before.values() for leaf in iterate_leaves(column)]
        known_before = np.full(count, max(rows, default=0))
    pieces = _Pieces.of(starts, _of_shape("known_before", known_before, (count,)))
    rows_by_repeat = {k: _Rows.every(pieces, k) for k in {1, repeat}}
    views: dict[str, Any] = {}
    for name, view in wanted.items():
        source = view.data_col or name
        if source not in columns:
            raise MissingColumnError(
                f"The column {name!r} is made of {source!r}, which was not collected; there are "
                f"{sorted(columns)}. Collect it, or drop the view requirement."
            )
        views[name] = _view(
            view,
            rows_by_repeat[view.batch_repeat_value],
            columns[source],
            before.get(source),
            columns.get(_FOLLOWING.get(source, "")),
            (initial or {}).get(source),
        )
    if repeat > 1:
        some = rows_by_repeat[repeat]
        views[SEQ_LENS] = np.minimum(some.last - some.step + 1, repeat).astype(np.int32)
    return views


def trajectory_views(
    columns: Mapping[str, Any],
    requirements: Mapping[str, ViewRequirement],
    *,
    before: Mapping[str, Any] | None = None,
    initial: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns what `training_views` does, of one trajectory of one agent.

    Args:
        columns: `[T, *shape]`, possibly nested; lists may be taken as they are (`infos`).
        requirements: see `training_views`.
        before: the rows of the same episode before the trajectory, `[H, *shape]`; None if it
            begins with the episode.
        initial: see `training_views`.

    Raises:
        MissingColumnError, BatchError, BatchUsageError: see `training_views`.
    """

    def batched(some: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: map_leaves(lambda x: x if isinstance(x, list) else np.asarray(x)[None], column)
            for name, column in some.items()
        }

    return training_views(
        batched(columns), requirements, before=batched(before or {}), initial=initial
    )


def _view(
    view: ViewRequirement,
    rows: _Rows,
    column: Any,
    before: Any,
    following: Any,
    initial: Any,
) -> Any:
    """Returns one column: `column`, `before` and so on are nested alike, or None."""
    shifts = view.shift_arr
    plain = view.index is None and len(shifts) == 1 and view.batch_repeat_value == 1
    if plain and shifts[0] == 0:
        return map_leaves(_flat, column)
    if plain and shifts[0] == 1 and following is not None:
        return map_leaves(_flat, following)
    if view.index is None:
        steps, lowest = rows.step[:, None] + shifts, rows.known
    else:
        origin = rows.first if view.index >= 0 else rows.last + 1
        steps, lowest = (origin + view.index)[:, None], rows.first

    def gather(leaf: Any, earlier: Any, later: Any, start: Any) -> np.ndarray:
        gathered = _gather(leaf, earlier, start, rows, steps, lowest)
        if later is not None:
            row, position = np.nonzero(steps == rows.last[:, None] + 1)
            gathered[row, position] = np.asarray(later)[rows.env[row], rows.last[row]]
        return gathered[:, 0] if steps.shape[1] == 1 else gathered

    return map_together(gather, column, before, following, initial)


def _gather(
    leaf: Any, before: Any, initial: Any, rows: _Rows, steps: np.ndarray, lowest: np.ndarray
) -> np.ndarray:
    """Returns `leaf` `[N, T, ...]` at `steps` `[R, K]`, as `[R, K, ...]`."""
    if isinstance(leaf, list):
        raise BatchUsageError(
            "A list such as `infos` can only be seen as it is. Set `shift=0` and no `index`, or "
            "collect an array."
        )
    history = 0 if before is None else before.shape[1]
    source = leaf if before is None else np.concatenate([before, leaf], axis=1, dtype=leaf.dtype)
    lowest = np.maximum(lowest, -history)
    valid = (steps >= lowest[:, None]) & (steps <= rows.last[:, None])
    width = source.shape[1]
    indices = rows.env[:, None] * width + np.where(valid, steps + history, 0)
    # Taking rows by number from a flat array is several times faster than by two indices.
    gathered = _flat(source).take(indices, axis=0)
    gathered[~valid] = 0
    if initial is not None:
        gathered[steps < lowest[:, None]] = initial
    return gathered


def map_together(function: Callable[..., Any], column: Any, *others: Any) -> Any:
    """Returns `column` with `function` applied to each leaf and to the others' leaves there."""
    if isinstance(column, dict | tuple):
        keys = list(column) if isinstance(column, dict) else range(len(column))
        parts = {
            key: map_together(
                function, column[key], *(None if other is None else other[key] for other in others)
            )
            for key in keys
        }
        return parts if isinstance(column, dict) else tuple(parts.values())
    return function(column, *others)


def _flat(leaf: Any) -> Any:
    if isinstance(leaf, list):
        return leaf
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _common_repeat(requirements: Mapping[str, ViewRequirement]) -> int:
    repeats = {name: view.batch_repeat_value for name, view in requirements.items()}
    several = sorted({repeat for repeat in repeats.values() if repeat > 1})
    if len(several) > 1:
        raise BatchUsageError(
            "All columns with a `batch_repeat_value` above 1 must have the same one, as a batch "
            f"has one `seq_lens`, but got {repeats}. Set the model's `max_seq_len`."
        )
    return several[0] if several else 1


def _fragment_shape(columns: Mapping[str, Any]) -> tuple[int, int]:
    """Returns N and T, which all arrays must begin with."""
    shapes: dict[tuple[int, ...], str] = {}
    for name, column in columns.items():
        for leaf in iterate_leaves(column):
            if not isinstance(leaf, list):
                shapes.setdefault(np.shape(leaf)[:2], name)
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise BatchError(
            "Collected columns must be arrays [N, T, ...] of one N and T, but begin with "
            f"{ {name: shape for shape, name in shapes.items()} }. Cut them to the same rows."
        )
    return next(iter(shapes))  # type: ignore[return-value]


def _require_rows(before: Mapping[str, Any], count: int) -> None:
    for name, column in before.items():
        for leaf in iterate_leaves(column):
            if np.ndim(leaf) < 2 or len(leaf) != count:
                raise BatchError(
                    f"`before` must have arrays [{count}, H, ...], but {name!r} has the shape "
                    f"{np.shape(leaf)}. Keep the last rows of every environment."
                )


def _of_shape(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != shape:
        raise BatchError(f"`{name}` must have the shape {shape}, but has {array.shape}.")
    return array
