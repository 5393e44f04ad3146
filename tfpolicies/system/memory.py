"""How much memory there is."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of the container that this process runs in


def available_memory() -> int | None:
    """Returns how many bytes can be taken without swapping; None where the system does not say."""
    found = [_available(_MEMINFO), _limit(_LIMIT)]
    return min((size for size in found if size is not None), default=None)


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
        sizes = dict(line.split(":", 1) for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None


def _limit(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def readable_size(size: float) -> str:
    """Returns a number of bytes for messages.

    >>> readable_size(2_500_000_000), readable_size(12_000)
    ('2.5 GB', '12 kB')
    """
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} PB"
