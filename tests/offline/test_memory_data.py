"""Arrays, pandas data frames, `tf.data` datasets and streams as data sources."""

import numpy as np
import pytest

from helpers.recorded_files import read_chunks, read_columns
from tfpolicies.errors import BatchError
from tfpolicies.offline.column_map import ColumnMap
from tfpolicies.offline.data_source import ReadRequest
from tfpolicies.offline.memory_data import (
    ArrayData,
    StreamData,
    make_frame_data,
    make_ray_data,
    make_tf_data,
)

pytestmark = pytest.mark.core


def make_stream(*sizes):
    """Returns a stream of batches of the numbers from 0 on, and a list of its starts."""
    starts = []

    def make_batches():
        starts.append(len(starts))
        first = 0
        for size in sizes:
            yield {"x": np.arange(first, first + size), "obs": {"y": np.ones((size, 2))}}
            first += size

    return StreamData(make_batches, "the stream"), starts


def test_arrays_are_read_from_any_row_without_copies():
    x = np.arange(10)
    source = ArrayData({"x": x, "y": x * 2})
    (chunk,), end = source.read(ReadRequest(0, 3, 10, 4, ("x",)))
    assert end == 7
    assert {*chunk.columns} == {"x"}
    assert chunk.columns["x"].tolist() == [3, 4, 5, 6]
    assert np.shares_memory(chunk.columns["x"], x)
    assert chunk.describe_row(2) == "row 5 of the data"
    (chunk,), end = source.read(ReadRequest(0, 8, 9, 4, None))
    assert (chunk.columns["y"].tolist(), end) == ([16], 9)


def test_nested_arrays_and_lists_have_names_with_points():
    source = ArrayData({"obs": {"a": [[1, 2], [3, 4]], "b": ([5, 6], [7.0, 8.0])}, "t": [0, 1]})
    result = read_columns(source)
    assert {name: x.tolist() for name, x in result.items()} == {
        "obs.a": [[1, 2], [3, 4]],
        "obs.b.0": [5, 6],
        "obs.b.1": [7, 8],
        "t": [0, 1],
    }


def test_arrays_of_arrays_are_stacked_and_times_are_integers():
    rows = np.empty(2, object)
    rows[:] = [np.array([1, 2]), np.array([3, 4])]
    times = np.array(["1970-01-01", "1970-01-02"], "M8[D]")
    result = read_columns(ArrayData({"x": rows, "day": times}))
    assert result["x"].tolist() == [[1, 2], [3, 4]]
    assert result["day"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "must have columns with the same number of rows, at least 1, got {}"),
        ({"x": [1, 2], "y": [1]}, "got {'x': 2, 'y': 1}"),
        ({"x": []}, "got {'x': 0}"),
        ({"x": 3}, "Column 'x' must be an array [rows, ...], got 3"),
        ({"x": [[1], [1, 2]]}, "Column 'x' must have rows of one shape"),
    ],
)
def test_arrays_without_rows_in_common_are_refused(data, problem):
    with pytest.raises(BatchError) as caught:
        ArrayData(data)
    assert problem in str(caught.value)


def test_a_data_frame_is_read_by_its_columns():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "x": [1.5, 2.5],
            "n": pandas.array([3, 4], "Int64"),
            "day": ["monday", "tuesday"],
            "at": np.array([0, 10**9], "M8[ns]"),
            7: [1, 2],
        }
    )
    source = make_frame_data(frame)
    assert source.column_names == ("x", "n", "day", "at", "7")
    result = read_columns(source)
    assert result["x"].tolist() == [1.5, 2.5]
    assert result["n"].tolist() == [3, 4]
    assert result["day"].tolist() == ["monday", "tuesday"]
    assert result["at"].tolist() == [0, 10**9]


def test_a_missing_value_in_a_data_frame_is_named_where_it_is_used():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "r": pandas.array([1, None, 3], "Int64"),
            "day": ["monday", "tuesday", None],
            "n": [1.0, np.nan, 2.0],
        }
    )
    (chunk,) = read_chunks(make_frame_data(frame))
    column_map = ColumnMap(chunk.columns, {"rewards": "r", "eps_id": "day", "t": "n"})
    with pytest.raises(BatchError, match=r"rewards must .* in row 1 of the data frame"):
        column_map.read_column(chunk, "rewards")
    with pytest.raises(BatchError, match=r"eps_id must .* in row 2 of the data frame"):
        column_map.read_column(chunk, "eps_id")
    with pytest.raises(BatchError, match="t must be integers, but t is nan in row 1 of"):
        column_map.read_column(chunk, "t")


def test_a_dataset_of_rows_or_of_batches_is_read_in_order():
    import tensorflow as tf

    columns = {"obs": np.arange(10.0).reshape(5, 2), "rewards": np.arange(5.0)}
    rows = tf.data.Dataset.from_tensor_slices(columns)
    for dataset in (rows, rows.batch(2), rows.batch(2).prefetch(1)):
        result = read_columns(make_tf_data(dataset))
        np.testing.assert_array_equal(result["obs"], columns["obs"])
        np.testing.assert_array_equal(result["rewards"], columns["rewards"])


def test_a_dataset_without_columns_is_refused():
    import tensorflow as tf

    with pytest.raises(BatchError, match="must be dicts of columns"):
        make_tf_data(tf.data.Dataset.range(3))


def test_a_shard_of_a_dataset_is_read_in_batches_of_arrays():
    class Shard:
        """A dataset with the method of Ray's that is used."""

        def iter_batches(self, *, batch_size, batch_format):
            assert batch_format == "numpy"
            yield {"x": np.arange(batch_size)}
            yield {"x": np.arange(3)}

    assert len(read_columns(make_ray_data(Shard()))["x"]) == 4096 + 3


def test_a_stream_is_read_in_any_pieces_in_order():
    for max_rows in (1, 2, 3, 100):
        source, _ = make_stream(3, 0, 4, 1)
        result = read_columns(source, max_rows=max_rows)
        assert result["x"].tolist() == [*range(8)]
        assert result["obs.y"].shape == (8, 2)
    assert source.column_names == ("x", "obs.y")
    assert not source.can_seek


def test_a_stream_restarts_for_the_next_epoch_and_skips_to_a_position():
    source, starts = make_stream(3, 4)
    for _ in range(2):
        assert read_columns(source, max_rows=2)["x"].tolist() == [*range(7)]
    assert len(starts) == 3  # the first one is for the columns
    (chunk,), end = source.read(ReadRequest(0, 5, 1 << 62, 9, None))
    assert chunk.columns["x"].tolist() == [5, 6]
    assert chunk.describe_row(1) == "row 6 of the stream"
    assert end == 7


def test_a_stream_without_batches_or_with_uneven_ones_is_refused():
    with pytest.raises(BatchError, match="the stream must have rows"):
        make_stream()
    uneven = StreamData(lambda: [{"x": [1], "y": [1]}, {"x": [1], "y": [1, 2]}], "the stream")
    with pytest.raises(BatchError, match=r"columns have one length, got \{'x': 1, 'y': 2\}"):
        read_chunks(uneven, max_rows=1)
