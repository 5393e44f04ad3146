"""The folder of one training run: where everything that the run leaves behind lies."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.regular_files import read_regular
from tfpolicies.reporting.atomic_file import write_atomically

FORMAT = "tfpolicies-run"
FORMAT_VERSION = 1
_LARGEST = 1 << 20  # bytes of a run.json


@dataclass(frozen=True)
class RunFolder:
    """The layout of one training run; only `create` and `write_settings` touch the disk.

    A folder is a run as soon as it has its `run.json`, which is written last and atomically::

        ppo-CartPole-v1-2025-01-31-142501/
            run.json            when the run was made, and the settings of the command
            progress.csv        one row per training iteration
            events/             TensorBoard event files
            learning_curve.png
            checkpoints/
            export/             the policy for serving

    Attributes:
        path: the folder.
    """

    path: Path

    @classmethod
    def create(
        cls,
        parent: str | PathLike[str],
        name: str,
        settings: Mapping[str, Any] | None = None,
        *,
        now: datetime | None = None,
    ) -> RunFolder:
        """Makes the new folder `<name>-<date>-<time>` in `parent`; never touches an older one.

        Characters of `name` that do not suit a file name become `-` (`ALE/Pong-v5`: `ALE-Pong-v5`).
        If there is such a folder already, a number is added.

        Args:
            parent: the folder of all runs; made if it does not exist.
            name: what is trained, such as `"ppo-CartPole-v1"`.
            settings: what the command was called with, as JSON can hold it.
            now: the date and time in the folder's name; the local ones if None.

        Raises:
            UsageError: if no letter or digit is in `name`, or JSON cannot hold `settings`.
            OSError: if the folder cannot be made.
        """
        text = _settings_text(settings or {}, now := now or datetime.now())
        stem = f"{_file_name(name)}-{now:%Y-%m-%d-%H%M%S}"
        Path(parent).mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            run = cls(Path(parent) / (stem if number == 1 else f"{stem}-{number}"))
            try:
                run.path.mkdir()
            except FileExistsError:
                continue
            break
        for folder in (run.events, run.checkpoints, run.export):
            folder.mkdir()
        write_atomically(run.run_json, text)
        return run

    @classmethod
    def open(cls, path: str | PathLike[str]) -> RunFolder:
        """Opens an existing run, to resume or to look at it; changes nothing.

        Raises:
            CheckpointError: if `path` is no run folder, or of a version that is not known here.
        """
        run = cls(Path(path))
        content = run._content()
        if content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{str(run.run_json)!r} has format version {content.get('format_version')!r}, but "
                f"this version of tfpolicies reads {FORMAT_VERSION}. Install the one that wrote it."
            )
        return run

    @property
    def run_json(self) -> Path:
        """The file with the command's settings, which makes the folder a run."""
        return self.path / "run.json"

    @property
    def progress_csv(self) -> Path:
        """One row per training iteration."""
        return self.path / "progress.csv"

    @property
    def events(self) -> Path:
        """The folder to give to TensorBoard."""
        return self.path / "events"

    @property
    def learning_curve(self) -> Path:
        """The picture of the learning curve."""
        return self.path / "learning_curve.png"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The folder of the exported policy."""
        return self.path / "export"

    @property
    def settings(self) -> dict[str, Any]:
        """What the command was called with, read from `run.json`."""
        return dict(self._content()["settings"])

    @property
    def created(self) -> datetime:
        """When the run was made, in local time."""
        return datetime.fromisoformat(self._content()["created"])

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Replaces the settings in `run.json`, atomically.

        Raises:
            UsageError: if JSON cannot hold `settings`; the file is then as before.
        """
        write_atomically(self.run_json, _settings_text(settings, self.created))

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(read_regular(self.run_json, _LARGEST))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(_no_run_folder(self.path)) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{str(self.run_json)!r} is damaged: {error}. Restore the file or start a new run."
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(
                f"{str(self.run_json)!r} was not written by a training run of tfpolicies. "
                "Give the folder that `tfpolicies train` made."
            )
        return content


def find_runs(parent: str | PathLike[str]) -> list[RunFolder]:
    """Returns the runs in the folder `parent`, newest first; none if there is no such folder."""
    runs: list[tuple[datetime, Path]] = []
    for run_json in Path(parent).glob("*/run.json"):
        try:
            run = RunFolder.open(run_json.parent)
            runs.append((run.created, run.path))
        except CheckpointError:
            continue  # somebody else's folder
    return [RunFolder(path) for _, path in sorted(runs, reverse=True)]


def _no_run_folder(path: Path) -> str:
    if not path.exists():
        reason = "it does not exist"
    elif not path.is_dir():
        reason = "it is a file"
    else:
        reason = "it has no run.json"
    inside = [str(run.path) for run in find_runs(path)[:3]]
    hint = f"Its newest runs are {inside}." if inside else "Give one that `tfpolicies train` made."
    return f"{str(path)!r} is no run folder: {reason}. {hint}"


def _file_name(name: str) -> str:
    """Returns `name` as one part of a path.

    >>> _file_name("ppo-ALE/Pong-v5")
    'ppo-ALE-Pong-v5'
    """
    clean = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    if not clean:
        raise UsageError(f"`name` must hold a letter or a digit, got {name!r}.")
    return clean


def _settings_text(settings: Mapping[str, Any], created: datetime) -> bytes:
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": created.isoformat(timespec="seconds"),
        "settings": dict(settings),
    }
    try:
        return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"`settings` must be what JSON can hold, but {error}. Got {dict(settings)!r}. "
            "Turn such values into text or leave them out."
        ) from error
