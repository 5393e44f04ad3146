"""Exports appear whole or not at all: they are made beside their place and then moved."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfpolicies.atomic import is_temporary, sync_folder
from tfpolicies.errors import ExportError

_DAY = 86400.0  # seconds; no export takes so long


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Gives an empty folder inside `target`, on the same disk; it is gone afterwards.

    Missing parents of `target` are made, and removed again if nothing was put there. What exports
    that were killed left behind is removed after a day.
    """
    missing = [folder for folder in (target, *target.parents) if not folder.exists()]
    target.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    folder = target / f".export.{secrets.token_hex(4)}.tfp-tmp"
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for made in missing:
            with contextlib.suppress(OSError):  # it holds the export
                made.rmdir()


def _remove_leftovers(target: Path) -> None:
    for leftover in target.glob(".export.*.tfp-tmp"):
        with contextlib.suppress(OSError):
            if is_temporary(leftover.name) and time.time() - leftover.stat().st_mtime > _DAY:
                shutil.rmtree(leftover)


def place_version(staged: Path, target: Path) -> Path:
    """Moves a folder to `target/<n>`, where n is one more than the highest there, from 1.

    Returns:
        The new place.
    """
    sync_tree(staged)
    while True:
        taken = [int(entry.name) for entry in target.iterdir() if entry.name.isdecimal()]
        place = target / str(max(taken, default=0) + 1)
        try:
            os.rename(staged, place)
        except OSError:
            if not place.exists():
                raise
            continue  # another export took this number in the meantime
        sync_folder(target)
        return place


def place_files(staged: Path, target: Path, names: Sequence[str]) -> None:
    """Moves files to `target`, one after the other; if that fails, the old ones are put back."""
    for name in names:
        if (target / name).is_dir():
            raise ExportError(f"{str(target / name)!r} is a folder, where a file is to be written.")
    backup = staged / "before"
    backup.mkdir()
    sync_tree(staged)
    placed: list[str] = []
    try:
        for name in names:
            if (target / name).exists():
                shutil.copy2(target / name, backup / name)
            os.replace(staged / name, target / name)
            placed.append(name)
        sync_folder(target)
    except BaseException:
        for name in placed:
            if (backup / name).exists():
                os.replace(backup / name, target / name)
            else:
                (target / name).unlink()
        raise


def sync_tree(folder: Path) -> None:
    """Makes all files and names below `folder` durable."""
    for path, _, files in os.walk(folder):
        for name in files:
            with open(Path(path, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(path))
