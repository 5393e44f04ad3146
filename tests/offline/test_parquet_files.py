"""Parquet files: types of columns, row groups, several files, positions, and refusals."""

import datetime

import numpy as np
import pytest

from helpers.recorded_files import read_chunks, read_columns, write_parquet
from tfpolicies.errors import BatchError
from tfpolicies.offline.data_source import ReadRequest
from tfpolicies.offline.parquet_files import METADATA_KEY, ParquetFiles

pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.core


def open_file(path, **options):
    return ParquetFiles([path], **options)


def read_column(tmp_path, array, **options):
    return read_columns(open_file(write_parquet(tmp_path / "a.parquet", {"x": array}, **options)))[
        "x"
    ]


@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int16", "int32", "uint32", "int64", "float16", "float32", "float64", "bool"],
)
def test_numbers_keep_their_dtype(tmp_path, dtype):
    expected = np.array([0, 1, 3, 2], dtype)
    result = read_column(tmp_path, expected)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    "array",
    [
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 2),
        pa.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], pa.list_(pa.float32())),
        pa.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], pa.large_list(pa.float32())),
    ],
)
def test_lists_of_numbers_are_rows_of_a_matrix(tmp_path, array):
    result = read_column(tmp_path, array)
    assert result.dtype == np.float32
    assert result.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_nested_lists_are_images(tmp_path):
    expected = np.arange(2 * 3 * 4 * 1, dtype=np.uint8).reshape(2, 3, 4, 1)
    array = pa.array(expected.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8(), 1), 4)))
    result = read_column(tmp_path, array)
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result, expected)


def test_tensors_of_a_fixed_shape_are_their_numbers(tmp_path):
    storage = pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.int32(), 4))
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 2])
    result = read_column(tmp_path, pa.ExtensionArray.from_storage(kind, storage))
    assert result.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_texts_are_objects_also_if_they_are_dictionary_encoded(tmp_path):
    for array in (pa.array(["b", "a", "b"]), pa.array(["b", "a", "b"]).dictionary_encode()):
        result = read_column(tmp_path, array)
        assert result.dtype == object
        assert result.tolist() == ["b", "a", "b"]


def test_dates_and_times_are_integers_in_the_order_of_time(tmp_path):
    days = [datetime.date(1970, 1, 2), datetime.date(2020, 1, 1), datetime.date(1969, 12, 31)]
    assert read_column(tmp_path, pa.array(days)).tolist() == [
        86_400_000,
        1_577_836_800_000,
        -86_400_000,
    ]
    times = pa.array([datetime.datetime(1970, 1, 1, 0, 0, 2)], pa.timestamp("us"))
    assert read_column(tmp_path, times).tolist() == [2_000_000]


@pytest.mark.parametrize("compression", ["NONE", "SNAPPY", "GZIP", "ZSTD", "LZ4", "BROTLI"])
def test_every_compression_is_read(tmp_path, compression):
    expected = np.arange(1000.0)
    np.testing.assert_array_equal(
        read_column(tmp_path, expected, compression=compression), expected
    )


def test_row_groups_and_files_are_units_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("tfpolicies.offline.parquet_files._MIN_UNIT_ROWS", 1)
    first = write_parquet(tmp_path / "a.parquet", {"x": np.arange(7)}, group_rows=3)
    second = write_parquet(tmp_path / "b.parquet", {"x": np.arange(7, 9)})
    source = ParquetFiles([first, second])
    assert [tuple(unit) for unit in source.units] == [(0, 0, 3), (0, 3, 6), (0, 6, 7), (1, 0, 2)]
    assert source.ends == [7, 2]
    for max_rows in (1, 2, 100):
        assert read_columns(source, max_rows=max_rows)["x"].tolist() == [*range(9)]


def test_small_row_groups_are_read_together(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"x": np.arange(10_000)}, group_rows=1000)
    source = open_file(path)
    assert [tuple(unit) for unit in source.units] == [(0, 0, 5000), (0, 5000, 10_000)]
    (chunk,), end = source.read(ReadRequest(0, 1500, 10_000, 3000, None))
    assert chunk.columns["x"].tolist() == [*range(1500, end)]
    assert read_columns(source, max_rows=700)["x"].tolist() == [*range(10_000)]


def test_equal_texts_are_one_object(tmp_path):
    result = read_column(tmp_path, np.array(["monday", "tuesday"] * 100))
    assert result.dtype == object
    assert len({id(text) for text in result}) == 2
    with pytest.raises(BatchError, match="'x' must have a value in each row, but row 2 of "):
        read_column(tmp_path, pa.array(["a", "b", None]))


def test_reading_begins_at_any_row_and_ends_at_the_stop(tmp_path):
    source = open_file(write_parquet(tmp_path / "a.parquet", {"x": np.arange(10)}, group_rows=4))
    for position in (9, 5, 0, 3, 5):
        for stop in (position + 1, 10):
            (chunk,), end = source.read(ReadRequest(0, position, stop, 3, None))
            assert chunk.first_row == position
            assert chunk.columns["x"].tolist() == [*range(position, end)]
            assert position < end <= min(stop, position + 3)


