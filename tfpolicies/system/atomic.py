"""Writes files atomically: a killed process leaves the old or the new file, never a part."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tfpolicies.system.regular_files import read_regular

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


def write_atomically(path: Path, content: bytes, *, scratch: Path | None = None) -> None:
    """Makes `path` hold `content`, atomically: readers find the old or the new content.

    A file that already holds `content` is not written. The new name is durable once
    `sync_folder` has returned for its folder.

    Args:
        path: the file.
        content: its new content.
        scratch: the folder of the temporary file, on the same disk; that of `path` if None.

    Raises:
        OSError: if it cannot be written; the old file is then untouched.
    """
    if _has_content(path, content):
        return
    with replace_on_success(path, scratch) as temporary, open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replace_on_success(
    path: Path, scratch: Path | None = None, move: Callable[[Path, Path], None] | None = None
) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` on success, and is removed after an error.

    Args:
        path: the file.
        scratch: as in `write_atomically`.
        move: moves the temporary file to `path`; `os.replace` by default.
    """
    temporary = make_temporary_path(path, scratch)
    try:
        yield temporary
        (move or os.replace)(temporary, path)
    except BaseException:
        remove_file(temporary)
        raise


def make_temporary_path(path: Path, scratch: Path | None = None) -> Path:
    """Returns a new temporary path for `path`, in its folder or in `scratch`."""
    return (scratch or path.parent) / f".{path.name}.{secrets.token_hex(4)}.tfp-tmp"


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files of killed writes below `folder`; no other process may write there."""
    for path in [path for path in folder.rglob(".*.tfp-tmp") if is_temporary(path.name)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            remove_file(path)


def remove_file(path: Path) -> None:
    """Removes `path` if possible. Errors are ignored, since the write itself has succeeded."""
    with contextlib.suppress(OSError):
        path.unlink()


def remove_if_empty(folder: Path) -> None:
    """Removes `folder` if it is empty. Errors are ignored."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def is_temporary(name: str) -> bool:
    """Returns True if a file of this name is a leftover of a killed write.

    >>> is_temporary(".policy.json.0123abcd.tfp-tmp"), is_temporary("policy.json")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def _has_content(path: Path, content: bytes) -> bool:
    try:
        return path.stat().st_size == len(content) and read_regular(path) == content
    except OSError:
        return False
