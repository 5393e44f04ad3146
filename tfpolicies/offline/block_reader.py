"""Reads blocks of rows in random order, from a position that is a few numbers.

The units of a source are permuted for each epoch. A block takes chunks of several units in turn,
and its rows are shuffled by whoever uses it. All of this follows from the seed and the position,
so a reader with the same position reads the same rows, in another process and after a restart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import BatchError, ConfigError
from tfpolicies.offline.data_source import Chunk, DataSource, ReadRequest, Unit, join_chunks

_INTERLEAVED_UNITS = 4  # from which a block takes chunks in turn
_CHUNK_BYTES = 16 << 20
_BLOCK_BYTES = 256 << 20
_MAX_CHUNK_ROWS = 1 << 14
_MAX_EPISODE_BYTES = 1 << 30
_UNITS_PER_SHARD = 4
_SAMPLE_ROWS = 64  # whose bytes are measured

FindStarts = Callable[[Chunk], np.ndarray]
"""Returns where episodes start in a chunk: bool `[rows]`; the first row is True."""


@dataclasses.dataclass
class ReaderPosition:
    """The position of a reader: where its next block begins.

    Attributes:
        epoch: the number of complete passes.
        next_unit: how many units of the epoch's permutation were opened.
        cursors: `[unit, position]` of each open unit.
        turn: the cursor to continue with.
        block: the number of blocks of the epoch so far.
    """

    epoch: int = 0
    next_unit: int = 0
    cursors: list[list[int]] = dataclasses.field(default_factory=list)
    turn: int = 0
    block: int = 0

    def to_state(self) -> list[Any]:
        """Returns the position as JSON values."""
        return [
            self.epoch,
            self.next_unit,
            [[*pair] for pair in self.cursors],
            self.turn,
            self.block,
        ]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> ReaderPosition:
        """Inverts `to_state`."""
        epoch, next_unit, cursors, turn, block = state
        return cls(epoch, next_unit, [[*map(int, pair)] for pair in cursors], turn, block)


class Block(NamedTuple):
    """Rows that are shuffled together.

    Attributes:
        chunks: consecutive rows each.
        key: the epoch and the number of the block, from which the order of rows is drawn.
    """

    chunks: list[Chunk]
    key: tuple[int, int]


class BlockReader:
    """Reads a share of the units of a source, epoch after epoch.

    Args:
        source: the tables.
        names: the columns to decode; None for all.
        seed: of the order of units.
        shuffle_rows: the least number of rows of a block; 0: blocks are chunks, in the order of
            each table, and only the tables are in random order.
        shard: `(k, n)`: the k-th of n shares.
        find_starts: finds where episodes start, so that blocks have whole episodes; None if rows
            are independent of each other.
        episode_names: the columns that `find_starts` reads; None for all.

    Attributes:
        position: where the next block begins; may be replaced.
    """

    def __init__(
        self,
        source: DataSource,
        names: Collection[str] | None,
        *,
        seed: int,
        shuffle_rows: int = 0,
        shard: tuple[int, int] = (0, 1),
        find_starts: FindStarts | None = None,
        episode_names: Collection[str] | None = None,
    ) -> None:
        self._source = source
        self._episode_names = None if episode_names is None else tuple(sorted(episode_names))
        self._names = None if names is None else tuple(sorted(names))
        self._seed = seed
        self._shuffles = shuffle_rows > 0
        self._shard = shard
        self._units = self._take_units()
        self._find_starts = find_starts
        row_bytes = self._measure_row()
        self._chunk_rows = max(16, min(_CHUNK_BYTES // row_bytes, _MAX_CHUNK_ROWS))
        if find_starts is not None and not source.has_contiguous_episodes:
            self._chunk_rows = 1 << 30  # whole units, in which episodes alternate
        self._block_rows = max(1, min(shuffle_rows, _BLOCK_BYTES // row_bytes))
        self._max_episode_rows = _MAX_EPISODE_BYTES // row_bytes
        self._carried: dict[tuple[int, int], list[Chunk]] = {}  # rows that were read ahead
        self._order: tuple[int, list[int]] = (-1, [])
        self.position = ReaderPosition()

    def read_block(self) -> Block:
        """Returns the next block, and advances the position.

        Raises:
            BatchError: if a table is damaged, or an episode is too long to be read as a whole.
        """
        before = self.position.to_state()
        try:
            return self._read_block()
        except BaseException:
            self.position = ReaderPosition.from_state(before)
            raise

    def _read_block(self) -> Block:
        key = self.position.epoch, self.position.block
        first_epoch = key[0]
        chunks: list[Chunk] = []
        rows, width = 0, _INTERLEAVED_UNITS if self._shuffles else 1
        while rows < self._block_rows:
            position = self.position
            order = self._get_order(position.epoch)
            while len(position.cursors) < width and position.next_unit < len(order):
                unit = order[position.next_unit]
                position.cursors.append([unit, self._units[unit].start])
                position.next_unit += 1
            if not position.cursors:
                self.position = ReaderPosition(position.epoch + 1)
                if chunks:
                    break
                if self.position.epoch > first_epoch + 1:  # a whole epoch without rows
                    raise self._make_no_rows_error()
                key = self.position.epoch, 0
                continue
            position.turn %= len(position.cursors)
            cursor = position.cursors[position.turn]
            new_chunks, cursor[1] = self._read_chunks(self._units[cursor[0]], cursor[1])
            if cursor[1] >= self._units[cursor[0]].stop:
                del position.cursors[position.turn]
                self._prefetch_unit(order)
            else:
                position.turn += 1
            chunks += new_chunks
            rows += sum(chunk.rows for chunk in new_chunks)
        self.position.block += self.position.epoch == key[0]
        return Block(chunks, key)

    def draw_order(self, block: Block, count: int) -> np.ndarray:
        """Returns the order of the items of a block, int `[count]`: random if rows are shuffled."""
        if not self._shuffles:
            return np.arange(count)
        return np.random.default_rng([self._seed, *block.key, 1]).permutation(count)

    def _get_order(self, epoch: int) -> list[int]:
        """Returns the order in which an epoch opens units."""
        if self._order[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch, 0])
            if self._shuffles:
                order = rng.permutation(len(self._units)).tolist()
            else:
                order = shuffle_tables(self._units, len(self._source.tables), rng)
            self._order = epoch, order
        return self._order[1]

    def _take_units(self) -> list[Unit]:
        """Returns the units of this reader's share."""
        k, n = self._shard
        if n > 1 and not self._source.can_seek:
            raise ConfigError(
                f"{self._source.tables[0]} must have one reader, as it is a stream, but there are "
                f"{n}. Use num_rollout_workers=0 or 1, or give files, or dataset_shards."
            )
        units = split_units(self._source.units, n)[k::n]
        if not units:
            raise self._make_no_rows_error()
        return units

    def _make_no_rows_error(self) -> BatchError:
        k, n = self._shard
        tables = [*self._source.tables]
        if n == 1:
            return BatchError(f"There must be rows in {tables!s:.300}, but there are none.")
        return BatchError(
            f"{tables!s:.300} must have rows, lines or episodes for each of {n} readers, but there "
            f"are too few: reader {k} has none. Use fewer workers."
        )

    def _measure_row(self) -> int:
        table, start, stop = self._units[0]
        request = ReadRequest(table, start, stop, _SAMPLE_ROWS, self._names)
        chunks = self._source.read(request).chunks
        rows = sum(chunk.rows for chunk in chunks)
        size = sum(column.nbytes for chunk in chunks for column in chunk.columns.values())
        return max(1, size // max(1, rows))

    # -- chunks -------------------------------------------------------------------------------

    def _read_chunks(self, unit: Unit, position: int) -> tuple[list[Chunk], int]:
        """Returns the next rows of a unit, and the position after them."""
        if not self._reads_whole_episodes:
            return self._read_rows(unit, position)
        if position == unit.start and position > 0:
            position = self._skip_continued_episode(unit)
            if position >= unit.stop:
                return [], position
        return self._read_episodes(unit, position)

    def _read_rows(self, unit: Unit, position: int) -> tuple[list[Chunk], int]:
        chunks: list[Chunk] = []
        remaining = self._chunk_rows
        while remaining > 0 and position < unit.stop:
            request = self._make_request(unit, position, unit.stop)
            new_chunks, position = self._source.read(request._replace(max_rows=remaining))
            chunks += new_chunks
            remaining -= sum(chunk.rows for chunk in new_chunks)
        if position < unit.stop:
            self._source.prefetch(self._make_request(unit, position, unit.stop))
        return chunks, position

    def _make_request(self, unit: Unit, position: int, stop: int) -> ReadRequest:
        return ReadRequest(unit.table, position, stop, self._chunk_rows, self._names)

    def _prefetch_unit(self, order: Sequence[int]) -> None:
        """Announces the first read of the unit that is opened next."""
        if self.position.next_unit >= len(order):
            return
        unit = self._units[order[self.position.next_unit]]
        if not self._reads_whole_episodes:
            self._source.prefetch(self._make_request(unit, unit.start, unit.stop))
        elif unit.start == 0:
            self._source.prefetch(self._make_request(unit, 0, self._source.ends[unit.table]))

    @property
    def _reads_whole_episodes(self) -> bool:
        return self._find_starts is not None and self._source.has_contiguous_episodes

    def _read_episodes(self, unit: Unit, position: int) -> tuple[list[Chunk], int]:
        """Reads whole episodes, at least `chunk_rows` rows or all that start in the unit."""
        table, end = unit.table, self._source.ends[unit.table]
        target = min(self._chunk_rows, unit.stop - position)
        new_parts = self._carried.pop((table, position), [])
        parts: list[Chunk] = []
        rows = 0
        while True:
            for part in new_parts:
                first = self._find_next_start(parts, part, target - rows)
                if first < part.rows:
                    return self._split_at(unit, position, [*parts, part], rows + first)
                parts.append(part)
                rows += part.rows
            if position + rows >= end:
                return ([join_chunks(parts)] if parts else []), end
            if rows > self._max_episode_rows + target:
                raise BatchError(
                    f"An episode must have at most {self._max_episode_rows} rows to be read as a "
                    f"whole, but there is no end after {parts[-1].describe_row(0)}. Check the "
                    "columns 'eps_id', 'terminateds' and 'truncateds'."
                )
            request = self._make_request(unit, position + rows, end)
            new_parts, _ = self._source.read(request)
            if not new_parts:
                end = position + rows

    def _find_next_start(self, parts: Sequence[Chunk], part: Chunk, least: int) -> int:
        """Returns the first row of a part, from a row on, that starts an episode; else its length.

        Args:
            parts: the parts before it.
            part: the part.
            least: the first row that counts; may be negative.
        """
        if least >= part.rows:
            return part.rows
        before = [parts[-1].take(slice(-1, None))] if parts else []
        starts = self._find_starts(join_chunks([*before, part]))[len(before) :]  # type: ignore[misc]
        candidates = np.flatnonzero(starts[max(0, least) :])
        return max(0, least) + int(candidates[0]) if len(candidates) else part.rows

    def _split_at(
        self, unit: Unit, position: int, parts: Sequence[Chunk], count: int
    ) -> tuple[list[Chunk], int]:
        """Returns the first rows of parts and the position after them; keeps the others."""
        joined = join_chunks(parts)
        next_position = position + count
        if next_position < unit.stop:
            if count < joined.rows:
                self._carried[unit.table, next_position] = [joined.take(slice(count, None))]
            end = self._source.ends[unit.table]
            if position + joined.rows < end:
                self._source.prefetch(self._make_request(unit, position + joined.rows, end))
        return [joined.take(slice(count))], next_position

    def _skip_continued_episode(self, unit: Unit) -> int:
        """Returns the position of the first row of a unit that starts an episode.

        The rows before it belong to an episode that starts in an earlier unit.
        """
        table, start, _ = unit
        end = self._source.ends[table]
        last = self._source.read(
            ReadRequest(table, start - 1, start, self._chunk_rows, self._episode_names)
        ).chunks[0]
        position = start
        while position < end:
            request = self._make_request(unit, position, end)
            chunks, next_position = self._source.read(request)
            if not chunks:
                position = next_position
                continue
            (chunk,) = chunks
            episode_columns = {name: chunk.columns[name] for name in last.columns}
            joined = join_chunks([last, dataclasses.replace(chunk, columns=episode_columns)])
            starts = np.flatnonzero(self._find_starts(joined)[1:])  # type: ignore[misc]
            if len(starts):
                first = int(starts[0])
                self._carried[table, position + first] = [chunk.take(slice(first, None))]
                return position + first
            last, position = joined.take(slice(-1, None)), next_position
        return end


def shuffle_tables(units: Sequence[Unit], tables: int, rng: np.random.Generator) -> list[int]:
    """Returns indices of units in the order of each table, with the tables in random order."""
    rank = rng.permutation(tables)
    return sorted(range(len(units)), key=lambda i: rank[units[i].table])


def split_units(units: Sequence[Unit], shards: int) -> list[Unit]:
    """Splits units evenly if there are too few to share them among `shards` readers.

    >>> split_units([Unit(0, 0, 10)], 1)
    [Unit(table=0, start=0, stop=10)]
    >>> len(split_units([Unit(0, 0, 100)], 2))
    8
    """
    parts = -(-_UNITS_PER_SHARD * shards // max(1, len(units))) if shards > 1 else 1
    result = []
    for table, start, stop in units:
        count = min(parts, stop - start)
        bounds = [start + (stop - start) * i // count for i in range(count + 1)]
        result += [Unit(table, a, b) for a, b in itertools.pairwise(bounds)]
    return result
