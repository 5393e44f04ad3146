"""Locks of folders, of which one process has each, whatever happens to that process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfpolicies.errors import FolderInUseError
from tfpolicies.system.folder_lock import FolderLock

pytestmark = pytest.mark.core

HOLD = """
import os, sys, time
from pathlib import Path
from tfpolicies.system.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
"""


def start_holder(folder: Path, code: str) -> "subprocess.Popen[str]":
    """Starts a process that locks a folder and runs code; returns when it prints "ready"."""
    command = [sys.executable, "-c", HOLD + code, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_error_of_a_second_process_names_the_first(tmp_path: Path) -> None:
    with start_holder(tmp_path, "print('ready', flush=True); sys.stdin.read()") as process:
        with pytest.raises(FolderInUseError, match=f"in use by process {process.pid}") as caught:
            FolderLock(tmp_path)
        assert caught.value.owner == f"process {process.pid}"
        process.communicate()
    FolderLock(tmp_path).release()


def test_a_killed_process_leaves_the_folder_free(tmp_path: Path) -> None:
    with start_holder(tmp_path, "print('ready', flush=True); time.sleep(600)") as process:
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


FORK = """
if os.fork() == 0:  # it releases its copy, and stays after its parent until the end of input
    lock.release()
    print("ready", flush=True)
    sys.stdin.read()
else:
    time.sleep(600)
"""


def test_a_forked_child_neither_frees_the_folder_nor_keeps_it(tmp_path: Path) -> None:
    with start_holder(tmp_path, FORK) as process:
        with pytest.raises(FolderInUseError, match=f"process {process.pid}"):
            FolderLock(tmp_path)
        process.kill()
        process.wait()
        FolderLock(tmp_path).release()  # though the child is still there
