"""Files, folders, patterns, archives and objects that a user names as data."""

import os
import zipfile
import zlib

import numpy as np
import pytest

from helpers.recorded_files import read_columns, write_json_lines, write_parquet
from tfpolicies.errors import BatchError, ConfigError
from tfpolicies.offline.isolated_source import IsolatedFiles
from tfpolicies.offline.open_data import find_files, is_file_source, open_data

pytestmark = pytest.mark.core


def read_x(data, **options):
    source = open_data(data, **{"trusted": True, **options})
    result = read_columns(source)["x"].tolist()
    source.close()
    return result


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with three JSON files, one of them in a folder of its own."""
    for i, name in enumerate(("b.json", "a.json")):
        write_json_lines(tmp_path / name, {"x": [i]})
    (tmp_path / "more").mkdir()
    write_json_lines(tmp_path / "more" / "c.jsonl", {"x": [2]})
    (tmp_path / "notes.txt").write_text("none")
    return tmp_path


def test_a_folder_has_its_files_in_the_order_of_their_names(folder):
    assert read_x(folder) == [1, 0]
    assert read_x(str(folder)) == [1, 0]


def test_patterns_and_lists_name_files_once(folder):
    assert read_x(f"{folder}/*.json") == [1, 0]
    assert read_x(f"{folder}/?.json") == [1, 0]
    assert read_x([folder / "b.json", f"{folder}/*.json", folder / "more"]) == [0, 1, 2]
    write_json_lines(folder / "d[1].json", {"x": [3]})
    assert read_x(folder / "d[1].json") == [3]


def test_a_relative_path_begins_at_the_working_folder_and_a_tilde_at_home(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    assert read_x("a.json") == read_x("~/a.json") == [1]


def test_parquet_files_are_known_by_their_ending_or_by_the_format(tmp_path):
    pytest.importorskip("pyarrow")
    path = write_parquet(tmp_path / "a.parquet", {"x": [1, 2]})
    assert read_x(path) == read_x(tmp_path) == [1, 2]
    os.rename(path, tmp_path / "a.data")
    with pytest.raises(ConfigError, match=r"The format of \['a.data'\] is unclear"):
        read_x(tmp_path / "a.data")
    assert read_x(tmp_path / "a.data", file_format="parquet") == [1, 2]
    with pytest.raises(ConfigError, match=r"must be one of \('json', 'parquet'\), got 'csv'"):
        read_x(tmp_path / "a.data", file_format="csv")


def test_files_of_both_formats_in_a_folder_need_the_format(folder):
    pytest.importorskip("pyarrow")
    write_parquet(folder / "a.parquet", {"x": [9]})
    with pytest.raises(ConfigError, match="is unclear"):
        read_x(folder)
    assert read_x(folder, file_format="parquet") == [9]
    assert read_x(folder, file_format="json") == [1, 0]


@pytest.mark.parametrize("name", ["none.json", "*.parquet", "more", "none/x.json"])
def test_a_path_without_files_is_refused_as_it_was_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    with pytest.raises(ConfigError) as caught:
        read_x(name)
    assert f"There is no file of recorded experience at {name!r}" in str(caught.value)
    with pytest.raises(ConfigError):
        find_files([], None) or find_files([name], None)


def test_zip_archives_have_their_files_in_order_and_are_deleted_after_use(folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(folder / "more"))
    monkeypatch.setattr("tempfile.tempdir", None)
    with zipfile.ZipFile(folder / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "b.json", "deep/../../b.json")
        archive.write(folder / "a.json", "/a.json")
        archive.write(folder / "notes.txt", "notes.txt")
    source = open_data(folder / "all.zip", trusted=True)
    assert read_columns(source)["x"].tolist() == [0, 1]
    assert len(list((folder / "more").glob("tfpolicies-*"))) == 1
    source.close()
    del source
    assert not list((folder / "more").glob("tfpolicies-*"))
    assert not (folder.parent / "b.json").exists()


def test_archives_that_are_damaged_or_grow_too_much_are_refused(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", b" " * (100 << 20))
    with pytest.raises(BatchError, match="must not have more than 100 bytes of JSON per byte"):
        read_x(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.json", b" ")
    with pytest.raises(BatchError, match="must be compressed by deflate, got the method 14"):
        read_x(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b" ")
    with pytest.raises(BatchError, match=r"must have \.json files in it, but has none"):
        read_x(path)
    path.write_bytes(zlib.compress(b"x" * 100))
    with pytest.raises(BatchError, match=r"a\.zip cannot be read as a zip archive"):
        read_x(path)


def test_other_objects_are_arrays_frames_or_datasets(tmp_path):
    assert read_x({"x": np.array([1, 2])}) == [1, 2]
    pandas = pytest.importorskip("pandas")
    assert read_x(pandas.DataFrame({"x": [1, 2]})) == [1, 2]
    import tensorflow as tf

    assert read_x(tf.data.Dataset.from_tensor_slices({"x": [1, 2]})) == [1, 2]
    for data in (3, None, [], [1], b"a.json", object()):
        assert not is_file_source(data)
        with pytest.raises(ConfigError, match="Recorded experience must be a path"):
            open_data(data)


def test_files_are_parsed_by_a_child_process_unless_they_are_trusted(folder):
    source = open_data(folder)
    assert isinstance(source, IsolatedFiles)
    assert read_columns(source)["x"].tolist() == [1, 0]
    source.close()
    assert not isinstance(open_data(folder, trusted=True), IsolatedFiles)
