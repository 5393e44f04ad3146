"""Locks that give one process exclusive use of a folder."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from tfpolicies.errors import FolderInUseError
from tfpolicies.system.regular_files import check_regular

logger = logging.getLogger("tfpolicies")

_LOCK_FILE_NAME = "lock"
_TIMEOUT_SECONDS = 60.0  # seconds; the wait takes milliseconds unless the other process is stopped
_POLL_SECONDS = 0.02


class FolderLock:
    """Locks a folder for one process; the lock is released when that process ends, in any way.

    It is an `flock` on the file `lock` in the folder, which stays there; while the folder is
    locked, the file contains the process id. A forked child closes its copy of the file, so that
    it neither holds nor releases the lock. If the file system has no locks, a warning is logged
    once and nothing is locked.

    Args:
        folder: an existing folder.
        warns: whether to warn of a file system without locks.

    Attributes:
        is_held: whether the folder is locked; False if the file system has no locks.

    Raises:
        FolderInUseError: if another process, or another lock of this one, has the folder.
        OSError: if the file cannot be made or written, or if there is a link or something else
            than a file in its place: another user may have put it there.
    """

    def __init__(self, folder: Path, *, warns: bool = True) -> None:
        self.is_held = False
        self._file = _open_lock(folder / _LOCK_FILE_NAME)
        try:
            self._acquire(folder, warns=warns)
        except BaseException:
            self._file.close()
            raise
        _open_locks.add(self)
        weakref.finalize(self, self._file.close)

    def _acquire(self, folder: Path, *, warns: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True
        except BlockingIOError as error:
            owner = self._read_owner()
            raise FolderInUseError(
                f"{str(folder)!r} is in use by {owner}. Wait until it has ended, or use another "
                "folder.",
                owner,
            ) from error
        except OSError as error:
            if warns:
                logger.warning(
                    "%r cannot be locked (%s): make sure that one process at a time writes there.",
                    str(folder),
                    error,
                )
        self._write_content(b"%d\n" % os.getpid())

    def _read_owner(self) -> str:
        self._file.seek(0)
        number = self._file.read(32).decode(errors="replace").strip()
        return f"process {number}" if number.isdecimal() else "another process"

    def _write_content(self, content: bytes) -> None:
        """Writes the content, such as the process id; ignores errors, such as a full disk."""
        with contextlib.suppress(OSError):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(content)
            self._file.flush()

    def release(self) -> None:
        """Releases the lock; does nothing in a forked child, or a second time."""
        if not self._file.closed:
            self._write_content(b"")
            self._file.close()

    def close_inherited(self) -> None:
        """Closes this process's copy of the file; another process still holds the lock."""
        self._file.close()


def _open_lock(path: Path) -> BinaryIO:
    """Opens or makes a lock file; refuses links and other files than regular ones."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        check_regular(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "r+b")
    except BaseException:
        os.close(descriptor)
        raise


def is_folder_locked(folder: Path) -> bool:
    """Returns True if a process has locked a folder; it is not waited for, and nothing is written.

    False on a file system without locks.
    """
    try:
        descriptor = os.open(folder / _LOCK_FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def make_locked_folder(make: Callable[[], Path]) -> tuple[Path, FolderLock]:
    """Makes a new folder and locks it.

    Args:
        make: makes a folder of another name each time it is called.
    """
    while True:
        folder = make()
        with contextlib.suppress(FolderInUseError, FileNotFoundError):
            lock = FolderLock(folder, warns=False)
            if folder.exists():
                return folder, lock
            lock.release()  # another process removed it before it was locked


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Removes those folders of `make_locked_folder` whose processes have ended.

    Folders of other users stay, and so does every folder on a file system without locks.
    """
    for folder in folders:
        with contextlib.suppress(FolderInUseError, OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = FolderLock(folder, warns=False)
            if lock.is_held:
                shutil.rmtree(folder, ignore_errors=True)
            lock.release()


@contextlib.contextmanager
def exclusive_access(folder: Path) -> Iterator[bool]:
    """Gives exclusive access to a folder for a short time; waits for other processes.

    Yields whether access is exclusive: False, without waiting, if the file system has no locks.

    Raises:
        FolderInUseError: if another process does not leave its block within `_PATIENCE` seconds.
        OSError: if the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _wait_for_flock(descriptor, folder)
    finally:
        os.close(descriptor)


def _wait_for_flock(descriptor: int, folder: Path) -> bool:
    """Locks a folder's descriptor; returns False if the file system has no locks."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise FolderInUseError(
                    f"{str(folder)!r} has been in use by another process for {_TIMEOUT_SECONDS:g} "
                    "s, which writes there and may be stopped. Let that process continue, or end "
                    "it; then try again.",
                    "another process",
                ) from error
            time.sleep(_POLL_SECONDS)
        except OSError:
            return False


_open_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _close_inherited_locks() -> None:
    for lock in _open_locks:
        lock.close_inherited()


os.register_at_fork(after_in_child=_close_inherited_locks)
