"""The spaces of recorded experience: those that its files state, or inferred from its numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.errors import BatchError, CheckpointError, SpaceError
from tfpolicies.models.spaces import describe_space
from tfpolicies.offline.column_map import ColumnMap, ColumnSource
from tfpolicies.offline.data_source import Chunk, DataSource, ReadRequest
from tfpolicies.offline.step_columns import ACTIONS, OBS, name_part
from tfpolicies.storage.spaces_json import decode_space

logger = logging.getLogger("tfpolicies")

_ROWS, _CHUNK_BYTES = 1 << 14, 4 << 20  # of a chunk, at most
_FIRST_ROWS = 64  # of the first one, whose size is measured
_MAX_CHOICES = 100_000

SpacePair = tuple[spaces.Space[Any], spaces.Space[Any]]
Recovery = Callable[[ReadRequest, BatchError], Chunk | None]


class _Range:
    """The smallest and the largest value of each component of a column."""

    def __init__(self) -> None:
        self.low: np.ndarray | None = None
        self.high: np.ndarray | None = None
        self.dtype = np.dtype(np.float32)

    def add(self, name: str, chunk: Chunk, array: np.ndarray) -> None:
        if array.dtype.kind not in "biuf":
            raise SpaceError(
                f"{name} must have numbers, but {chunk.table} has "
                f"{next(iter(array.flat), None)!r}. Replace texts by numbers, for example by a "
                "function in columns={...}."
            )
        finite = array if array.dtype.kind != "f" else np.where(np.isfinite(array), array, 0)
        low, high = finite.min(axis=0), finite.max(axis=0)
        if self.low is None or self.high is None:
            self.low, self.high, self.dtype = low, high, array.dtype
            return
        if low.shape != self.low.shape:
            raise SpaceError(
                f"{name} must have one shape, but {chunk.describe_row(0)} has {low.shape}, and "
                f"rows before it {self.low.shape}."
            )
        self.dtype = np.promote_types(self.dtype, array.dtype)
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)


def infer_spaces(
    source: DataSource,
    columns: Mapping[str, ColumnSource] | None = None,
    *,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    logs: bool = True,
) -> SpacePair:
    """Returns the observation and the action space of recorded experience.

    Files that this package wrote state them. Otherwise all rows are read: observations are Boxes
    without bounds, or Boxes of uint8 for images; integer actions are choices from 0 to the largest
    one, and other actions Boxes between the smallest and the largest values.

    Args:
        source: the data.
        columns: where columns of batches come from.
        observation_space: returned as it is, if it is not None.
        action_space: returned as it is, if it is not None.
        logs: whether inferred spaces are logged.

    Raises:
        SpaceError: if the numbers do not tell the space.
        MissingColumnError: if there are no observations or actions.
    """
    stored = _decode_stored(source.metadata)
    if stored is not None and not columns:
        return observation_space or stored[0], action_space or stored[1]
    column_map = ColumnMap(source.column_names, columns)
    missing = [
        name for name, space in ((OBS, observation_space), (ACTIONS, action_space)) if space is None
    ]
    names = column_map.find_sources((), missing)
    ranges: dict[str, dict[str, _Range]] = {name: {} for name in missing}
    rows = 0
    for chunk in iter_chunks(source, names):
        rows += chunk.rows
        for name, by_part in ranges.items():
            for part, array in column_map.read_parts(chunk, name).items():
                label = name_part(name, part)
                by_part.setdefault(part, _Range()).add(label, chunk, array)
    if not rows:
        raise SpaceError(
            f"The data must have rows, as their spaces are inferred, but {[*source.tables]!s:.300} "
            "have none. Set environment(observation_space=..., action_space=...), or record more."
        )
    if observation_space is None:
        observation_space = _nest({part: _make_box(part, x) for part, x in ranges[OBS].items()})
    if action_space is None:
        action_space = _nest(
            {part: _make_action_space(part, x) for part, x in ranges[ACTIONS].items()}
        )
    if logs:
        logger.warning(
            "Spaces were inferred from %d rows: observations %s, actions %s. If they are not "
            "right, set environment(observation_space=..., action_space=...).",
            rows,
            describe_space(observation_space),
            action_space if isinstance(action_space, spaces.Box) else describe_space(action_space),
        )
    return observation_space, action_space


def iter_chunks(
    source: DataSource, names: Sequence[str] | None, recover: Recovery | None = None
) -> Iterator[Chunk]:
    """Yields all rows of a source in order, as chunks of bounded size.

    Args:
        source: the tables.
        names: the columns to decode; None for all.
        recover: called with a request that failed and its error; returns the readable rows, or
            None to leave the rest of the unit out. Without it, errors are raised.

    Raises:
        BatchError: if a table is damaged, and there is no `recover`.
    """
    columns = None if names is None else tuple(sorted(names))
    rows = _FIRST_ROWS
    for table, start, stop in source.units:
        position = start
        while position < stop:
            request = ReadRequest(table, position, stop, rows, columns)
            try:
                chunks, position = source.read(request)
            except BatchError as error:
                if recover is None:
                    raise
                chunk = recover(request, error)
                if chunk is None:
                    break
                chunks, position = [chunk], position + chunk.rows
            rows = _choose_chunk_rows(chunks)
            request = request._replace(max_rows=rows)
            if position < stop:
                source.prefetch(request._replace(position=position))
            yield from chunks


def _choose_chunk_rows(chunks: Sequence[Chunk]) -> int:
    """Returns how many rows to read at once, for rows as large as these."""
    size = sum(column.nbytes for chunk in chunks for column in chunk.columns.values())
    row_bytes = max(1, size // max(1, sum(chunk.rows for chunk in chunks)))
    return max(16, min(_ROWS, _CHUNK_BYTES // row_bytes))


def _decode_stored(metadata: Mapping[str, Any]) -> SpacePair | None:
    records = [metadata.get(name) for name in ("observation_space", "action_space")]
    if None in records:
        return None
    try:
        observation_space, action_space = map(decode_space, records)
    except CheckpointError as error:
        raise SpaceError(f"The spaces that the data state cannot be read: {error}") from error
    return observation_space, action_space


def _nest(parts: Mapping[str, spaces.Space[Any]]) -> spaces.Space[Any]:
    return parts[""] if [*parts] == [""] else spaces.Dict(dict(parts))


def _make_box(part: str, values: _Range) -> spaces.Space[Any]:
    shape = np.asarray(values.low).shape or (1,)
    _require_numbers(OBS, part, shape)
    if values.dtype == np.uint8 and len(shape) >= 2:
        return spaces.Box(0, 255, shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def _require_numbers(name: str, part: str, shape: tuple[int, ...]) -> None:
    if 0 in shape:
        raise SpaceError(
            f"{name_part(name, part)} must have at least one number in each "
            f"row, but has the shape {shape}. Leave it out."
        )


def _make_action_space(part: str, values: _Range) -> spaces.Space[Any]:
    low, high = np.asarray(values.low), np.asarray(values.high)
    _require_numbers(ACTIONS, part, low.shape)
    label = name_part(ACTIONS, part)
    if values.dtype.kind == "f":
        shape = low.shape or (1,)
        if (low == high).all():
            raise SpaceError(
                f"{label} must vary, as its bounds are inferred from its values, but is "
                f"{low.tolist()} in all rows. Set environment(action_space=...), or record more."
            )
        return spaces.Box(
            low.reshape(shape).astype(np.float32), high.reshape(shape).astype(np.float32)
        )
    low, high = low.astype(np.int64), high.astype(np.int64)
    text = f"Discrete({high.max() - low.min() + 1}, start={low.min()})"
    if low.min() != 0 or high.max() >= _MAX_CHOICES:
        raise SpaceError(
            f"{label} has the integers from {low.min()} to {high.max()}, but choices count from 0."
        ).add_advice(
            f"Set environment(action_space={text}), or subtract {low.min()} by a function in "
            "columns={...}.",
            {"action_space": text},
        )
    return spaces.MultiDiscrete(high + 1) if low.shape else spaces.Discrete(int(high) + 1)
