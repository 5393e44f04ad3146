"""Keeping a folder for one process."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfpolicies.errors import FolderInUseError

fcntl: Any
try:
    import fcntl
except ImportError:  # only Unix has it
    fcntl = None

logger = logging.getLogger("tfpolicies")

_LOCK = "lock"


class FolderLock:
    """Keeps a folder for one process; it is free again when that process ends, however it ends.

    It is an `flock` on the file `lock` in the folder, which stays there; while the folder is kept,
    the file has the number of the process in it. A forked child closes its copy of the file, so
    that it neither keeps the folder nor frees it. Where the file system has no locks, one warning
    says so and nothing is kept.

    Args:
        folder: must be there.

    Raises:
        FolderInUseError: if another process, or another lock of this one, has the folder.
        OSError: if the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / _LOCK, "a+b")  # noqa: SIM115 - it stays open
        try:
            self._take(folder)
        except BaseException:
            self._file.close()
            raise
        _LOCKS.add(self)
        weakref.finalize(self, self._file.close)

    def _take(self, folder: Path) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = self._owner()
            raise FolderInUseError(
                f"{str(folder)!r} is in use by {owner}. Wait until it has ended, or take another "
                "folder.",
                owner,
            ) from error
        except OSError as error:
            logger.warning(
                "%r cannot be locked (%s): see to it that one process at a time writes there.",
                str(folder),
                error,
            )
        self._write(b"%d\n" % os.getpid())

    def _owner(self) -> str:
        self._file.seek(0)
        number = self._file.read(32).decode(errors="replace").strip()
        return f"process {number}" if number.isdecimal() else "another process"

    def _write(self, content: bytes) -> None:
        """Puts the number of the process into the file, as far as the disk has room for it."""
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(content)
            self._file.flush()

    def release(self) -> None:
        """Frees the folder; does nothing in a forked child, or a second time."""
        if not self._file.closed:
            self._write(b"")
            self._file.close()

    def drop(self) -> None:
        """Closes this process's copy of the file, which another process goes on to hold."""
        self._file.close()


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Enters when no other process is in such a block for `folder`; for what is soon done.

    Where the file system has no locks, it enters at once.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_LOCKS: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _drop_all() -> None:
    for lock in _LOCKS:
        lock.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)
