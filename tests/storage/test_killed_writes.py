"""Files of processes that are killed or stopped while they write, or that have no locks."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers.factories import OBS, make, rows_of
from helpers.policy_maps import fill, get_number, make_filled, make_map, release_folder
from helpers.processes import run_python
from tfpolicies import PolicyMap
from tfpolicies.errors import FolderInUseError, StashError
from tfpolicies.export import publish
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.system import folder_lock
from tfpolicies.system.folder_lock import FolderLock, exclusive_access

pytestmark = pytest.mark.usefixtures("kept_programs")


def names(folder):
    return sorted(x.name for x in folder.iterdir() if x.suffix in (".state", ".json"))


def test_a_policy_that_changed_after_its_flush_is_found_as_it_was_flushed(tmp_path):
    policies = make_map("a", path=tmp_path)
    policies.flush()
    generator = policies["a"].get_state()["rng"]
    policies["a"].compute_actions(rows_of(OBS, 3))
    fill(policies["a"], 2.0)
    policies.evict("a")
    fill(policies["a"], 3.0)
    policies.evict("a")
    release_folder(policies)
    with PolicyMap(path=tmp_path) as again:
        assert get_number(again["a"]) == 1.0
        assert again["a"].get_state()["rng"] == generator  # weights and record are of one flush
        assert len(names(tmp_path / "worker_0")) == 2  # files that were never flushed are removed
        fill(again["a"], 4.0)
    with PolicyMap(path=tmp_path) as again:
        assert get_number(again["a"]) == 4.0
    assert len(names(tmp_path / "worker_0")) == 2


def test_a_policy_that_was_replaced_is_found_until_the_new_one_is_flushed(tmp_path):
    policies = make_map("a", "b", path=tmp_path)
    policies.flush()
    policies["a"] = make_filled(2.0)
    release_folder(policies)
    policies = PolicyMap(path=tmp_path)
    assert get_number(policies["a"]) == 1.0
    for policy_id in "ab":  # one that is opened, one that is not
        policies[policy_id] = make_filled(3.0)
    policies.flush()
    release_folder(policies)
    with PolicyMap(path=tmp_path) as policies:
        assert [get_number(policies[x]) for x in "ab"] == [3.0, 3.0]
        assert len(names(tmp_path / "worker_0")) == 4
        policies["a"] = make()
        del policies["a"]  # the one before it does not come back either
        release_folder(policies)
        with PolicyMap(path=tmp_path) as again:
            assert list(again) == ["b"]
            release_folder(again)


def test_of_two_records_of_one_policy_the_newer_one_counts(tmp_path):
    policies = make_map("a", path=tmp_path / "stash")
    policies.flush()
    folder = tmp_path / "stash" / "worker_0"
    shutil.copytree(folder, tmp_path / "old")
    fill(policies["a"], 2.0)
    policies.close()
    for name in names(tmp_path / "old"):  # as if the process had been killed before it removed them
        shutil.copy2(tmp_path / "old" / name, folder / name)
    assert len(names(folder)) == 4
    with PolicyMap(path=tmp_path / "stash") as again:
        assert get_number(again["a"]) == 2.0
        assert len(names(folder)) == 2


def test_a_frozen_image_without_a_record_does_not_take_its_id(tmp_path):
    policies = make_map("a", path=tmp_path)
    policies.freeze("a")
    for record in (tmp_path / "frozen").glob("*.json"):
        record.unlink()  # as if the process had been killed before it wrote it
    policies.close()
    with PolicyMap(path=tmp_path) as policies:
        policies["a"] = make_filled(2.0)
        policies.freeze("a")
        assert get_number(policies["a"]) == 2.0
    with PolicyMap(1, 2, path=tmp_path) as other:
        assert get_number(other["a"]) == 2.0


def test_a_map_waits_a_limited_time_for_a_stopped_process_that_freezes(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_TIMEOUT_SECONDS", 0.1)
    policies = make_map("a", "b", path=tmp_path)
    policies.freeze("b")
    descriptor = os.open(tmp_path / "frozen", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StashError, match=r"in use by another process for 0\.1 s.*may be stopped"):
        policies.freeze("a")
    assert not policies["a"].driver.is_frozen
    os.close(descriptor)
    assert policies.freeze("a").driver.is_frozen
    policies.close()


KEEP = """
import sys, time
from pathlib import Path
import numpy as np
from tfpolicies.storage.stash import Stash
stash = Stash()
stash.write("a~1", np.zeros(10, np.uint8))
print(stash.folder, flush=True)
sys.stdin.read()
"""


def test_the_temporary_stash_of_a_killed_process_goes_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    options["env"] = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", KEEP], **options) as process:
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp_path
        first = make_map("a")
        first.evict("a")
        assert (folder / "a~1.state").exists()  # a running process keeps its own
        process.kill()
        process.wait()
    second = make_map("a")
    second.evict("a")
    assert not folder.exists()
    assert first._cache.stash.folder.exists()
    assert get_number(first["a"]) == 1.0


def test_the_temporary_link_of_an_export_is_in_its_staging_folder(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    moved = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (moved.append(paths), real(*paths)))
    with publish.open_staging_folder(tmp_path) as folder:
        publish.link_newest(tmp_path, folder)
        assert [Path(temporary).parent for temporary, _ in moved] == [folder]
    assert (tmp_path / "newest").resolve() == tmp_path / "1"


def test_waiting_for_a_stopped_export_ends_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_TIMEOUT_SECONDS", 0.1)
    with exclusive_access(tmp_path) as is_alone:
        assert is_alone
        with pytest.raises(FolderInUseError, match=r"Let that process continue, or end it"):
            exclusive_access(tmp_path).__enter__()
    with exclusive_access(tmp_path) as is_alone:
        assert is_alone


@pytest.fixture
def without_locks(monkeypatch):
    """Lets the file system have no locks, as some network file systems do."""

    def flock(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_without_locks_files_that_others_write_stay(tmp_path, without_locks, caplog):
    run = RunFolder.create_at(tmp_path / "run")
    assert caplog.text.count("cannot be locked (") == 1
    temporary = run.checkpoints / ".algorithm.json.0123abcd.tfp-tmp"
    temporary.write_text("half")
    with RunFolder.open(tmp_path / "run").acquire():
        assert temporary.exists()
    with publish.open_staging_folder(tmp_path / "export") as one:
        (one / "model.onnx").write_text("half")
        with publish.open_staging_folder(tmp_path / "export"):
            assert (one / "model.onnx").exists()
    image = tmp_path / "stash" / "worker_0" / "a~1.state"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"unrecorded yet")
    PolicyMap(path=tmp_path / "stash").close()
    assert image.exists()
    with exclusive_access(tmp_path) as is_alone:
        assert not is_alone


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_link_or_fifo_in_place_of_a_lock_is_refused_and_not_followed(tmp_path, kind):
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("of another user")
    folder.mkdir()
    if kind == "link":
        (folder / "lock").symlink_to(precious)
    else:
        os.mkfifo(folder / "lock")
    with pytest.raises(OSError, match=r"symbolic links|not a regular file"):
        FolderLock(folder)
    assert precious.read_text() == "of another user"


@pytest.mark.soak
@pytest.mark.parametrize("place", ["stash", "replay"])
def test_the_next_writer_continues_from_files_of_killed_ones(place):
    words = ["--only", place, "--kills", 12, "--stops", 2]
    assert "0 violations" in run_python("-m", "soak.killed_writes", *words, seconds=600).stdout
