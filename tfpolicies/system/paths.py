"""Paths from users: made absolute once, and shown in messages as the user wrote them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfpolicies.errors import UsageError, show_value


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """Returns a user's path as an absolute one, with `~` expanded.

    Call it once, where the path enters the package: simulators and Ray Tune change the working
    folder of a process later. Symbolic links stay, and so does `..`, which means another folder
    after a link than in the text.

    >>> resolve_path("runs/a") == Path.cwd() / "runs" / "a"
    True
    """
    text: Any = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        raise UsageError(
            f"A path must be a text or an os.PathLike of one, and not empty, got {show_value(path)}"
            ". The working folder is '.'."
        )
    try:
        return Path(os.path.expanduser(text)).absolute()
    except FileNotFoundError as error:
        raise UsageError(
            f"The path {show_value(text)} is relative to the working folder, which was removed. "
            "Give an absolute path, or change to a folder that is there."
        ) from error


_WILDCARDS = frozenset("*?[]\\")


def has_wildcards(path: Path) -> bool:
    """Returns True if TensorFlow reads a path as a glob pattern; it then finds no weights there."""
    return not _WILDCARDS.isdisjoint(str(path))


@contextlib.contextmanager
def link_without_wildcards(folder: Path) -> Iterator[Path]:
    """Yields a path of a folder that TensorFlow reads literally: a link, or the folder itself."""
    if not has_wildcards(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tfpolicies-") as parent:
        link = Path(parent, "folder")
        link.symlink_to(folder, target_is_directory=True)
        yield link


def describe_path(user_path: str | os.PathLike[str], path: Path) -> str:
    """Returns a path for a message: as the user wrote it, and resolved by `resolve_path`.

    >>> describe_path("~/run", Path("/home/me/run")), describe_path("/tmp/run", Path("/tmp/run"))
    ("'~/run' (/home/me/run)", "'/tmp/run'")
    """
    text = os.fspath(user_path)
    return show_value(text) if text == str(path) else f"{show_value(text)} ({str(path)[:200]})"


def shorten_path(path: Path) -> str:
    """Returns a path relative to the current folder if it is in that folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
