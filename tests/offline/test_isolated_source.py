"""The child process that parses untrusted files: equal results, limits, ends, and restarts."""

import os
import signal

import numpy as np
import pytest

from helpers.recorded_files import read_chunks, read_columns, write_json_lines, write_parquet
from tfpolicies.errors import BatchError, ConfigError, MissingPackageError
from tfpolicies.offline.data_source import ReadRequest
from tfpolicies.offline.isolated_source import IsolatedFiles
from tfpolicies.offline.open_data import open_data
from tfpolicies.offline.packed_columns import pack_column

pytestmark = pytest.mark.core


@pytest.fixture
def make_files(tmp_path):
    """Returns a function that opens a JSON file of batches with a child process."""
    sources = []

    def make(*batches, name="a.json"):
        source = IsolatedFiles("json", [str(write_json_lines(tmp_path / name, *batches))])
        sources.append(source)
        return source

    yield make
    for source in sources:
        source.close()


def get_child(source):
    return source._child._process.pid


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_arrays_texts_policies_and_rows_arrive_as_they_were_read(make_files):
    line = {"x": [[1.5], [2.5]], "eps_id": ["a", "b"], "b": [True, False]}
    source = make_files({"policy_batches": {"red": line, "blue": line}}, line)
    chunks = read_chunks(source)
    assert [chunk.policy_id for chunk in chunks] == ["red", "blue", None]
    for chunk in chunks:
        assert chunk.columns["x"].tolist() == [[1.5], [2.5]]
        assert chunk.columns["eps_id"].tolist() == ["a", "b"]
        assert chunk.columns["b"].dtype == bool
    assert chunks[2].describe_row(1) == f"row 1 in line 2 of {source.tables[0]}"


def test_arrays_stay_when_others_are_read(make_files):
    source = make_files(*({"x": [i] * 1000} for i in range(20)))
    chunks = []
    position = 0
    while position < source.ends[0]:
        new_chunks, position = source.read(ReadRequest(0, position, source.ends[0], 1, None))
        chunks += new_chunks
    values = [chunk.columns["x"][0] for chunk in chunks]
    assert values == [*range(20)]
    for value, chunk in zip(values, chunks, strict=True):
        assert (chunk.columns["x"] == value).all()


def test_reads_that_were_announced_may_be_read_in_any_order_or_never(make_files):
    source = make_files(*({"x": [i]} for i in range(40)))
    end = source.ends[0]
    starts = [0]
    while starts[-1] < end:
        starts.append(source.read(ReadRequest(0, starts[-1], end, 1, None)).position)
    requests = [ReadRequest(0, start, end, 1, None) for start in starts[:-1]]
    for request in requests[:20]:
        source.prefetch(request)
    for i in (30, 2, 0, 39, 1, 1, 25, 3):
        assert source.read(requests[i]).chunks[0].columns["x"].tolist() == [i]
    for i, request in enumerate(requests):
        source.prefetch(requests[(7 * i) % 40])
        assert source.read(request).chunks[0].columns["x"].tolist() == [i]


def test_an_error_keeps_its_message(make_files):
    source = make_files({"x": [1]}, {"x": [1], "y": [2]})
    with pytest.raises(BatchError) as caught:
        read_chunks(source)
    assert str(caught.value).startswith("All rows must have the same columns, but row 0 in line 2")
    assert source.read(ReadRequest(0, 0, 5, 1, None)).chunks[0].columns["x"].tolist() == [1]
    with pytest.raises(BatchError, match="There is no row in"):
        make_files(name="empty.json")


def test_a_package_that_the_process_lacks_is_named(make_files, tmp_path, monkeypatch):
    text = pack_column(np.arange(3))
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "lz4.py").write_text("raise ImportError('hidden')")
    monkeypatch.syspath_prepend(tmp_path / "hidden")
    with pytest.raises(MissingPackageError, match=r"need the package lz4, .*\(hidden\)"):
        make_files({"x": text})