def test_only_the_columns_that_are_asked_for_are_decoded(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", {"x": [1, 2], "y": [3, 4], "bad": [[1], [1, 2]], "none": [1, None]}
    )
    source = open_file(path)
    assert source.column_names == ("x", "y", "bad", "none")
    assert {*read_columns(source, names=("y",))} == {"y"}
    with pytest.raises(BatchError, match="'bad' must have lists of equal lengths"):
        read_columns(source)


def test_more_files_than_are_open_at_once_are_read(tmp_path):
    paths = [write_parquet(tmp_path / f"{i:02}.parquet", {"x": [i, i]}) for i in range(40)]
    source = ParquetFiles(paths)
    assert read_columns(source, max_rows=1)["x"].tolist() == sorted([*range(40)] * 2)
    source.close()
    source.close()
    assert read_columns(source, max_rows=1)["x"].tolist() == sorted([*range(40)] * 2)


def test_rows_before_the_first_missing_value_and_their_number(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"x": [1.0, 2.0, 3.0, None, 5.0]}, group_rows=2)
    source = open_file(path)
    source.read(ReadRequest(0, 0, 2, 9, None))
    with pytest.raises(BatchError) as caught:
        source.read(ReadRequest(0, 2, 5, 9, None))
    assert str(caught.value) == (
        f"Column 'x' must have a value in each row, but row 3 of {path} has none. Fill it in, or "
        "leave the row out."
    )


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, None]], pa.list_(pa.float32(), 2)),
        pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, None]]),
        pa.array([[1.0, 2.0], [3.0, 4.0], None]),
    ],
)
def test_a_missing_number_in_a_list_is_named_by_its_row(tmp_path, array):
    with pytest.raises(BatchError, match="'x' must have a value in each row, but row 2 of "):
        read_column(tmp_path, array)


def test_lists_of_other_lengths_are_named_by_their_row(tmp_path):
    with pytest.raises(BatchError, match=r"row 0 of .* has one of 2 and row 2 of .* one of 3"):
        read_column(tmp_path, pa.array([[1, 2], [1, 2], [1, 2, 3]]))
    nested = pa.array([[[1], [2]], [[1], [2, 3]]])
    with pytest.raises(BatchError, match=r"row 0 of .* has one of 1 and row 1 of .* one of 2"):
        read_column(tmp_path, nested)


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (pa.array([{"a": 1}]), "struct"),
        (pa.array([b"png"]), "binary"),
        (pa.array([["text"]]), "string"),
        (pa.array([datetime.timedelta(1)]), "duration"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), "map"),
    ],
)
def test_other_types_are_refused_by_name(tmp_path, array, name):
    with pytest.raises(BatchError, match=f"Column 'x' must have numbers.*{name}"):
        read_column(tmp_path, array)


def test_files_with_other_columns_are_refused(tmp_path):
    first = write_parquet(tmp_path / "a.parquet", {"x": [1], "y": [1]})
    second = write_parquet(tmp_path / "b.parquet", {"x": [1], "z": [1]})
    with pytest.raises(BatchError, match=r"b.parquet must have the columns of .*a.parquet.*'y'"):
        ParquetFiles([first, second])


def test_a_file_that_its_writer_did_not_close_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"x": np.arange(100)})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BatchError, match=r"a\.parquet cannot be read as a Parquet file"):
        open_file(path)
    path.write_bytes(b"")
    with pytest.raises(BatchError, match=r"a\.parquet cannot be read as a Parquet file"):
        open_file(path)


def test_a_small_file_with_very_many_rows_must_be_trusted(tmp_path):
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(20_000_000, np.float32)), 20)
    path = write_parquet(tmp_path / "a.parquet", {"x": zeros}, compression="ZSTD")
    with pytest.raises(BatchError, match="but claims 80000000 in"):
        open_file(path, trusted=False)
    assert open_file(path, trusted=True).ends == [1_000_000]


def test_metadata_are_a_json_object(tmp_path):
    def write(content):
        table = pa.table({"x": [1]}).replace_schema_metadata({METADATA_KEY: content})
        from pyarrow import parquet

        parquet.write_table(table, tmp_path / "a.parquet")
        return open_file(tmp_path / "a.parquet")

    source = write(b'{"policy_id": "red"}')
    assert source.metadata == {"policy_id": "red"}
    assert [chunk.policy_id for chunk in read_chunks(source)] == ["red"]
    for content in (b"[]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(BatchError, match=r"The metadata of .*a\.parquet are damaged"):
            write(content)


def test_whole_batches_in_rows_are_refused_with_advice(tmp_path):
    batches = {"type": ["SampleBatch"] * 2, "obs": ["BCJNG", "BCJNG"], "t": [[0, 1], [0]]}
    path = write_parquet(tmp_path / "a.parquet", batches)
    with pytest.raises(BatchError, match=r"a step in each row, but has whole batches.*'json'"):
        open_file(path)
    steps = write_parquet(tmp_path / "b.parquet", {"type": ["car", "bus"], "x": [1, 2]})
    assert read_columns(open_file(steps))["type"].tolist() == ["car", "bus"]
