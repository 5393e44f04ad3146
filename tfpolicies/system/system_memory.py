"""Available memory of the system or container."""

from __future__ import annotations

import math
from pathlib import Path

import psutil

_CGROUP_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")  # of the container that this process runs in


def get_available_memory() -> int:
    """Returns the bytes that can be allocated without swapping."""
    try:
        limit: float = int(_CGROUP_LIMIT_FILE.read_text())
    except (OSError, ValueError):  # "max": no limit
        limit = math.inf
    return int(min(psutil.virtual_memory().available, limit))


def format_size(size: float) -> str:
    """Formats a number of bytes for messages.

    >>> format_size(2_500_000_000), format_size(12_000)
    ('2.5 GB', '12 kB')
    """
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} PB"
