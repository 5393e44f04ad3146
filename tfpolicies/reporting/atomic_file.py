"""Replacing a file whole, so that a reader or a kill never meets half of one."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the file at `path` by `content`; whoever is killed meanwhile leaves the old one.

    The new bytes are on disk before they take the name. The temporary file beside `path` has a
    fixed name, so that what a killed process left behind is removed by the next one; one process
    writes a file at a time.

    Raises:
        OSError: if the folder is missing or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
