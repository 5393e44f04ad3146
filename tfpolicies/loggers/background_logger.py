"""Sends the rows of a run to an experiment tracker, in a thread that training does not wait for."""

from __future__ import annotations

import abc
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tfpolicies.algorithms.run_description import describe_run
from tfpolicies.base.type_aliases import Json
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.config.description import encode_settings
from tfpolicies.errors import UsageError
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.system.atomic import make_folder, write_atomically
from tfpolicies.system.machine_info import get_machine, get_versions
from tfpolicies.system.regular_files import read_regular

logger = logging.getLogger("tfpolicies")

FILES = ("learning_curve", "checkpoints", "export", "videos")
"""The files of a run folder that loggers can upload."""

_SEND_INTERVAL = 1.0  # seconds between two calls of a tracker; rows in between are sent together
_MAX_RETRY_INTERVAL = 60.0  # seconds
_MAX_PENDING_ROWS = 10_000  # rows kept while a tracker does not answer
_MAX_ID_BYTES = 1 << 16  # bytes of a file with the id of a tracker's run


class RunFacts(NamedTuple):
    """The facts about a run that a tracker records besides its rows."""

    name: str  # of the run folder, or of algorithm and environment
    settings: dict[str, Json]  # all of them, with algorithm, env and seed
    versions: dict[str, str]  # of packages
    machine: dict[str, Any]
    run_dir: Path | None
    stored: dict[str, str]  # by `Tracker.get_stored` of an earlier process


class LoggedRow(NamedTuple):
    """The numbers of an iteration, and when they were known."""

    time: float  # seconds since 1970
    numbers: dict[str, float]


class Tracker(abc.ABC):
    """A run of an experiment tracker; its constructor opens it. All methods may raise any error."""

    @abc.abstractmethod
    def get_stored(self) -> dict[str, str]:
        """Returns the ids of the run, so that a resumed run continues it."""

    @abc.abstractmethod
    def write(self, rows: Sequence[LoggedRow]) -> None:
        """Sends rows."""

    @abc.abstractmethod
    def upload(self, path: Path, name: str) -> None:
        """Sends a file or a folder under a name such as `checkpoints/latest`."""

    @abc.abstractmethod
    def close(self, ended_by: str) -> None:
        """Ends the run; see `DefaultCallbacks.on_run_end`."""


class BackgroundLogger(DefaultCallbacks):
    """Base class of loggers: sends rows to a `Tracker` in a thread.

    A tracker that fails is warned of once. Its rows are kept, and sent when it answers again; the
    end of the run says what could not be sent.

    Args:
        files: the files of the run folder to upload, of `FILES`: videos when they are recorded, the
            others at the end.
        close_seconds: seconds that the end of a run may wait for the tracker.

    Raises:
        UsageError: for other files, or without a number of seconds.
    """

    service: ClassVar[str]
    """The name of the tracker, for messages."""
    key: ClassVar[str]
    """The name of the file with the id of its run, in the folder `trackers` of the run."""

    def __init__(self, *, files: Collection[str] = (), close_seconds: float = 60.0) -> None:
        unknown = [name for name in files if name not in FILES]
        if unknown or isinstance(files, str):
            raise UsageError(f"files must be a list of {', '.join(FILES)}; got {files!r:.100}.")
        if not (isinstance(close_seconds, int | float) and 0 <= close_seconds < math.inf):
            raise UsageError(f"close_seconds must be a number >= 0, got {close_seconds!r:.100}.")
        self._files = tuple(files)
        self._close_seconds = close_seconds
        self._sender: _Sender | None = None

    @abc.abstractmethod
    def open_tracker(self, facts: RunFacts) -> Tracker:
        """Opens the tracker's run; called in the thread, again after an error."""

    def on_run_start(self, *, algorithm: Any, run_dir: Path | None) -> None:
        if self._files and run_dir is None:
            raise UsageError(
                f"{type(self).__name__} uploads {', '.join(self._files)}, which only a run with a "
                "folder has: learn(..., run_dir=...)."
            )
        self._sender = _Sender(self, self._make_facts(algorithm, run_dir), self._files)
        self._sender.start()

    def on_iteration_end(self, *, algorithm: Any, row: dict[str, float]) -> None:
        if self._sender is not None:
            self._sender.add(row)

    def on_run_end(self, *, algorithm: Any, run_dir: Path | None, ended_by: str) -> None:
        if self._sender is not None:
            self._sender.finish(ended_by, self._close_seconds)
            self._sender = None

    def _make_facts(self, algorithm: Any, run_dir: Path | None) -> RunFacts:
        description = describe_run(algorithm)
        facts = {key: description[key] for key in ("algorithm", "env", "seed")}
        name = f"{facts['algorithm']}-{facts['env']}" if run_dir is None else run_dir.name
        return RunFacts(
            name=name,
            settings={**encode_settings(algorithm.config.to_dict()), **facts},
            versions=get_versions(),
            machine=get_machine(),
            run_dir=run_dir,
            stored=_read_stored(run_dir, self.key),
        )


