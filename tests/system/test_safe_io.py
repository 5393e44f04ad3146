"""Folders of strangers with FIFOs and devices in place of files, for which no reader waits."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tfpolicies.errors import CheckpointError, ModelImportError, StashError
from tfpolicies.reporting.progress_csv import ProgressCsv, read_progress
from tfpolicies.reporting.progress_row import FIXED_COLUMNS
from tfpolicies.reporting.run_folder import RunFolder, find_runs
from tfpolicies.storage.checkpoint import CheckpointData, read_checkpoint, write_checkpoint
from tfpolicies.storage.keras_h5 import read_keras_weights
from tfpolicies.storage.stash import Stash
from tfpolicies.system.atomic import write_atomically
from tfpolicies.system.regular_files import open_regular, read_regular

ROW = {**dict.fromkeys(FIXED_COLUMNS, 1.0), "iteration": 1}


@pytest.fixture(autouse=True)
def alarm():
    """Ends after a minute what would wait for ever."""

    def give_up(*_):
        raise TimeoutError("it waits for a file that never comes")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


irregular = pytest.mark.parametrize("put", [fifo, endless, folder], ids=lambda put: put.__name__)


def checkpoint(path):
    arrays = {"weights": {"bias": np.zeros(2, np.float32)}}
    parts = {"main": CheckpointData("policy.json", {"type": "Policy"}, arrays)}
    write_checkpoint(path, "algorithm.json", {"type": "Algorithm"}, arrays, policies=parts)
    return path


def test_a_link_to_a_regular_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"content"
    with open_regular(tmp_path / "link") as file:
        assert file.read(3) == b"con"


def test_a_file_is_read_up_to_a_limit_and_to_the_size_that_it_tells(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file", 7) == b"content"
    with pytest.raises(OSError, match="7 bytes, more than 6"):
        read_regular(tmp_path / "file", 6)
    assert read_regular("/proc/self/maps") == b""  # it tells 0


def test_a_file_larger_than_the_memory_is_not_read(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(OSError, match="more than"):
        read_regular(tmp_path / "sparse")


@irregular
@pytest.mark.parametrize(
    "name", ["algorithm.json", "weights-*.h5", "policies/*/policy.json", "policies/*/weights-*.h5"]
)
def test_a_checkpoint_with_something_else_for_a_file_is_refused(tmp_path, put, name):
    put(next(checkpoint(tmp_path).glob(name)))
    with pytest.raises(CheckpointError, match=r"not a regular file|bytes"):
        read_checkpoint(tmp_path, "algorithm.json", kind="Algorithm")


@irregular
def test_a_checkpoint_is_written_next_to_irregular_files(tmp_path, put):
    put(tmp_path / "other.json")
    assert read_checkpoint(checkpoint(tmp_path), "algorithm.json", kind="Algorithm").policies


@pytest.mark.parametrize("put", [fifo, endless], ids=lambda put: put.__name__)
def test_a_file_replaces_an_irregular_one(tmp_path, put):
    put(tmp_path / "file")
    write_atomically(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


@irregular
def test_a_stash_reads_no_image_and_no_record_from_something_else(tmp_path, put):
    stash = Stash(tmp_path)
    image = np.arange(8, dtype=np.uint8)
    stash.write("main~1", image)
    stash.write_record("main~1", {"policy": {}, "policy_ids": ["main"]})
    put(stash.get_path("main~1", "json"))
    assert list(stash.list_records()) == []
    with pytest.raises(StashError, match="not a regular file"):
        stash.read_record("main~1")
    put(stash.get_path("main~1"))
    for read in (stash.read, stash.map):
        with pytest.raises(StashError, match="not a regular file"):
            read("main~1", 8)


@irregular
def test_weights_are_imported_from_files_only(tmp_path, put):
    put(tmp_path / "model.keras")
    with pytest.raises(ModelImportError, match="not a regular file"):
        read_keras_weights(tmp_path / "model.keras")


@irregular
def test_a_run_folder_with_something_else_for_a_file_is_refused(tmp_path, put):
    run = RunFolder.create(tmp_path, "run")
    ProgressCsv(run.progress_csv).append(ROW)
    put(run.progress_csv)
    put(run.run_json)
    for read in (
        lambda: read_progress(run.progress_csv),
        lambda: ProgressCsv(run.progress_csv).append(ROW),
        lambda: RunFolder.open(run.path),
    ):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read()
    assert find_runs(tmp_path) == []


def test_a_temporary_file_that_a_stranger_left_is_replaced_and_not_followed(tmp_path):
    run = RunFolder.create(tmp_path, "run")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run.path / ".run.json.tmp").symlink_to(victim)
    run.write_settings({"seed": 1})
    fifo(run.path / ".run.json.tmp")
    run.write_settings({"seed": 2})
    assert run.settings == {"seed": 2}
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    "text", [b"[" + b"{}," * (1 << 21) + b"{}]", b"[" + b"0," * (1 << 23) + b"0]", b" " * (1 << 26)]
)
def test_a_manifest_that_would_fill_the_memory_is_refused(tmp_path, text):
    (tmp_path / "policy.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"the limit is|more than"):
        read_checkpoint(tmp_path, "policy.json", kind="Policy")


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path):
    checkpoint(tmp_path)
    before = {path: path.read_bytes() for path in Path(tmp_path).rglob("*.json")}
    with pytest.raises(CheckpointError, match="cannot be written: it has about"):
        write_checkpoint(
            tmp_path, "algorithm.json", {"type": "Algorithm", "x": [[]] * (1 << 20)}, {}
        )
    assert {path: path.read_bytes() for path in Path(tmp_path).rglob("*.json")} == before
