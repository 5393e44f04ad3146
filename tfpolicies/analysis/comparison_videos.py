"""Finds the newest video of each group, for its page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tfpolicies.analysis.run_groups import RunGroup, get_run_text
from tfpolicies.analysis.run_record import RunRecord
from tfpolicies.system.paths import shorten_path
from tfpolicies.system.regular_files import read_regular

_MEDIA_TYPES = {".mp4": "video/mp4", ".gif": "image/gif"}
_MAX_VIDEO_BYTES = 3 << 20
_MAX_PAGE_BYTES = 24 << 20  # of all videos of a page


class Video(NamedTuple):
    """A video; without content if it is too large, or cannot be read."""

    run: str
    name: str
    path: str
    media_type: str
    content: bytes | None


def read_videos(groups: Iterable[RunGroup]) -> dict[str, Video]:
    """Returns the newest video of each group that has one, by `RunGroup.key`."""
    videos: dict[str, Video] = {}
    remaining = _MAX_PAGE_BYTES
    for group in groups:
        files = [(path, run) for run in group.runs for path in _find_videos(run)]
        if not files:
            continue
        path, run = max(files, key=lambda file: _get_time(file[0]))
        content = _read(path, min(remaining, _MAX_VIDEO_BYTES))
        remaining -= len(content or b"")
        videos[group.key] = Video(
            get_run_text(run),
            path.name,
            shorten_path(path),
            _MEDIA_TYPES[path.suffix.lower()],
            content,
        )
    return videos


def _find_videos(run: RunRecord) -> list[Path]:
    folder = run.folder.videos
    if folder.is_symlink() or not folder.is_dir():
        return []
    return [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in _MEDIA_TYPES and path.is_file() and not path.is_symlink()
    ]


def _get_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path, limit: int) -> bytes | None:
    try:
        return read_regular(path, limit)
    except OSError:
        return None
