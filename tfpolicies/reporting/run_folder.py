"""The folder of one training run, with all of its output files."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import time
import traceback
from collections.abc import Mapping
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import CheckpointError, FolderInUseError, UsageError
from tfpolicies.system.atomic import remove_file, remove_leftovers, write_atomically
from tfpolicies.system.folder_lock import FolderLock, is_folder_locked
from tfpolicies.system.paths import resolve_path
from tfpolicies.system.regular_files import read_regular

FORMAT = "tfpolicies-run"
FORMAT_VERSION = 1
# Reasons why a training ended, as `finished` in the settings of a run:
ENDED_BY_TARGET, ENDED_BY_STEPS, ENDED_BY_CALLBACK = "target", "steps", "callback"
_TEARDOWN_SECONDS = 2.0  # seconds that the kernel may take to end a killed process
_MAX_JSON_BYTES = 1 << 20  # bytes of a run.json
_MAX_PLACES = 20  # versions and machines that a run.json lists
SEED_PREFIX = "seed-"  # of the names of the runs in a folder of seeds
_NAMES_BEFORE_RUN_JSON = {"lock", "events", "checkpoints", "export"}  # created before run.json


class RunFolder:
    """The layout of a run folder, and the lock for writing to it.

    A folder is a run as soon as it has its `run.json`, which is written last and atomically::

        ppo-CartPole-v1-2025-01-31-142501/
            run.json            creation time of the run, the settings of the command, and a
                                description of the run
            lock                the id of the process that writes to the run
            progress.csv        one row per training iteration
            error.txt           the traceback of the error that ended the training, if any
            events/             TensorBoard event files
            learning_curve.png
            checkpoints/
            export/             the policy for serving
            videos/             recorded episodes, if any
            trackers/           the ids of this run in MLflow and W&B, if it is logged there

    Any process may read a run. A writer must hold it: from `create` or `acquire` until `release`,
    or until the end of a `with` statement. Only one process can hold it; the lock of a killed
    process is released.

    Args:
        path: the folder; it may be missing.

    Attributes:
        path: absolute; the others are in it, and may be missing.
        run_json: the file with the command's settings, which makes the folder a run.
        progress_csv: one row per training iteration.
        error_txt: the traceback of the error that ended the training, if any.
        events: the folder to give to TensorBoard.
        learning_curve: the image of the learning curve.
        checkpoints: the folder of the checkpoints.
        latest: the newest checkpoint.
        best: the best checkpoint; older ones may be next to it, as `iteration-000020`.
        export: the folder of the exported policy.
        videos: the folder of videos.
        trackers: the folder of the ids of this run in experiment trackers.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = resolve_path(path)
        self.run_json = self.path / "run.json"
        self.progress_csv = self.path / "progress.csv"
        self.error_txt = self.path / "error.txt"
        self.events = self.path / "events"
        self.learning_curve = self.path / "learning_curve.png"
        self.checkpoints = self.path / "checkpoints"
        self.latest, self.best = self.checkpoints / "latest", self.checkpoints / "best"
        self.export = self.path / "export"
        self.videos = self.path / "videos"
        self.trackers = self.path / "trackers"
        self._lock: FolderLock | None = None

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(
        cls,
        parent: str | PathLike[str],
        name: str,
        settings: Mapping[str, Any] | None = None,
        *,
        now: datetime | None = None,
    ) -> RunFolder:
        """Creates and holds the new folder `<name>-<date>-<time>`; never changes an existing one.

        Characters of `name` that are not allowed in file names become `-` (`ALE/Pong-v5`:
        `ALE-Pong-v5`). If the folder exists already, a number is appended.

        Args:
            parent: the folder of all runs; created if missing.
            name: algorithm and environment, such as `"ppo-CartPole-v1"`.
            settings: the settings of the command, as JSON values.
            now: the date and time in the folder's name; local time if None.

        Raises:
            UsageError: if `name` has no letter or digit, or `settings` are not JSON values.
            OSError: if the folder cannot be created.
        """
        text = _encode_run_json(settings or {}, now := now or datetime.now())
        run = cls(make_dated_folder(parent, name, now))
        run._initialize(text)
        return run

    @classmethod
    def create_at(
        cls, path: str | PathLike[str], settings: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """Creates and holds a new run in exactly this folder, which is created if missing.

        Args:
            path: the folder; if it exists, it must be empty, or left by an interrupted `make`.
            settings: as in `create`.

        Raises:
            UsageError: if the folder holds something else, or `settings` are not JSON values.
            FolderInUseError: if another process holds it.
            OSError: if the folder cannot be created.
        """
        text = _encode_run_json(settings or {}, datetime.now())
        run = cls(path)
        run.path.mkdir(parents=True, exist_ok=True)
        unexpected = sorted({x.name for x in run.path.iterdir()} - _NAMES_BEFORE_RUN_JSON)
        if unexpected:
            raise UsageError(
                f"{str(path)!r} is not a run folder, but holds {unexpected[:3]}. Give a run "
                "folder, or one that is empty or does not exist yet."
            )
        run._initialize(text)
        return run

    def _initialize(self, run_json: bytes) -> None:
        """Holds the folder and creates its content; `run.json` comes last."""
        self._lock = FolderLock(self.path)
        for folder in (self.events, self.checkpoints, self.export):
            folder.mkdir(exist_ok=True)
        write_atomically(self.run_json, run_json)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> RunFolder:
        """Opens an existing run, to read it or to `acquire` it; changes nothing."""
        run = cls(path)
        content = run._read_run_json()
        if content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{str(run.run_json)!r} has format version {content.get('format_version')!r}, but "
                f"this version of tfpolicies reads {FORMAT_VERSION}. Install the one that wrote it."
            )
        created, settings = content.get("created"), content.get("settings")
        if not _is_date(created) or not isinstance(settings, dict):
            raise CheckpointError(
                f"{str(run.run_json)!r} is damaged: its creation time or settings are missing. "
                "Restore the file or start a new run."
            )
        return run

    def _acquire_lock(self) -> FolderLock:
        """Acquires the lock; waits briefly for a killed process that is being torn down."""
        deadline = time.monotonic() + _TEARDOWN_SECONDS
        while True:
            try:
                return FolderLock(self.path)
            except FolderInUseError as error:
                if error.owner == f"process {os.getpid()}" or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def acquire(self) -> RunFolder:
        """Acquires exclusive write access to the run, and removes partial files of killed writers.

        Returns:
            This run, for a `with` statement.

        Raises:
            FolderInUseError: if another process or another object in this process holds it.
            OSError: if the folder cannot be written.
        """
        if self._lock is None:
            try:
                self._lock = self._acquire_lock()
            except FolderInUseError as error:
                raise FolderInUseError(
                    f"The run {str(self.path)!r} is in use by {error.owner}, which trains it. Wait "
                    "until it has ended, or start another run.",
                    error.owner,
                ) from error
            if self._lock.is_held:  # else another process may be writing
                remove_leftovers(self.path)
        return self

    def release(self) -> None:
        """Releases the run for other writers; may be called again."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def archive_latest(self, iteration: int, count: int, *, protected: str | None = None) -> None:
        """Keeps the newest checkpoint as `iteration-000020` and removes older ones of that form.

        Files that checkpoints have in common are links, so they take space once.

        Args:
            iteration: of the newest checkpoint.
            count: how many to keep.
            protected: a checkpoint to keep in any case.
        """
        target = self.checkpoints / f"iteration-{iteration:06}"
        staging = self.checkpoints / f".{target.name}"
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(self.latest, staging, copy_function=_link_or_copy)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
        for old_checkpoint in sorted(self.checkpoints.glob("iteration-*"))[:-count]:
            if str(old_checkpoint) != protected:
                shutil.rmtree(old_checkpoint, ignore_errors=True)

    def write_error(self, error: BaseException) -> None:
        """Writes the traceback of the error that ended the training, if the disk allows it."""
        trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            write_atomically(self.error_txt, trace.encode(errors="replace"))

    def clear_error(self) -> None:
        """Removes the traceback of an earlier error, since the run continues."""
        remove_file(self.error_txt)

    @property
    def has_checkpoint(self) -> bool:
        """Whether the newest checkpoint is complete: its manifest is written last."""
        return any(self.latest.glob("*.json"))

    @property
    def is_in_use(self) -> bool:
        """Whether a process writes to the run; False on a file system without locks."""
        return is_folder_locked(self.path)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the command, read from `run.json`."""
        return dict(self._read_run_json()["settings"])

    @property
    def creation_time(self) -> datetime:
        return datetime.fromisoformat(self._read_run_json()["created"])

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Replaces the settings in `run.json`, atomically.

        Raises:
            UsageError: if `settings` are not JSON values; the file is unchanged then.
        """
        self._replace(settings=dict(settings))

    @property
    def description(self) -> dict[str, Any]:
        """The facts and places that `describe` wrote; empty before."""
        description = self._read_run_json().get("description")
        return description if isinstance(description, dict) else {}

    def describe(
        self, facts: Mapping[str, Any], versions: Mapping[str, str], machine: Mapping[str, Any]
    ) -> None:
        """Records what runs, and where, in `run.json`; call it whenever a process begins to train.

        Each different pair of versions and machine is recorded once, in the order of their first
        use, up to the newest 20: `{"started": time, "versions": ..., "machine": ...}`.

        Args:
            facts: of the run, such as its algorithm, as JSON values.
            versions: of the installed packages.
            machine: its properties, as JSON values.

        Raises:
            UsageError: if these are not JSON values; the file is unchanged then.
        """
        places = self.description.get("places")
        places = places if isinstance(places, list) else []
        place = {"versions": dict(versions), "machine": dict(machine)}
        if not any(isinstance(old, dict) and old.items() >= place.items() for old in places):
            started = datetime.now().isoformat(timespec="seconds")
            places = [*places, {"started": started, **place}][-_MAX_PLACES:]
        self._replace(description={**facts, "places": places})

    def _replace(self, **parts: Any) -> None:
        content = {**self._read_run_json(), **parts}
        created = datetime.fromisoformat(content["created"])
        description = content.get("description")
        write_atomically(self.run_json, _encode_run_json(content["settings"], created, description))

    def _read_run_json(self) -> dict[str, Any]:
        try:
            content = json.loads(read_regular(self.run_json, _MAX_JSON_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(_describe_not_a_run(self.path)) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{str(self.run_json)!r} is damaged: {error}. Restore the file or start a new run."
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(
                f"{str(self.run_json)!r} was not written by a training run of tfpolicies. "
                "Give the folder that `tfpolicies train` created."
            )
        return content


def _is_date(text: Json) -> bool:
    try:
        return isinstance(text, str) and bool(datetime.fromisoformat(text))
    except ValueError:
        return False


def make_dated_folder(parent: str | PathLike[str], name: str, now: datetime) -> Path:
    """Creates the new folder `<name>-<date>-<time>` in `parent`; see `RunFolder.create`."""
    stem = f"{to_file_name(name)}-{now:%Y-%m-%d-%H%M%S}"
    folder = resolve_path(parent)
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError


def find_newest_run(parent: str | PathLike[str]) -> RunFolder | None:
    return next((run for run in find_runs(parent) if run.has_checkpoint), None)


def find_runs(parent: str | PathLike[str]) -> list[RunFolder]:
    """Returns the runs in the folder `parent`, newest first; none if there is no such folder.

    Those of folders of seeds in it are among them.
    """
    runs: list[tuple[datetime, Path]] = []
    for path in find_run_paths(parent):
        with contextlib.suppress(CheckpointError):  # not a run folder
            run = RunFolder.open(path)
            runs.append((run.creation_time, run.path))
    return [RunFolder(path) for _, path in sorted(runs, reverse=True)]


def find_run_paths(parent: str | PathLike[str]) -> list[Path]:
    """Returns the folders in `parent`, and in folders of seeds there, that have a `run.json`."""
    folder = resolve_path(parent)
    patterns = ("*/run.json", f"*/{SEED_PREFIX}*/run.json")
    return sorted(path.parent for pattern in patterns for path in folder.glob(pattern))


def _describe_not_a_run(path: Path) -> str:
    if not path.exists():
        reason = "it does not exist"
    elif not path.is_dir():
        reason = "it is a file"
    else:
        reason = "it has no run.json"
    contained_runs = [str(run.path) for run in find_runs(path)[:3]]
    hint = (
        f"Its newest runs are {contained_runs}."
        if contained_runs
        else "Give one of `tfpolicies train`."
    )
    return f"{str(path)!r} is not a run folder: {reason}. {hint}"


def to_file_name(name: str) -> str:
    """Converts `name` to a valid path component.

    >>> to_file_name("ppo-ALE/Pong-v5")
    'ppo-ALE-Pong-v5'
    """
    clean = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    if not clean:
        raise UsageError(f"`name` must hold a letter or a digit, got {name!r}.")
    return clean


def _encode_run_json(
    settings: Mapping[str, Any], created: datetime, description: Mapping[str, Any] | None = None
) -> bytes:
    content: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": created.isoformat(timespec="seconds"),
        "settings": dict(settings),
    }
    if description:
        content["description"] = dict(description)
    try:
        return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"`settings` must be JSON values, but {error}. Got {dict(settings)!r:.500}. "
            "Convert such values to strings or leave them out."
        ) from error


def _link_or_copy(source: str, target: str) -> None:
    """Links a file, or copies it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
