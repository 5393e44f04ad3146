"""Maps the columns of a table to the columns of batches, and checks each number against its space.

A table may have any columns: `{"obs": ["temperature", "load"], "actions": "setpoint", "rewards": f,
"eps_id": "day"}` says where each column of a batch comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.errors import (
    BatchError,
    ConfigError,
    MissingColumnError,
    ObservationError,
    suggest_similar_names,
)
from tfpolicies.models.rllib_flattening import decode_flat_observations
from tfpolicies.models.spaces import (
    MASK,
    Leaf,
    action_leaves,
    has_mask,
    is_choice,
    leaves,
)
from tfpolicies.offline.column_checks import (
    check_choices,
    check_masks,
    require_numbers,
    to_flags,
    to_floats,
    to_ids,
    to_integers,
    to_leaf_dtype,
)
from tfpolicies.offline.data_source import Chunk
from tfpolicies.offline.step_columns import (
    ACTIONS,
    AGENT_INDEX,
    EPS_ID,
    NEW_OBS,
    OBS,
    REWARDS,
    SEPARATOR,
    TERMINATEDS,
    TRUNCATEDS,
    T,
)

ColumnSource = str | Sequence[str] | Mapping[str, Any] | Callable[[Mapping[str, np.ndarray]], Any]
"""Source of a column: a column's name; several, one for each number; one for each part of a nested
space; or a function of all columns."""

_MASK = (MASK,)
_NESTED = (OBS, NEW_OBS, ACTIONS)
_FLAGS, _INTEGERS = (TERMINATEDS, TRUNCATEDS), (T, AGENT_INDEX, "unroll_id", "env_id")
_OLD_NAMES = {TERMINATEDS: "dones"}
_TERMINATED_ADVICE = (
    " It is true where an episode ended by itself, so that no value follows. If episodes only "
    "stop, as days do, give a column or a function of zeros."
)
_COMMON_NAMES = {
    OBS: ("observation", "observations", "state", "states"),
    NEW_OBS: ("next_obs", "next_observation", "next_observations", "next_state", "next_states"),
    ACTIONS: ("action", "act"),
    REWARDS: ("reward", "r"),
    TERMINATEDS: ("terminated", "done", "terminal", "terminals"),
    TRUNCATEDS: ("truncated", "timeout", "timeouts"),
    EPS_ID: ("episode_id", "episode", "eps"),
}
"""Names in other packages, which an error suggests."""


@dataclass
class Steps:
    """Steps of one policy, checked, in the order of the table.

    Attributes:
        chunk: where they come from.
        obs: observation leaves `[R, ...]`; None if they were not asked for.
        new_obs: leaves of the next observations; None if the table has none.
        actions: action leaves `[R, ...]`, as the environment takes them.
        columns: other columns `[R, ...]` that exist.
    """

    chunk: Chunk
    obs: list[np.ndarray] | None
    new_obs: list[np.ndarray] | None
    actions: list[np.ndarray] | None
    columns: dict[str, np.ndarray]


def check_columns_setting(columns: Any) -> None:
    """Checks a mapping of columns.

    Raises:
        ConfigError: if it is not a dict from names of batch columns to sources.
    """
    rule = (
        "a dict from columns of batches, such as 'obs', to a column's name, a list of names, a "
        "dict of them for each part of a nested space, or a function of all columns"
    )
    is_valid = isinstance(columns, Mapping) and all(
        isinstance(name, str) and _is_source(source) for name, source in columns.items()
    )
    if not is_valid:
        raise ConfigError(f"columns must be {rule}, got {columns!r:.200}.")


def _is_source(source: Any) -> bool:
    if isinstance(source, Mapping):
        return all(isinstance(key, str) and _is_source(part) for key, part in source.items())
    is_list = isinstance(source, list | tuple) and all(isinstance(name, str) for name in source)
    return isinstance(source, str) or callable(source) or (is_list and len(source) > 0)


class ColumnMap:
    """The columns of a table that a batch is made of.

    Args:
        available: the columns of the table.
        columns: where columns of batches come from, by name; others have the table's names.

    Raises:
        ConfigError: if `columns` is not such a mapping.
        MissingColumnError: if it names a column that the table lacks.
    """

    def __init__(
        self, available: Collection[str], columns: Mapping[str, ColumnSource] | None = None
    ) -> None:
        check_columns_setting(columns or {})
        self.available = tuple(available)
        self._columns = dict(columns or {})
        for name, source in self._columns.items():
            for column in _iter_names(source):
                self._require(name, column)

    @property
    def batch_columns(self) -> tuple[str, ...]:
        """The columns of batches whose sources are given."""
        return tuple(self._columns)

    @property
    def reads_all(self) -> bool:
        """Whether a function reads the columns, so that all are decoded."""
        return any(_has_function(source) for source in self._columns.values())

    def has(self, name: str) -> bool:
        """Returns whether a batch can have a column."""
        if name in self._columns or name in self.available:
            return True
        if name in _NESTED and any(x.startswith(name + SEPARATOR) for x in self.available):
            return True
        return _OLD_NAMES.get(name) in self.available

    def find_sources(self, names: Collection[str], needed: Collection[str]) -> list[str] | None:
        """Returns the table's columns that some columns of batches are made of; None for all.

        Args:
            names: of columns of batches; those that the table lacks are left out.
            needed: of columns that must exist.

        Raises:
            MissingColumnError: if one of `needed` does not exist.
        """
        result: list[str] = []
        for name in dict.fromkeys([*needed, *names]):
            if not self.has(name):
                if name in needed:
                    raise self._make_missing_error(name)
                continue
            if name in self._columns:
                result += _iter_names(self._columns[name])
            elif name in self.available:
                result.append(name)
            elif name in _NESTED:
                result += [x for x in self.available if x.startswith(name + SEPARATOR)]
            else:
                result.append(_OLD_NAMES[name])
        return None if self.reads_all else list(dict.fromkeys(result))

    def _require(self, name: str, column: str) -> None:
        if column not in self.available:
            raise MissingColumnError(
                f"columns[{name!r}] names {column!r:.100}, which the table does not have."
                f"{suggest_similar_names(column, self.available)} It has "
                f"{[*self.available]!s:.300}."
            )

    def _make_missing_error(self, name: str) -> MissingColumnError:
        other = [x for x in _COMMON_NAMES.get(name, ()) if x in self.available]
        advice = f"columns={{{name!r}: {other[0]!r}}}" if other else f"columns={{{name!r}: ...}}"
        return MissingColumnError(
            f"The table has no column {name!r}, which is needed; it has "
            f"{[*self.available]!s:.300}. Say where it comes from: {advice}."
            + (_TERMINATED_ADVICE if name == TERMINATEDS else "")
        )

    # -- reading ------------------------------------------------------------------------------

    def read(
        self,
        chunk: Chunk,
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        names: Collection[str],
    ) -> Steps:
        """Returns the columns of batches in a chunk, checked against the spaces.

        Args:
            chunk: rows of the table.
            spaces: the observation and the action space.
            names: of the columns to read; those that the table lacks are left out.

        Raises:
            ObservationError: if a row is not in its space; the message names file, row and column.
            BatchError: for other columns with wrong numbers.
        """
        obs_leaves, act_leaves = leaves(spaces[0]), action_leaves(spaces[1])
        nested = {OBS: obs_leaves, NEW_OBS: obs_leaves, ACTIONS: act_leaves}
        parts = {
            name: self._read_leaves(chunk, name, nested[name])
            for name in _NESTED
            if name in names and self.has(name)
        }
        for leaf, array in zip(act_leaves, parts.get(ACTIONS, ()), strict=False):
            check_choices(chunk, leaf, array, ACTIONS)
        if has_mask(spaces[0]) and OBS in parts and ACTIONS in parts:
            masks = [
                x for x, leaf in zip(parts[OBS], obs_leaves, strict=True) if leaf.path == _MASK
            ]
            check_masks(chunk, act_leaves, parts[ACTIONS], masks)
        columns = {
            name: self.read_column(chunk, name)
            for name in names
            if name not in _NESTED and self.has(name)
        }
        return Steps(chunk, parts.get(OBS), parts.get(NEW_OBS), parts.get(ACTIONS), columns)

    def read_column(self, chunk: Chunk, name: str) -> np.ndarray:
        """Returns a column that is not nested: flags, integers, or float32."""
        array = self._read_source(chunk, name, self._columns.get(name, name))
        if array is None:
            array = self._read_source(chunk, name, _OLD_NAMES.get(name, name))
        if array is None:
            raise self._make_missing_error(name)
        if array.ndim == 2 and array.shape[1] == 1 and not name.startswith("state_"):
            array = array[:, 0]
        if name == EPS_ID:
            return to_ids(chunk, name, array)
        if name in _FLAGS:
            return to_flags(chunk, name, array)
        if name in _INTEGERS:
            return to_integers(chunk, name, array)
        return to_floats(chunk, name, array)

    def read_parts(self, chunk: Chunk, name: str) -> dict[str, np.ndarray]:
        """Returns `obs`, `new_obs` or `actions` without a space: arrays by part; "" for the whole.

        Raises:
            MissingColumnError: if the table has no such column.
        """
        source = self._columns.get(name, name)
        if isinstance(source, Mapping):
            return {key: self._require_source(chunk, name, part) for key, part in source.items()}
        if isinstance(source, str) and source not in chunk.columns:
            prefix = source + SEPARATOR
            parts = {
                column.removeprefix(prefix): array
                for column, array in chunk.columns.items()
                if column.startswith(prefix)
            }
            if parts:
                return parts
        return {"": self._require_source(chunk, name, source)}

    def _require_source(self, chunk: Chunk, name: str, source: Any) -> np.ndarray:
        array = self._read_source(chunk, name, source)
        if array is None:
            raise self._make_missing_error(name)
        return array

    def find_starts(self, chunk: Chunk) -> np.ndarray:
        """Returns where trajectories start, bool `[rows]`: the first row, and those after ends.

        Raises:
            MissingColumnError: if the table does not say where episodes end.
        """
        starts = np.ones(chunk.rows, bool)
        if not any(self.has(name) for name in (EPS_ID, TERMINATEDS, TRUNCATEDS)):
            raise self._make_missing_error(EPS_ID)
        starts[1:] = False
        for name in (EPS_ID, AGENT_INDEX):
            if self.has(name):
                ids = self.read_column(chunk, name)
                starts[1:] |= ids[1:] != ids[:-1]
        for name in _FLAGS:
            if self.has(name):
                starts[1:] |= self.read_column(chunk, name)[:-1]
        return starts

    def _read_leaves(self, chunk: Chunk, name: str, space_leaves: Sequence[Leaf]) -> Any:
        """Returns one array `[rows, *shape]` for each leaf of a space."""
        source = self._columns.get(name, name)
        is_nested = len(space_leaves) > 1 or bool(space_leaves[0].path)
        if not is_nested:
            return [self._read_leaf(chunk, name, source, space_leaves[0])]
        if isinstance(source, Mapping):
            return [
                self._read_leaf(chunk, name, _get_part(source, name, leaf), leaf)
                for leaf in space_leaves
            ]
        if isinstance(source, str):
            part_names = [SEPARATOR.join((source, *leaf.path)) for leaf in space_leaves]
            if all(part_name in chunk.columns for part_name in part_names):
                pairs = zip(part_names, space_leaves, strict=True)
                return [self._read_leaf(chunk, name, part, leaf) for part, leaf in pairs]
        return self._decode_rows(chunk, name, source, space_leaves)

    def _decode_rows(
        self, chunk: Chunk, name: str, source: Any, space_leaves: Sequence[Leaf]
    ) -> list[np.ndarray]:
        """Returns the leaves of rows that were flattened as RLlib's preprocessors do."""
        array = self._read_source(chunk, name, source)
        parts = [SEPARATOR.join((name, *leaf.path)) for leaf in space_leaves]
        shape = "" if array is None else f" with rows of the shape {array.shape[1:]}"
        error = ObservationError(
            f"{name} must have a column for each part of its space, {parts!s:.200}, or flat rows "
            f"of all, but {chunk.table} has {sorted(chunk.columns)!s:.200}{shape}. Say where they "
            f"come from: columns={{{name!r}: {{part: column, ...}}}}."
        )
        if array is None:
            raise error
        require_numbers(chunk, name, array)
        if name == ACTIONS:
            return self._split_actions(chunk, array, space_leaves, error)
        return _decode_flat(chunk, name, space_leaves, array, error)

    def _split_actions(
        self,
        chunk: Chunk,
        array: np.ndarray,
        space_leaves: Sequence[Leaf],
        error: ObservationError,
    ) -> list[np.ndarray]:
        """Returns the leaves of rows in which RLlib concatenated all parts, by sorted keys."""
        sizes = {leaf.path: math.prod(leaf.shape) for leaf in space_leaves}
        if array.ndim != 2 or array.shape[1] != sum(sizes.values()):
            raise error
        paths = sorted(sizes, key=_get_sort_key)
        bounds = np.cumsum([sizes[path] for path in paths])[:-1]
        parts = dict(zip(paths, np.split(array, bounds, axis=1), strict=True))
        return [
            to_leaf_dtype(
                chunk,
                SEPARATOR.join((ACTIONS, *leaf.path)),
                leaf,
                parts[leaf.path].reshape(chunk.rows, *leaf.shape),
            )
            for leaf in space_leaves
        ]

    def _read_leaf(self, chunk: Chunk, name: str, source: Any, leaf: Leaf) -> np.ndarray:
        array = self._read_source(chunk, name, source)
        label = SEPARATOR.join((name, *leaf.path))
        if array is None:
            raise self._make_missing_error(label)
        size = math.prod(leaf.shape)
        if not _has_shape(array, leaf.shape):
            flat = math.prod(array.shape[1:])
            if name != ACTIONS and is_choice(leaf.space) and flat > size:
                error = self._make_shape_error(chunk, label, leaf, array)
                unnamed = leaf._replace(path=())
                rows = array.reshape(chunk.rows, flat)
                return _decode_flat(chunk, label, [unnamed], rows, error)[0]
            raise self._make_shape_error(chunk, label, leaf, array)
        return to_leaf_dtype(chunk, label, leaf, array.reshape(chunk.rows, *leaf.shape))

    def _make_shape_error(
        self, chunk: Chunk, label: str, leaf: Leaf, array: np.ndarray
    ) -> ObservationError:
        return ObservationError(
            f"{label} must have the shape {leaf.shape} in each row, as its space does, but "
            f"{chunk.describe_row(0)} has {array.shape[1:]}. Change the space, or convert the "
            "column by a function in columns={...}."
        )

    def _read_source(self, chunk: Chunk, name: str, source: Any) -> np.ndarray | None:
        if callable(source):
            array = np.asarray(source(chunk.columns))
            if not array.ndim or len(array) != chunk.rows:
                raise BatchError(
                    f"columns[{name!r}] must return an array [{chunk.rows}, ...], one entry for "
                    f"each row, got the shape {array.shape}. Mend the function."
                )
            return array
        if isinstance(source, str):
            return chunk.columns.get(source)
        return np.stack([_read_number(chunk, name, column) for column in source], axis=1)


