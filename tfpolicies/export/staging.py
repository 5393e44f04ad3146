"""Exports are written completely next to their place and then moved there.

Where there is no folder yet, all of an export becomes it by one rename. In a folder that exists, a
new version is one rename, too. Files that replace those of an earlier export there are renamed one
by one, `policy_spec.json` last: a process that is killed in between leaves files whose checksums
the spec does not have, so that they are refused, and not run.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfpolicies.errors import ExportError
from tfpolicies.system.atomic import (
    is_temporary,
    remove_if_empty,
    replacing,
    sync_folder,
    temporary_beside,
)
from tfpolicies.system.folder_lock import alone_in, make_locked_folder, remove_abandoned


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Gives an empty folder on the disk of `target`; it is gone afterwards.

    It is inside `target`, or next to it if that does not exist. Missing parents of `target` are
    made, and removed again if nothing was put there. Leftovers of exports that were killed are
    removed: no process holds the lock in them.
    """
    place = target if target.is_dir() else target.parent
    with folder_made(place), contextlib.ExitStack() as closing:
        for each in {place, target.parent}:
            remove_abandoned(x for x in each.glob(".export.*.tfp-tmp") if is_temporary(x.name))
        folder, lock = make_locked_folder(lambda: _make_staging(place))
        closing.callback(lock.release)
        closing.callback(shutil.rmtree, folder, ignore_errors=True)
        content = folder / "export"
        content.mkdir()
        yield content


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


def _make_staging(place: Path) -> Path:
    folder = temporary_beside(place / "export")
    folder.mkdir()
    return folder


def place_whole(staged: Path, target: Path) -> bool:
    """Makes a folder the folder `target` by one rename, unless that exists.

    Returns:
        Whether it did; if not, nothing was changed.
    """
    if target.exists():
        return False
    sync_tree(staged)
    try:
        os.rename(staged, target)
    except OSError:
        if not target.is_dir():
            raise
        return False  # another export made it in the meantime
    sync_folder(target.parent)
    return True


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
    return max((int(each.name) for each in version_folders(target)), default=0)


def version_folders(target: Path) -> list[Path]:
    """Returns what in a folder is named as versions are: by numbers."""
    entries = target.iterdir() if target.is_dir() else ()
    return [each for each in entries if each.name.isdecimal()]


_LOADED = ("saved_model.pb", "fingerprint.pb", "variables", "assets")


def link_newest(target: Path, scratch: Path) -> None:
    """Makes `target` a SavedModel, too: by links to what its newest version has.

    They all lead through one link, `newest`, so that they change at once. What is there and no link
    stays, and so do folders on disks without links.

    Args:
        target: the folder of all versions.
        scratch: the folder of a temporary link, on the same disk.
    """
    version, newest = str(newest_version(target)), target / "newest"
    if newest.exists() and not newest.is_symlink():
        return
    with contextlib.suppress(OSError):
        with replacing(newest, scratch) as temporary:
            temporary.symlink_to(version)
        for name in _LOADED:
            if (newest / name).exists() and not os.path.lexists(target / name):
                (target / name).symlink_to(Path("newest", name))
    sync_folder(target)


def place_files(staged: Path, target: Path, names: Sequence[str]) -> None:
    """Moves files to `target`: as its folder, or one after the other into the one that exists.

    If that fails, the old ones are put back. Two exports to one folder do not mix their files: one
    waits for the other.

    Args:
        staged: has these files and no others.
        target: the folder.
        names: of the files, in the order in which they replace others.
    """
    if place_whole(staged, target):
        return
    with files_placed(staged, target, names):
        sync_folder(target)


@contextlib.contextmanager
def files_placed(staged: Path, target: Path, names: Sequence[str]) -> Iterator[None]:
    """Moves files into a folder that exists; they go back if that, or the block, fails.

    Files that the folder has with the same content stay untouched.
    """
    placed: list[str] = []
    with alone_in(target):
        for name in names:
            if (target / name).is_dir():
                path = str(target / name)
                raise ExportError(f"{path!r} is a folder, where a file is to be written.")
        backup, changed = staged / "before", []
        backup.mkdir()
        for name in names:
            old = target / name
            if not (old.exists() and filecmp.cmp(staged / name, old, shallow=False)):
                changed.append(name)
                if old.exists():
                    shutil.copy2(old, backup / name)
        sync_tree(staged)
        try:
            for name in changed:
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
