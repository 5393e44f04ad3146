"""Publishes exports atomically: they are written to a staging folder and then moved.

A new folder appears by one rename, and so does a new version in an existing folder. Files that
replace those of an earlier export are renamed one by one, `policy_spec.json` last: if the process
is killed in between, the checksums in the spec do not match, so the files are refused.
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
    """Yields an empty folder on the disk of `target`, which is removed afterwards.

    It is inside `target`, or next to it if that does not exist. Missing parents of `target` are
    created, and removed again if they stay empty. Leftovers of killed exports are removed: no
    process holds the lock in them.
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
    """Creates a folder and its missing parents; removes empty ones at the end."""
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
    """Moves a folder to `target` by one rename; returns False, without changes, if that exists."""
    if target.exists():
        return False
    sync_tree(staged)
    try:
        os.rename(staged, target)
    except OSError:
        if not target.is_dir():
            raise
        return False  # another export has created it in the meantime
    sync_folder(target.parent)
    return True


def place_version(staged: Path, target: Path) -> Path:
    """Moves a folder to `target/<n>`, n being one more than the highest; returns the path."""
    sync_tree(staged)
    while True:
        place = target / str(newest_version(target) + 1)
        try:
            os.rename(staged, place)
        except OSError:
            if not place.exists():
                raise
            continue  # another export has used this number in the meantime
        sync_folder(target)
        return place


def newest_version(target: Path) -> int:
    """Returns the highest number of the version folders in `target`; 0 without any."""
    return max((int(each.name) for each in version_folders(target)), default=0)


def version_folders(target: Path) -> list[Path]:
    """Returns the entries of a folder that are named by numbers, as versions are."""
    entries = target.iterdir() if target.is_dir() else ()
    return [each for each in entries if each.name.isdecimal()]


_LOADED = ("saved_model.pb", "fingerprint.pb", "variables", "assets")


def link_newest(target: Path, scratch: Path) -> None:
    """Makes `target` itself a SavedModel, by links to the files of its newest version.

    All links lead through one link, `newest`, so that they change at once. Existing files that are
    not links are kept, and so are folders on disks without links.

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
    """Moves files to `target`: as its folder, or one after the other into an existing one.

    If that fails, the old files are restored. Concurrent exports to one folder do not mix their
    files:
    one waits for the other.

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
    """Moves files into an existing folder; restores the old ones if that, or the block, fails.

    Files whose content is unchanged are not touched.
    """
    placed: list[str] = []
    with alone_in(target):
        for name in names:
            if (target / name).is_dir():
                path = str(target / name)
                raise ExportError(f"{path!r} is a folder, but a file has to be written there.")
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
    """Flushes all files and names in `folder` to disk."""
    for path, _, files in os.walk(folder):
        for name in files:
            with open(Path(path, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(path))