class _Sender(threading.Thread):
    """The thread that sends rows and files.

    Args:
        owner: opens the tracker.
        facts: of the run.
        files: the files to upload.
    """

    def __init__(self, owner: BackgroundLogger, facts: RunFacts, files: Sequence[str]) -> None:
        super().__init__(name=f"{owner.service} logger", daemon=True)
        self._owner = owner
        self._facts = facts
        self._files = files
        self._tracker: Tracker | None = None
        self._lock = threading.Lock()  # of the rows
        self._rows: deque[LoggedRow] = deque()
        self._num_dropped = 0
        self._uploaded: set[str] = set()
        self._ended = threading.Event()
        self._ended_by = ""
        self._error: Exception | None = None  # the last one
        self._has_warned = False

    def add(self, row: Mapping[str, float]) -> None:
        with self._lock:
            if len(self._rows) == _MAX_PENDING_ROWS:
                self._rows.popleft()
                self._num_dropped += 1
            self._rows.append(LoggedRow(time.time(), dict(row)))

    def finish(self, ended_by: str, seconds: float) -> None:
        """Sends the rest, at most for some seconds, and warns of rows that could not be sent."""
        self._ended_by = ended_by
        self._ended.set()
        self.join(seconds)
        with self._lock:
            num_lost = len(self._rows) + self._num_dropped
        files = [] if self._tracker is None else self._find_new_files(is_complete=True)
        lost = [f"{num_lost} iterations"] if num_lost else []
        lost += [name for name, _ in files]
        if not lost and not self.is_alive():
            return
        self._has_warned = True  # this says it
        reason = f": it did not answer within {seconds:g} s"
        if self._error is not None:
            reason = f": {_describe(self._error)}"
        kept = "They are lost."
        if self._facts.run_dir is not None:
            kept = f"They are in {self._facts.run_dir}."
        what = f"did not get {', '.join(lost)}" if lost else "did not end its run"
        logger.warning("%s %s%s. %s", self._owner.service, what, reason, kept if lost else "")

    def run(self) -> None:
        interval = _SEND_INTERVAL
        while True:
            is_last = self._ended.wait(interval)
            try:
                self._send(is_last=is_last)
            except Exception as error:  # a tracker's own errors have no common class
                self._error = error
                interval = min(2 * interval, _MAX_RETRY_INTERVAL)
                self._warn_once(error)
            else:
                self._error, interval = None, _SEND_INTERVAL
            if is_last:
                return

    def _send(self, *, is_last: bool) -> None:
        if self._tracker is None:
            self._tracker = self._owner.open_tracker(self._facts)
            _write_stored(self._facts.run_dir, self._owner.key, self._tracker.get_stored())
        with self._lock:
            rows, num_dropped = list(self._rows), self._num_dropped
        if rows:
            self._tracker.write(rows)
            with self._lock:  # some that were sent may have been dropped meanwhile
                num_dropped = min(self._num_dropped - num_dropped, len(rows))
                self._num_dropped -= num_dropped
                for _ in range(len(rows) - num_dropped):
                    self._rows.popleft()
        for name, path in self._find_new_files(is_complete=is_last):
            self._tracker.upload(path, name)
            self._uploaded.add(name)
        if is_last:
            self._tracker.close(self._ended_by)

    def _find_new_files(self, *, is_complete: bool) -> list[tuple[str, Path]]:
        """Returns the names and paths of files to upload; videos only until the run is complete."""
        if self._facts.run_dir is None or not self._files:
            return []
        run = RunFolder(self._facts.run_dir)
        files = [("videos", path) for path in sorted(run.videos.glob("*.*"))]
        if is_complete:
            files += [("checkpoints", run.latest), ("checkpoints", run.best)]
            files += [("learning_curve", run.learning_curve), ("export", run.export)]
        names = [(kind, str(path.relative_to(run.path)), path) for kind, path in files]
        return [
            (name, path)
            for kind, name, path in names
            if kind in self._files and name not in self._uploaded and _has_content(path)
        ]

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s does not take the numbers of this run: %s. Training continues; they are kept, "
                "and sent if it does later.",
                self._owner.service,
                _describe(error),
            )


def _has_content(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.200}".rstrip(" .:")


# -- the tracker's run of a run folder ----------------------------------------------------------


def _get_stored_path(run_dir: Path, key: str) -> Path:
    return RunFolder(run_dir).trackers / f"{key}.json"


def _read_stored(run_dir: Path | None, key: str) -> dict[str, str]:
    """Returns the ids that an earlier process stored; {} if there are none."""
    if run_dir is None:
        return {}
    path = _get_stored_path(run_dir, key)
    try:
        content = json.loads(read_regular(path, _MAX_ID_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read, so a new %s run begins: %s", path, key, error)
        return {}
    is_text = isinstance(content, dict) and all(isinstance(x, str) for x in content.values())
    return content if is_text else {}


def _write_stored(run_dir: Path | None, key: str, stored: Mapping[str, str]) -> None:
    if run_dir is not None:
        path = _get_stored_path(run_dir, key)
        make_folder(path.parent)
        write_atomically(path, json.dumps(dict(stored), indent=2).encode())
