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
    make_temporary_path,
    remove_if_empty,
    replace_on_success,
    sync_folder,
)
from tfpolicies.system.folder_lock import exclusive_access, make_locked_folder, remove_abandoned


@contextlib.contextmanager
def open_staging_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder on the disk of `target`, which is removed afterwards.

    It is inside `target`, or next to it if that does not exist. Missing parents of `target` are
    created, and removed again if they stay empty. Leftovers of killed exports are removed: no
    process holds the lock in them.
    """
    parent = target if target.is_dir() else target.parent
    with make_folder(parent), contextlib.ExitStack() as closing:
        for location in {parent, target.parent}:
            remove_abandoned(x for x in location.glob(".export.*.tfp-tmp") if is_temporary(x.name))
        folder, lock = make_locked_folder(lambda: _make_staging(parent))
        closing.callback(lock.release)
        closing.callback(shutil.rmtree, folder, ignore_errors=True)
        content = folder / "export"
        content.mkdir()
        yield content


@contextlib.contextmanager
def make_folder(folder: Path) -> Iterator[None]:
    """Creates a folder and its missing parents; removes empty ones at the end."""
    missing = [ancestor for ancestor in (folder, *folder.parents) if not ancestor.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for created in missing:
            remove_if_empty(created)


def _make_staging(parent: Path) -> Path:
    folder = make_temporary_path(parent / "export")
    folder.mkdir()
    return folder


def publish_folder(staged: Path, target: Path) -> bool:
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


def publish_version(staged: Path, target: Path) -> Path:
    """Moves a folder to `target/<n>`, n being one more than the highest; returns the path."""
    sync_tree(staged)
    while True:
        destination = target / str(find_newest_version(target) + 1)
        try:
            os.rename(staged, destination)
        except OSError:
            if not destination.exists():
                raise
            continue  # another export has used this number in the meantime
        sync_folder(target)
        return destination


def find_newest_version(target: Path) -> int:
    """Returns the highest number of the version folders in `target`; 0 without any."""
    return max(
        (int(version_folder.name) for version_folder in list_version_folders(target)), default=0
    )


def list_version_folders(target: Path) -> list[Path]:
    """Returns the entries of a folder that are named by numbers, as versions are."""
    entries = target.iterdir() if target.is_dir() else ()
    return [entry for entry in entries if entry.name.isdecimal()]


_SAVED_MODEL_ENTRIES = ("saved_model.pb", "fingerprint.pb", "variables", "assets")


def link_newest(target: Path, scratch: Path) -> None:
    """Makes `target` itself a SavedModel, by links to the files of its newest version.

    All links lead through one link, `newest`, so that they change at once. Existing files that are
    not links are kept, and so are folders on disks without links.

    Args:
        target: the folder of all versions.
        scratch: the folder of a temporary link, on the same disk.
    """
    version, newest = str(find_newest_version(target)), target / "newest"
    if newest.exists() and not newest.is_symlink():
        return
    with contextlib.suppress(OSError):
        with replace_on_success(newest, scratch) as temporary:
            temporary.symlink_to(version)
        for name in _SAVED_MODEL_ENTRIES:
            if (newest / name).exists() and not os.path.lexists(target / name):
                (target / name).symlink_to(Path("newest", name))
    sync_folder(target)


def publish_files(staged: Path, target: Path, names: Sequence[str]) -> None:
    """Moves files to `target`: as its folder, or one after the other into an existing one.

    If that fails, the old files are restored. Concurrent exports to one folder do not mix their
    files:
    one waits for the other.

    Args:
        staged: has these files and no others.
        target: the folder.
        names: of the files, in the order in which they replace others.
    """
    if publish_folder(staged, target):
        return
    with replace_files(staged, target, names):
        sync_folder(target)


@contextlib.contextmanager
def replace_files(staged: Path, target: Path, names: Sequence[str]) -> Iterator[None]:
    """Moves files into an existing folder; restores the old ones if that, or the block, fails.

    Files whose content is unchanged are not touched.
    """
    placed: list[str] = []
    with exclusive_access(target):
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
