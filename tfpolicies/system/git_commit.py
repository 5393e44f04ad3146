"""Finds the commit of a Git repository by reading its files; runs no program and no hook."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

from tfpolicies.system.regular_files import read_regular

_MAX_BYTES = 1 << 22  # of a file such as `packed-refs`
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # SHA-1 or SHA-256
_REF = re.compile(r"ref: (refs/[\w./@+-]+)")


def find_commit(folder: str | PathLike[str]) -> str | None:
    """Returns the commit that is checked out in the repository of a folder, as hexadecimal digits.

    Changes that are not committed do not show.

    Returns:
        None if the folder is not in a repository, or its files cannot be read.
    """
    try:
        path = Path(folder).resolve()
        git = next((x / ".git" for x in (path, *path.parents) if (x / ".git").exists()), None)
        return None if git is None else _read_head(git)
    except (OSError, ValueError):
        return None


def _read_head(git: Path) -> str | None:
    if git.is_file():  # a worktree or a submodule
        git = git.parent / _read(git).removeprefix("gitdir: ")
    head = _read(git / "HEAD")
    if _COMMIT.fullmatch(head):
        return head
    match = _REF.fullmatch(head)
    if match is None or ".." in match[1].split("/"):
        return None
    link = git / "commondir"
    common = git / _read(link) if link.exists() else git
    if (common / match[1]).exists():
        commit = _read(common / match[1])
        return commit if _COMMIT.fullmatch(commit) else None
    for line in _read(common / "packed-refs").splitlines():
        commit, _, name = line.partition(" ")
        if name == match[1] and _COMMIT.fullmatch(commit):
            return commit
    return None


def _read(path: Path) -> str:
    return read_regular(path, _MAX_BYTES).decode("utf-8").strip()
