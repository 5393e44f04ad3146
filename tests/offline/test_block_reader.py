"""Blocks of rows: each row once per epoch, whole episodes, seeds, and continuing anywhere."""

import gc
import itertools
import json
import os

import numpy as np
import pytest

from helpers.recorded_files import write_json_lines, write_parquet
from tfpolicies.errors import BatchError, ConfigError
from tfpolicies.offline.block_reader import BlockReader, ReaderPosition, split_units
from tfpolicies.offline.column_map import ColumnMap
from tfpolicies.offline.data_source import Unit
from tfpolicies.offline.isolated_source import IsolatedFiles
from tfpolicies.offline.memory_data import ArrayData, StreamData
from tfpolicies.offline.open_data import open_data
from tfpolicies.offline.step_columns import EPISODE_COLUMNS

pytestmark = pytest.mark.core

LENGTHS = [1, 3, 40, 2, 100, 1, 1, 7, 16, 17, 15, 50, 5, 1, 30] * 3  # of episodes
ROWS = sum(LENGTHS)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("tfpolicies.offline.block_reader._MAX_CHUNK_ROWS", 16)
    monkeypatch.setattr("tfpolicies.offline.memory_data._UNIT_ROWS", 25)
    monkeypatch.setattr("tfpolicies.offline.parquet_files._MIN_UNIT_ROWS", 1)
    monkeypatch.setattr("tfpolicies.offline.json_lines._UNIT_BYTES", 2000)


def make_columns():
    """Returns steps of episodes; `x` counts the rows."""
    t = np.concatenate([np.arange(length) for length in LENGTHS])
    ends = np.append(t[1:] == 0, True)
    return {
        "x": np.arange(ROWS),
        "y": np.arange(2.0 * ROWS).reshape(ROWS, 2),
        "eps_id": np.repeat(np.arange(len(LENGTHS)) * 7, LENGTHS),
        "t": t,
        "terminateds": ends & (np.arange(ROWS) % 2 == 0),
    }


def make_array_source(tmp_path):
    return ArrayData(make_columns())


def make_parquet_source(tmp_path):
    pytest.importorskip("pyarrow")
    columns = make_columns()
    paths = [
        write_parquet(
            tmp_path / f"{i}.parquet",
            {name: column[part] for name, column in columns.items()},
            group_rows=23,
        )
        for i, part in enumerate((slice(155), slice(155, None)))  # between two episodes
    ]
    return open_data(paths, trusted=True)


def make_json_source(tmp_path):
    columns = make_columns()
    bounds = [*range(0, 155, 5), *range(155, ROWS, 5), ROWS]
    batches = [
        {name: column[a:b].tolist() for name, column in columns.items()}
        for a, b in itertools.pairwise(bounds)
    ]
    paths = [
        write_json_lines(tmp_path / "a.json", *batches[:31]),
        write_json_lines(tmp_path / "b.json", *batches[31:]),
    ]
    return open_data(paths, trusted=True)


SOURCES = [make_array_source, make_parquet_source, make_json_source]


def make_reader(source, *, shuffle_rows=0, episodes=False, shard=(0, 1), seed=1, names=None):
    column_map = ColumnMap(source.column_names)
    return BlockReader(
        source,
        names,
        seed=seed,
        shuffle_rows=shuffle_rows,
        shard=shard,
        find_starts=column_map.find_starts if episodes else None,
        episode_names=column_map.find_sources(EPISODE_COLUMNS, ()) if episodes else None,
    )


def read_epoch(reader):
    """Returns the chunks of one epoch."""
    epoch, chunks = reader.position.epoch, []
    while reader.position.epoch == epoch:
        block = reader.read_block()
        if block.key[0] == epoch:
            chunks += block.chunks
        else:
            assert not block.chunks or block.key[1] == 0
            reader.position = ReaderPosition(epoch + 1)
    return chunks


def read_numbers(reader):
    """Returns the numbers of rows of one epoch, in the order that they were read."""
    return [x for chunk in read_epoch(reader) for x in chunk.columns["x"].tolist()]