def _read_number(chunk: Chunk, name: str, column: str) -> np.ndarray:
    """Returns a column with one number for each row, of a list of columns."""
    array = chunk.columns.get(column)
    if array is None:
        raise MissingColumnError(
            f"columns[{name!r}] names {column!r:.100}, which {chunk.describe_row(0)} lacks; "
            f"it has {[*chunk.columns]!s:.300}. Leave the column out."
        )
    if array.size != chunk.rows:
        raise BatchError(
            f"Column {column!r:.100} must have one number for each row, as it is one of several in "
            f"columns[{name!r}], but {chunk.describe_row(0)} has the shape {array.shape[1:]}."
        )
    require_numbers(chunk, column, array)
    return array.reshape(chunk.rows)


def _has_shape(array: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Returns whether rows have a shape, apart from axes of length 1, or are flat."""
    row_shape = array.shape[1:]
    if len(row_shape) <= 1:
        return math.prod(row_shape) == math.prod(shape)
    return [x for x in row_shape if x != 1] == [x for x in shape if x != 1]


def _get_sort_key(path: Sequence[str]) -> list[tuple[int, str]]:
    return [(int(key), "") if key.isdigit() else (-1, key) for key in path]


def _decode_flat(
    chunk: Chunk,
    name: str,
    space_leaves: Sequence[Leaf],
    rows: np.ndarray,
    error: ObservationError,
) -> list[np.ndarray]:
    """Returns the leaves of rows that were flattened as RLlib's preprocessors do."""
    is_finite_row = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
    if not is_finite_row.all():
        row = int(np.argmin(is_finite_row))
        raise ObservationError(
            f"{name} must be finite numbers, but is {rows[row].tolist()!s:.200} in "
            f"{chunk.describe_row(row)}. Leave the row out."
        )
    try:
        return decode_flat_observations(space_leaves, rows, error)
    except ObservationError as problem:
        if problem is error or chunk.rows == 1:
            raise
        row = _find_first_bad_row(space_leaves, rows, error)
        raise ObservationError(
            f"{name} is not a flat row of its space in {chunk.describe_row(row)}: {problem}"
        ) from problem


def _find_first_bad_row(
    space_leaves: Sequence[Leaf], rows: np.ndarray, error: ObservationError
) -> int:
    """Returns the first row that cannot be decoded, by bisection."""
    low, high = 0, len(rows) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            decode_flat_observations(space_leaves, rows[low : middle + 1], error)
            low = middle + 1
        except ObservationError:
            high = middle
    return low


def _iter_names(source: Any) -> list[str]:
    if isinstance(source, str):
        return [source]
    if callable(source):
        return []
    parts = source.values() if isinstance(source, Mapping) else source
    return [name for part in parts for name in _iter_names(part)]


def _has_function(source: Any) -> bool:
    if isinstance(source, Mapping):
        return any(map(_has_function, source.values()))
    return callable(source)


def _get_part(source: Any, name: str, leaf: Leaf) -> Any:
    joined = SEPARATOR.join(leaf.path)
    if isinstance(source, Mapping) and joined in source:
        return source[joined]
    for key in leaf.path:
        if not isinstance(source, Mapping) or key not in source:
            raise ConfigError(
                f"columns[{name!r}] must have the part {joined!r} of the space, got "
                f"{source!r:.200}. Add the column that it comes from."
            )
        source = source[key]
    return source
