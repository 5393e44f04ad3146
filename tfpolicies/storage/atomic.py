"""Files that are either whole or not there, whenever the process is killed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import weakref
from pathlib import Path
from typing import Any

from tfpolicies.errors import StashError
from tfpolicies.regular_files import read_regular

fcntl: Any
try:
    import fcntl
except ImportError:  # only Unix has it
    fcntl = None

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tfp-tmp")


def make_folder(folder: Path) -> None:
    """Creates `folder` and its missing parents, durably.

    Raises:
        OSError: if one of them cannot be made, or is a file.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable, as `fsync` does for the content of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place_file(path: Path, content: bytes) -> None:
    """Makes `path` hold `content`; whoever looks finds all of it, or what was there before.

    A file that holds `content` already is left alone. The new name is durable once
    `sync_folder` has returned for its folder.

    Raises:
        OSError: if it cannot be written; what was there before is then untouched.
    """
    if _holds(path, content):
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tfp-tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        remove_file(temporary)
        raise


def remove_file(path: Path) -> None:
    """Removes `path` where that is possible: tidying up never fails a write that succeeded."""
    with contextlib.suppress(OSError):
        path.unlink()


class FolderLock:
    """Keeps a folder for one process; it is free again when that process ends, however it ends.

    Args:
        folder: made if it is missing.

    Raises:
        StashError: if it cannot be made, or if another process, or another lock of this one, has
            it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            make_folder(folder)
            self._file = open(folder / "lock", "a+b")  # noqa: SIM115 - it stays open
        except OSError as error:
            raise StashError(
                f"The stash {str(folder)!r} cannot be made: {error}. Give another `path`."
            ) from error
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise StashError(
                f"The stash {str(folder)!r} is in use by another PolicyMap; close that one, or "
                "give this one another `path` or `worker_index`."
            ) from error
        weakref.finalize(self, self._file.close)

    def release(self) -> None:
        """Frees the folder."""
        self._file.close()


def is_temporary(name: str) -> bool:
    """Says whether a file of this name is the leftover of a write that was killed.

    >>> is_temporary(".policy.json.0123abcd.tfp-tmp"), is_temporary("policy.json")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.stat().st_size == len(content) and read_regular(path) == content
    except OSError:
        return False