@pytest.mark.parametrize("make_source", SOURCES)
@pytest.mark.parametrize("shuffle_rows", [0, 40])
@pytest.mark.parametrize("episodes", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_each_row_is_read_once_per_epoch(tmp_path, make_source, shuffle_rows, episodes, shards):
    source = make_source(tmp_path)
    readers = [
        make_reader(source, shuffle_rows=shuffle_rows, episodes=episodes, shard=(k, shards))
        for k in range(shards)
    ]
    for _ in range(3):
        numbers = [x for reader in readers for x in read_numbers(reader)]
        assert sorted(numbers) == [*range(ROWS)]


@pytest.mark.parametrize("make_source", SOURCES[:2])
@pytest.mark.parametrize("episodes", [False, True])
def test_five_shards_have_each_row_once(tmp_path, make_source, episodes):
    source = make_source(tmp_path)
    for shuffle_rows in (0, 40):
        numbers = []
        for k in range(5):
            reader = make_reader(source, shuffle_rows=shuffle_rows, episodes=episodes, shard=(k, 5))
            numbers += read_numbers(reader)
        assert sorted(numbers) == [*range(ROWS)]


@pytest.mark.parametrize("make_source", SOURCES[:2])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_chunks_have_whole_episodes(tmp_path, make_source, shards):
    source = make_source(tmp_path)
    for shuffle_rows in (0, 40):
        for k in range(shards):
            reader = make_reader(
                source, shuffle_rows=shuffle_rows, episodes=True, shard=(k, shards)
            )
            for chunk in read_epoch(reader):
                ids, t = chunk.columns["eps_id"], chunk.columns["t"]
                assert t[0] == 0
                for episode in np.unique(ids):
                    assert (ids == episode).sum() == LENGTHS[episode // 7]


def test_a_json_unit_is_one_chunk_of_each_policy_if_episodes_are_asked_for(tmp_path):
    source = make_json_source(tmp_path)
    assert len(source.units) > 4
    chunks = read_epoch(make_reader(source, episodes=True))
    assert len(chunks) <= len(source.units)


@pytest.mark.parametrize("make_source", SOURCES)
@pytest.mark.parametrize("shuffle_rows", [0, 40])
@pytest.mark.parametrize("episodes", [False, True])
def test_a_new_reader_continues_after_any_block(tmp_path, make_source, shuffle_rows, episodes):
    def make():
        source = make_source(tmp_path)
        return make_reader(source, shuffle_rows=shuffle_rows, episodes=episodes, shard=(1, 2))

    reader = make()
    states, blocks = [], []
    while reader.position.epoch < 2:
        states.append(json.loads(json.dumps(reader.position.to_state())))
        block = reader.read_block()
        blocks.append((block.key, [chunk.columns["x"].tolist() for chunk in block.chunks]))
    assert len(blocks) > 3
    for i, state in enumerate(states):
        continued = make()
        continued.position = ReaderPosition.from_state(state)
        for key, numbers in blocks[i : i + 4]:
            block = continued.read_block()
            assert block.key == key
            assert [chunk.columns["x"].tolist() for chunk in block.chunks] == numbers
            expected = reader.draw_order(block, sum(map(len, numbers))).tolist()
            assert continued.draw_order(block, sum(map(len, numbers))).tolist() == expected


def test_a_seed_decides_the_order_and_epochs_differ(tmp_path):
    source = make_array_source(tmp_path)

    def read(seed):
        reader = make_reader(source, shuffle_rows=40, seed=seed)
        return [read_numbers(reader), read_numbers(reader)]

    assert read(3) == read(3)
    assert read(3) != read(4)
    first, second = read(3)
    assert first != second
    assert sorted(first) == sorted(second)


def test_rows_of_a_block_are_permuted_and_differently_in_each(tmp_path):
    reader = make_reader(make_array_source(tmp_path), shuffle_rows=40)
    orders = [reader.draw_order(reader.read_block(), 50).tolist() for _ in range(3)]
    assert all(sorted(order) == [*range(50)] for order in orders)
    assert orders[0] != orders[1] != orders[2] != [*range(50)]
    ordered = make_reader(make_array_source(tmp_path))
    assert ordered.draw_order(ordered.read_block(), 5).tolist() == [0, 1, 2, 3, 4]


def test_a_block_has_rows_of_several_units(tmp_path):
    reader = make_reader(make_array_source(tmp_path), shuffle_rows=60)
    units = {chunk.first_row // 25 for chunk in reader.read_block().chunks}
    assert len(units) == 4


def test_without_shuffling_tables_are_in_random_order_and_their_rows_in_order(tmp_path):
    pytest.importorskip("pyarrow")
    paths = [
        write_parquet(tmp_path / f"{i}.parquet", {"x": np.arange(40) + 40 * i}, group_rows=11)
        for i in range(6)
    ]
    reader = make_reader(open_data(paths, trusted=True))
    epochs = [np.reshape(read_numbers(reader), (6, 40)) for _ in range(2)]
    for rows in epochs:
        assert (np.diff(rows, axis=1) == 1).all()
    assert epochs[0][:, 0].tolist() != epochs[1][:, 0].tolist()


def test_only_the_columns_that_are_asked_for_are_read(tmp_path):
    reader = make_reader(make_array_source(tmp_path), names=("y", "x"))
    assert {*reader.read_block().chunks[0].columns} == {"x", "y"}


def test_the_child_process_gives_the_same_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("tfpolicies.offline.parquet_files._MIN_UNIT_ROWS", 1 << 12)
    trusted = make_parquet_source(tmp_path)
    isolated = IsolatedFiles("parquet", trusted.tables)
    for episodes in (False, True):
        readers = [
            make_reader(source, shuffle_rows=40, episodes=episodes)
            for source in (trusted, isolated)
        ]
        for _ in range(12):
            first, second = (reader.read_block() for reader in readers)
            assert first.key == second.key
            for a, b in zip(first.chunks, second.chunks, strict=True):
                assert a.columns.keys() == b.columns.keys()
                for name, column in a.columns.items():
                    assert column.dtype == b.columns[name].dtype
                    np.testing.assert_array_equal(column, b.columns[name])
                assert a.describe_row(a.rows - 1) == b.describe_row(b.rows - 1)
    isolated.close()


def test_more_readers_than_rows_or_lines_are_refused_in_words(tmp_path):
    few = ArrayData({"x": np.arange(3)})
    assert sorted(x for k in range(3) for x in read_numbers(make_reader(few, shard=(k, 3)))) == [
        0,
        1,
        2,
    ]
    with pytest.raises(BatchError, match=r"reader 3 has none\. Use fewer workers"):
        make_reader(few, shard=(3, 5)).read_block()
    path = write_json_lines(tmp_path / "a.json", {"x": [*range(200)]})
    readers = [make_reader(open_data(path, trusted=True), shard=(k, 3)) for k in range(3)]
    assert len(readers[0].read_block().chunks[0].columns["x"]) == 200
    for k in (1, 2):
        with pytest.raises(BatchError, match=f"for each of 3 readers.*reader {k} has none"):
            readers[k].read_block()


def test_a_share_without_the_start_of_an_episode_is_refused_in_words():
    source = ArrayData({"x": np.arange(100), "eps_id": np.zeros(100, int)})
    readers = [make_reader(source, episodes=True, shard=(k, 2)) for k in range(2)]
    assert read_numbers(readers[0]) == [*range(100)]
    with pytest.raises(BatchError, match="lines or episodes for each of 2 readers"):
        readers[1].read_block()


def test_a_stream_has_one_reader():
    source = StreamData(lambda: [{"x": np.arange(30)}, {"x": np.arange(30, 50)}], "the stream")
    reader = make_reader(source, shuffle_rows=40)
    for _ in range(2):
        assert sorted(read_numbers(reader)) == [*range(50)]
    with pytest.raises(ConfigError, match="the stream must have one reader"):
        make_reader(source, shard=(0, 2))


def test_an_episode_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tfpolicies.offline.block_reader._MAX_EPISODE_BYTES", 2000)
    reader = make_reader(make_array_source(tmp_path), episodes=True)
    with pytest.raises(BatchError, match=r"at most 48 rows .*no end after row \d+ of the data"):
        read_epoch(reader)


def test_a_damaged_block_leaves_the_position_where_it_was(tmp_path):
    pytest.importorskip("pyarrow")
    values = [*map(float, range(100))]
    values[60] = None
    path = write_parquet(tmp_path / "a.parquet", {"x": values}, group_rows=20)
    reader = make_reader(open_data(path, trusted=True), names=("x",), shuffle_rows=1000)
    for _ in range(2):
        before = reader.position.to_state()
        with pytest.raises(BatchError, match="row 60 of"):
            reader.read_block()
        assert reader.position.to_state() == before


def test_units_are_split_only_if_there_are_too_few():
    assert split_units([Unit(0, 0, 10)] * 9, 2) == [Unit(0, 0, 10)] * 9
    assert split_units([Unit(3, 5, 8)], 2) == [Unit(3, 5, 6), Unit(3, 6, 7), Unit(3, 7, 8)]


@pytest.mark.soak
@pytest.mark.parametrize("trusted", [True, False])
def test_a_pass_over_a_large_file_needs_no_more_memory_than_its_beginning(
    tmp_path, monkeypatch, trusted
):
    pa = pytest.importorskip("pyarrow")
    monkeypatch.undo()
    rows, width = 3_000_000, 20
    obs = pa.FixedSizeListArray.from_arrays(
        pa.array(np.random.default_rng(0).standard_normal(rows * width, np.float32)), width
    )
    path = write_parquet(
        tmp_path / "a.parquet", {"obs": obs, "t": np.arange(rows) % 1000}, group_rows=1 << 16
    )
    del obs
    gc.collect()
    source = open_data(path, trusted=trusted)
    column_map = ColumnMap(source.column_names, {"truncateds": lambda x: x["t"] == 999})
    for find_starts in (None, column_map.find_starts):
        reader = BlockReader(source, None, seed=0, shuffle_rows=50_000, find_starts=find_starts)
        sizes = []
        while reader.position.epoch < 2:
            reader.read_block()
            sizes.append(read_megabytes(os.getpid(), "VmRSS"))
        half = len(sizes) // 2
        assert max(sizes[half:]) < max(sizes[:half]) + 40
    if not trusted:
        assert read_megabytes(source._child._process.pid, "VmHWM") < 400
    source.close()


def read_megabytes(process, name):
    with open(f"/proc/{process}/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024
