"""Allocates arrays of buffers: in memory up to a limit, beyond it in files without names.

The files are unlinked when they are created, so they disappear with their arrays, also after a
crash. Their disk space is reserved at once, since a full disk would otherwise end the process at
the first write.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from tfpolicies.errors import ConfigError
from tfpolicies.system.paths import resolve_path
from tfpolicies.system.system_memory import format_size, get_available_memory

_DEFAULT_FOLDER = Path("/var/tmp")  # /tmp is often in memory
_MIN_MAPPED_BYTES = 2**20  # bytes; arrays of this size or more have separate memory pages


class BufferAllocator:
    """Allocates the arrays of one or several buffers.

    Args:
        memory_limit_bytes: arrays beyond this limit are in files; None is half of the memory that
            is available when the first array is allocated.
        storage_path: the folder of the files; None is that of the environment variable `TMPDIR`, or
            /var/tmp, or that of temporary files.

    Raises:
        ConfigError: if the limit is not a non-negative integer, or the path not a folder.

    >>> allocator = BufferAllocator(memory_limit_bytes=100)
    >>> arrays = [allocator.allocate((8,), np.float64), allocator.allocate((8,), np.float64)]
    >>> allocator.bytes_in_memory, allocator.bytes_in_files
    (64, 64)
    """

    def __init__(
        self, memory_limit_bytes: int | None = None, storage_path: str | Path | None = None
    ) -> None:
        check_allocator_arguments(memory_limit_bytes, storage_path)
        self._limit = memory_limit_bytes
        self._folder = None if storage_path is None else resolve_path(storage_path)
        self.bytes_in_memory = 0
        self.bytes_in_files = 0

    def allocate(self, shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self._limit is None:
            self._limit = get_available_memory() // 2
        in_memory = self.bytes_in_memory + size <= self._limit
        try:
            array = (_allocate_in_memory if in_memory else self._allocate_in_file)(
                shape, dtype, size
            )
        except (MemoryError, ValueError, OverflowError, OSError) as error:
            raise ConfigError(
                f"A replay buffer needs {format_size(size)} more, but there is not enough space "
                f"for it{'' if in_memory else f' in {self._get_folder()!r}'}: {error}. Reduce its "
                "capacity, or set its storage_path to a folder with more space."
            ) from error
        self._count(size, in_memory)
        weakref.finalize(array, self._count, -size, in_memory)
        return array

    def _count(self, size: int, in_memory: bool) -> None:
        if in_memory:
            self.bytes_in_memory += size
        else:
            self.bytes_in_files += size

    def _allocate_in_file(self, shape: Sequence[int], dtype: DTypeLike, size: int) -> np.ndarray:
        with tempfile.TemporaryFile(dir=self._get_folder()) as file:
            _reserve_space(file.fileno(), max(size, 1))
            mapped = mmap.mmap(file.fileno(), max(size, 1))
        return np.ndarray(shape, dtype, mapped)

    def _get_folder(self) -> str:
        if self._folder is not None:
            return str(self._folder)
        use_temporary_folder = "TMPDIR" in os.environ or not _DEFAULT_FOLDER.is_dir()
        return tempfile.gettempdir() if use_temporary_folder else str(_DEFAULT_FOLDER)


def _allocate_in_memory(shape: Sequence[int], dtype: DTypeLike, size: int) -> np.ndarray:
    """Returns an array; the memory of large ones is returned to the system with the array.

    The C library would allocate arrays of up to 32 MB among small ones, and keep freed memory.
    """
    if size < _MIN_MAPPED_BYTES:
        return np.empty(shape, dtype)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.ndarray(shape, dtype, mapped)


def _reserve_space(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:  # not on macOS
        os.truncate(file, size)


def check_allocator_arguments(
    memory_limit_bytes: int | None, storage_path: str | Path | None
) -> None:
    limit = memory_limit_bytes
    is_count = isinstance(limit, int | np.integer) and not isinstance(limit, bool) and limit >= 0
    if limit is not None and not is_count:
        raise ConfigError(
            f"`memory_limit_bytes` must be a whole number from 0, or None, but got {limit!r}."
        )
    if storage_path is not None and not resolve_path(storage_path).is_dir():
        raise ConfigError(
            f"`storage_path` must be an existing folder, or None, but got {storage_path!r}."
        )
