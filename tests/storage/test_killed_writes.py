"""What is left when a process is killed, stopped or has no locks while it writes."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from helpers.factories import OBS, make, rows_of
from tfpolicies import PolicyMap
from tfpolicies.errors import FolderInUseError, StashError
from tfpolicies.export import publish
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.system import folder_lock
from tfpolicies.system.folder_lock import FolderLock, exclusive_access

pytestmark = pytest.mark.usefixtures("kept_programs")


def fill(policy, number):
    policy.set_weights([np.full_like(x, number) for x in policy.get_weights().values()])


def number_of(policy):
    (number,) = {float(x) for array in policy.get_weights().values() for x in array.flat}
    return number


def map_with(path, **numbers):
    policies = PolicyMap(path=path)
    for policy_id, number in numbers.items():
        policies[policy_id] = make()
        fill(policies[policy_id], number)
    return policies


def end(policies):
    """Leaves a map as a killed process does."""
    policies._store._folder_lock.release()


def names(folder):
    return sorted(x.name for x in folder.iterdir() if x.suffix in (".state", ".json"))


# -- the stash ------------------------------------------------------------------------------------


def test_a_policy_that_changed_after_its_flush_is_found_as_it_was_flushed(tmp_path):
    policies = map_with(tmp_path, a=1.0)
    policies.flush()
    generator = policies["a"].get_state()["rng"]
    policies["a"].compute_actions(rows_of(OBS, 3))
    fill(policies["a"], 2.0)
    policies.evict("a")
    fill(policies["a"], 3.0)
    policies.evict("a")
    end(policies)
    with PolicyMap(path=tmp_path) as again:
        assert number_of(again["a"]) == 1.0
        assert again["a"].get_state()["rng"] == generator  # weights and record are of one flush
        assert len(names(tmp_path / "worker_0")) == 2  # what was never flushed is removed
        fill(again["a"], 4.0)
    with PolicyMap(path=tmp_path) as again:
        assert number_of(again["a"]) == 4.0
    assert len(names(tmp_path / "worker_0")) == 2


def test_a_policy_that_was_replaced_is_found_until_the_new_one_is_flushed(tmp_path):
    policies = map_with(tmp_path, a=1.0, b=1.0)
    policies.flush()
    policies["a"] = make()
    fill(policies["a"], 2.0)
    end(policies)
    policies = PolicyMap(path=tmp_path)
    assert number_of(policies["a"]) == 1.0
    for policy_id in "ab":  # one that is opened, one that waits
        policies[policy_id] = make()
        fill(policies[policy_id], 3.0)
    policies.flush()
    end(policies)
    with PolicyMap(path=tmp_path) as policies:
        assert [number_of(policies[x]) for x in "ab"] == [3.0, 3.0]
        assert len(names(tmp_path / "worker_0")) == 4
        policies["a"] = make()
        del policies["a"]  # nor does the one before it come back
        end(policies)
        with PolicyMap(path=tmp_path) as again:
            assert list(again) == ["b"]
            again._store._folder_lock.release()


def test_of_two_records_of_one_policy_the_newer_one_counts(tmp_path):
    policies = map_with(tmp_path / "stash", a=1.0)
    policies.flush()
    own = tmp_path / "stash" / "worker_0"
    shutil.copytree(own, tmp_path / "old")
    fill(policies["a"], 2.0)
    policies.close()
    for name in names(tmp_path / "old"):  # as if the process had been killed before it removed them
        shutil.copy2(tmp_path / "old" / name, own / name)
    assert len(names(own)) == 4
    with PolicyMap(path=tmp_path / "stash") as again:
        assert number_of(again["a"]) == 2.0
        assert len(names(own)) == 2


def test_a_frozen_image_without_a_record_keeps_its_id_from_nobody(tmp_path):
    policies = map_with(tmp_path, a=1.0)
    policies.freeze("a")
    for record in (tmp_path / "frozen").glob("*.json"):
        record.unlink()  # as if the process had been killed before it wrote it
    policies.close()
    with map_with(tmp_path, a=2.0) as policies:
        policies.freeze("a")
        assert number_of(policies["a"]) == 2.0
    with PolicyMap(1, 2, path=tmp_path) as other:
        assert number_of(other["a"]) == 2.0


def test_a_stopped_process_that_freezes_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_TIMEOUT_SECONDS", 0.1)
    policies = map_with(tmp_path, a=1.0, b=2.0)
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
    command = [sys.executable, "-c", KEEP]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp_path
        first = map_with(None, a=1.0)
        first.evict("a")
        assert (folder / "a~1.state").exists()  # a running process keeps its own
        process.kill()
        process.wait()
    second = map_with(None, a=1.0)
    second.evict("a")
    assert not folder.exists()
    assert first._cache.stash.folder.exists()
    assert number_of(first["a"]) == 1.0


# -- exports and runs -----------------------------------------------------------------------------


def test_the_temporary_link_of_an_export_lies_where_the_next_one_removes_it(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    moved = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (moved.append(paths), real(*paths)))
    with publish.open_staging_folder(tmp_path) as folder:
        publish.link_newest(tmp_path, folder)
        assert [Path(temporary).parent for temporary, _ in moved] == [folder]
    assert (tmp_path / "newest").resolve() == tmp_path / "1"


def test_who_waits_for_a_stopped_export_gets_an_error(tmp_path, monkeypatch):
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


def test_without_locks_what_others_are_writing_stays(tmp_path, without_locks, caplog):
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
def test_a_lock_that_is_no_file_is_refused_and_not_followed(tmp_path, kind):
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


# -- everything, killed ---------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("place", ["stash", "replay"])
def test_writers_killed_at_their_steps_leave_what_the_next_one_goes_on_with(place):
    command = [sys.executable, "-m", "soak.killed_writes", "--only", place]
    command += ["--kills", "12", "--stops", "2"]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "0 violations" in done.stdout
