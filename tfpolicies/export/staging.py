"""Exports are made beside their place and then moved.

A folder of a version is moved as a whole. Files that lie in a folder by themselves are moved one by
one: who is killed in between leaves files whose checksums are not those of `policy_spec.json`, so
that they are refused, and not run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfpolicies.errors import ExportError, FolderInUseError
from tfpolicies.system.atomic import (
    is_temporary,
    remove_if_empty,
    replacing,
    sync_folder,
    temporary_beside,
)
from tfpolicies.system.folder_lock import FolderLock, alone_in


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Gives a folder of its own inside `target`, on the same disk; it is gone afterwards.

    Missing parents of `target` are made, and removed again if nothing was put there. What exports
    that were killed left behind is removed: nobody holds the lock in it.
    """
    with folder_made(target), contextlib.ExitStack() as closing:
        _remove_leftovers(target)
        folder, lock = _new_folder(target)
        closing.callback(lock.release)
        closing.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextlib.contextmanager
def folder_made(folder: Path) -> Iterator[None]:
    """Makes a folder and its missing parents; what is empty in the end is removed again."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for made in missing:
            remove_if_empty(made)


def _new_folder(target: Path) -> tuple[Path, FolderLock]:
    """Returns a new folder and its lock."""
    while True:
        folder = temporary_beside(target / "export")
        folder.mkdir()
        with contextlib.suppress(FolderInUseError, FileNotFoundError):
            lock = FolderLock(folder)
            if folder.exists():
                return folder, lock
            lock.release()  # another export took it for a leftover, before it was locked


def _remove_leftovers(target: Path) -> None:
    for leftover in target.glob(".export.*.tfp-tmp"):
        if not is_temporary(leftover.name):
            continue
        with contextlib.suppress(FolderInUseError, OSError):
            lock = FolderLock(leftover)
            shutil.rmtree(leftover, ignore_errors=True)
            lock.release()


def place_version(staged: Path, target: Path) -> Path:
    """Moves a folder to `target/<n>`, where n is one more than the highest there, from 1.

    Returns:
        The new place.
    """
    sync_tree(staged)
    while True:
        place = target / str(newest_version(target) + 1)
        try:
            os.rename(staged, place)
        except OSError:
            if not place.exists():
                raise
            continue  # another export took this number in the meantime
        sync_folder(target)
        return place


def newest_version(target: Path) -> int:
    """Returns the highest number that a version folder in `target` has; 0 if there is none."""
    names = [each.name for each in target.iterdir()] if target.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


_LOADED = ("saved_model.pb", "fingerprint.pb", "variables", "assets")


def link_newest(target: Path) -> None:
    """Makes `target` a SavedModel, too: by links to what its newest version has.

    They all lead through one link, `newest`, so that they change at once. What is there and no link
    stays, and so do folders on disks without links.
    """
    version, newest = str(newest_version(target)), target / "newest"
    if newest.exists() and not newest.is_symlink():
        return
    with contextlib.suppress(OSError):
        with replacing(newest) as temporary:
            temporary.symlink_to(version)
        for name in _LOADED:
            if (newest / name).exists() and not os.path.lexists(target / name):
                (target / name).symlink_to(Path("newest", name))
    sync_folder(target)


def place_files(staged: Path, target: Path, names: Sequence[str]) -> None:
    """Moves files to `target`, one after the other; if that fails, the old ones are put back.

    Two exports to one folder do not mix their files: one waits for the other.
    """
    with files_placed(staged, target, names):
        sync_folder(target)


@contextlib.contextmanager
def files_placed(staged: Path, target: Path, names: Sequence[str]) -> Iterator[None]:
    """Moves files to `target` as `place_files` does; if the block fails, too, they go back."""
    placed: list[str] = []
    with alone_in(target):
        for name in names:
            if (target / name).is_dir():
                path = str(target / name)
                raise ExportError(f"{path!r} is a folder, where a file is to be written.")
        backup = staged / "before"
        backup.mkdir()
        sync_tree(staged)
        try:
            for name in names:
                if (target / name).exists():
                    shutil.copy2(target / name, backup / name)
                os.replace(staged / name, target / name)
                placed.append(name)
            yield
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
