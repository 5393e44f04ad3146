"""Reads files of untrusted folders: only regular files, and no more than their stated size.

Reading a FIFO could block forever, and a device never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

from tfpolicies.system.system_memory import get_available_memory

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Opens a regular file, or a link to one, for reading bytes; unbuffered.

    Raises:
        OSError: if it cannot be opened, or is a folder, FIFO, socket or device.
        ValueError: if the path holds a NUL.
    """
    check_regular(path, os.stat(path))  # opening some devices does something
    file = os.fdopen(os.open(path, _FLAGS), "rb", buffering=0)
    try:
        check_regular(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Returns the content of a regular file, or of a link to one.

    Args:
        path: the file.
        limit: maximal size in bytes; None for the available memory.

    Raises:
        OSError: if it cannot be read, has more bytes, or is a folder, FIFO, socket or device.
        ValueError: if the path holds a NUL.
    """
    with open_regular(path) as file:
        return read_content(file, limit)


def get_size(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def read_content(file: FileIO, limit: int | None = None) -> bytes:
    """Reads an open file up to its reported size: some files of /proc never end."""
    size, max_size = get_size(file), get_available_memory() if limit is None else limit
    if size > max_size:
        raise OSError(errno.EFBIG, f"it has {size} bytes, more than {max_size}", str(file.name))
    parts: list[bytes] = []
    while size > 0 and (part := file.read(size)):  # one part, unless a signal comes
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(Path(path)))