def test_the_process_ends_with_its_source_and_a_closed_source_starts_another(make_files):
    source = make_files({"x": [1, 2]})
    first = get_child(source)
    source.close()
    assert not is_running(first)
    assert read_columns(source)["x"].tolist() == [1, 2]
    second = get_child(source)
    assert is_running(second)
    source.close()
    source.close()
    assert not is_running(second)


def test_the_process_ends_when_its_source_is_collected(make_files, tmp_path):
    files = len(os.listdir("/proc/self/fd"))
    source = IsolatedFiles("json", [str(write_json_lines(tmp_path / "a.json", {"x": [1]}))])
    process = get_child(source)
    read_columns(source)
    del source
    assert not is_running(process)
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_process_that_was_killed_is_reported_and_replaced(make_files):
    source = make_files({"x": [1, 2]})
    os.kill(get_child(source), signal.SIGKILL)
    with pytest.raises(BatchError, match=r"its reader ended \(it ended by SIGKILL\)"):
        read_columns(source)
    assert read_columns(source)["x"].tolist() == [1, 2]


def test_ctrl_c_does_not_end_the_process(make_files):
    source = make_files({"x": [1, 2]})
    os.kill(get_child(source), signal.SIGINT)
    assert read_columns(source)["x"].tolist() == [1, 2]


def test_reading_that_takes_too_long_is_refused(make_files):
    source = make_files({"x": [1, 2]})
    os.kill(get_child(source), signal.SIGPROF)  # as the timer does
    with pytest.raises(BatchError, match=r"it takes more than 1\.2 s and 0\.15 s per megabyte"):
        read_columns(source)


@pytest.mark.soak
def test_a_line_that_unpacks_to_more_than_the_limit_is_refused(make_files):
    pytest.importorskip("lz4")
    zeros = np.zeros((1, 30 << 20), np.float32)
    text = pack_column(zeros)
    source = make_files({"a": text})
    assert read_columns(source, names=("a",))["a"].shape == (1, 30 << 20)
    with pytest.raises(BatchError, match=r"its columns must have at most|takes more than 320 MB"):
        make_files({"a": text, "b": text, "c": text, "d": text}, name="b.json")


def test_a_parquet_file_has_the_same_columns_as_in_this_process(tmp_path):
    pytest.importorskip("pyarrow")
    path = write_parquet(
        tmp_path / "a.parquet",
        {"x": np.arange(6, dtype=np.uint8).reshape(3, 2), "day": ["b", "a", "b"], "f": [0.5, 1, 2]},
    )
    source = IsolatedFiles("parquet", [str(path)])
    result = read_columns(source)
    assert source.column_names == ("x", "day", "f")
    assert result["x"].dtype == np.uint8
    assert result["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert result["day"].tolist() == ["b", "a", "b"]
    assert source.ends == [3]
    source.close()


def test_a_parquet_file_is_read_without_pandas_which_takes_seconds_to_import(tmp_path, monkeypatch):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    slow = tmp_path / "slow" / "pandas"
    slow.mkdir(parents=True)
    code = "import time\nwhile time.process_time() < 60:\n    pass\n"
    (slow / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(slow.parent)
    times = np.arange(2).astype("datetime64[us]")
    columns = {"x": [[0.5], [1.5]], "text": ["a", "b"], "time": times, "done": [False, True]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    source = IsolatedFiles("parquet", [str(tmp_path / "a.parquet")])
    (chunk,) = read_chunks(source)
    source.close()
    assert np.stack(chunk.columns["x"]).tolist() == [[0.5], [1.5]]
    assert chunk.columns["text"].tolist() == ["a", "b"]
    assert chunk.columns["done"].tolist() == [False, True]


@pytest.mark.parametrize("trusted", [True, False])
def test_a_file_that_was_deleted_is_named(tmp_path, trusted):
    paths = [write_json_lines(tmp_path / name, {"x": [1]}) for name in ("a.json", "b.json")]
    source = open_data(paths, trusted=trusted)
    paths[1].unlink()
    with pytest.raises(BatchError, match=r"b\.json cannot be opened: No such file or directory"):
        read_columns(source)
    source.close()
    with pytest.raises(ConfigError, match="There is no file"):
        open_data(paths[1])
