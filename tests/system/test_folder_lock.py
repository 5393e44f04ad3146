"""A folder belongs to one process at a time, whatever happens to that process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfpolicies.errors import FolderInUseError
from tfpolicies.system.folder_lock import FolderLock

pytestmark = pytest.mark.core

HOLD = "import sys, time; from pathlib import Path; "
HOLD += "from tfpolicies.system.folder_lock import FolderLock; "
HOLD += "lock = FolderLock(Path(sys.argv[1])); "


def holder(folder: Path, then: str) -> "subprocess.Popen[str]":
    """Starts a process that keeps a folder, and returns when it does."""
    code = f"{HOLD}print('held', flush=True); {then}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_process_is_told_which_one_has_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path, "sys.stdin.read()") as process:
        with pytest.raises(FolderInUseError, match=f"in use by process {process.pid}") as caught:
            FolderLock(tmp_path)
        assert caught.value.owner == f"process {process.pid}"
        process.communicate()
    FolderLock(tmp_path).release()


def test_a_killed_process_leaves_the_folder_free(tmp_path: Path) -> None:
    with holder(tmp_path, "time.sleep(600)") as process:
        process.kill()
    assert (tmp_path / "lock").read_text() == f"{process.pid}\n"
    lock = FolderLock(tmp_path)
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    lock.release()
    assert (tmp_path / "lock").read_text() == ""


def test_another_lock_of_the_same_process_is_refused(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(FolderInUseError, match=f"process {os.getpid()}"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path).release()


def test_a_forked_child_neither_frees_the_folder_nor_keeps_it(tmp_path: Path) -> None:
    # The child releases its copy and stays after its parent: it waits for the end of input.
    fork = "import os; child = os.fork()\nif child == 0:\n lock.release()\n"
    then = f"{fork} print('released', flush=True)\n sys.stdin.read()\nelse:\n time.sleep(600)"
    code = f"{HOLD}{then}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "released\n"
        with pytest.raises(FolderInUseError, match=f"process {process.pid}"):
            FolderLock(tmp_path)
        process.kill()
        process.wait()
        FolderLock(tmp_path).release()  # though the child is still there
