"""The folder of a search: its layout, its description `tune.json`, and its results."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from tfpolicies.errors import CheckpointError, FolderInUseError, UsageError
from tfpolicies.reporting.run_folder import to_file_name
from tfpolicies.system.atomic import remove_leftovers, write_atomically
from tfpolicies.system.folder_lock import FolderLock
from tfpolicies.system.paths import resolve_path, shorten_path
from tfpolicies.system.regular_files import read_regular
from tfpolicies.tuning.ranges import make_label
from tfpolicies.tuning.study import TrialRow

_FORMAT, _FORMAT_VERSION = "tfpolicies-search", 1
_MAX_JSON_BYTES = 1 << 24
_BEFORE_DESCRIPTION = {"lock", "log.txt", "trials"}  # names left by a process that was killed


class SearchFolder:
    """Layout of the folder of a search, and the lock for writing to it.

    The folder is a search as soon as it has its `tune.json`::

        tune-ppo-CartPole-v1-2025-01-31-142501/
            tune.json       the space, the options and the settings of the search
            journal.log     the trials, in Optuna's format
            trials/         a run folder for each seed of each trial
            trials.csv      one row per finished trial
            best.json       the settings of the best trial, for `tfpolicies train --config`
            tuning.png      returns by trial, and the importance of each setting
            log.txt         warnings and tracebacks of the processes
            lock            the id of the process that writes to the folder

    Args:
        path: the folder; it may be missing.

    Attributes:
        path: absolute; the others are in it, and may be missing.
        tune_json: the description, which makes the folder a search.
        journal: the trials in Optuna's format.
        trials: the folder of the runs.
        trials_csv: one row per finished trial.
        best_json: the settings of the best trial.
        picture: returns by trial, and importances.
        log: of the processes that train.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = resolve_path(path)
        self.tune_json = self.path / "tune.json"
        self.journal = self.path / "journal.log"
        self.trials = self.path / "trials"
        self.trials_csv = self.path / "trials.csv"
        self.best_json = self.path / "best.json"
        self.picture = self.path / "tuning.png"
        self.log = self.path / "log.txt"
        self._lock: FolderLock | None = None

    @property
    def is_search(self) -> bool:
        return self.tune_json.exists()

    def acquire(self) -> SearchFolder:
        """Makes the folder if it is missing, and holds it; returns it, for a `with` statement.

        Raises:
            UsageError: if it holds something else than a search.
            FolderInUseError: if another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        names = {x.name for x in self.path.iterdir()}
        if not self.is_search and names - _BEFORE_DESCRIPTION:
            raise UsageError(
                f"{shorten_path(self.path)} is not the folder of a search, but holds "
                f"{sorted(names - _BEFORE_DESCRIPTION)[:3]}. Give one that is empty or does not "
                "exist yet."
            )
        try:
            self._lock = FolderLock(self.path)
        except FolderInUseError as error:
            raise FolderInUseError(
                f"The search {shorten_path(self.path)} is in use by {error.owner}. Wait until it "
                "has ended, or start another one.",
                error.owner,
            ) from error
        if self._lock.is_held:
            remove_leftovers(self.path)
        self.trials.mkdir(exist_ok=True)
        return self

    def __enter__(self) -> SearchFolder:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def read(self) -> dict[str, Any]:
        """Returns the content of `tune.json`.

        Raises:
            CheckpointError: if it is missing, damaged or of another format.
        """
        try:
            content = json.loads(read_regular(self.tune_json, _MAX_JSON_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{shorten_path(self.path)} is not the folder of a search: it has no tune.json. "
                "Give the folder that `tfpolicies tune` or `tune()` created."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{shorten_path(self.tune_json)} is damaged: {error}. Start a new search."
            ) from error
        is_search = isinstance(content, dict) and content.get("format") == _FORMAT
        if not is_search or content.get("format_version") != _FORMAT_VERSION:
            raise CheckpointError(
                f"{shorten_path(self.tune_json)} was not written by this version of tfpolicies. "
                "Start a new search."
            )
        return dict(content)

    def write(self, content: Mapping[str, Any]) -> None:
        """Replaces `tune.json`, atomically."""
        header = {"format": _FORMAT, "format_version": _FORMAT_VERSION}
        text = json.dumps({**header, **content}, indent=2) + "\n"
        write_atomically(self.tune_json, text.encode())

    def get_run_dir(self, number: int, seed: int) -> Path:
        """Returns the folder of a run.

        Args:
            number: of the trial.
            seed: of the run.
        """
        return self.trials / f"trial-{number:03}-seed-{seed}"

    def write_rows(self, rows: Sequence[TrialRow]) -> None:
        """Replaces `trials.csv`: number, state, returns, seconds and settings of each trial."""
        names = list(dict.fromkeys(name for row in rows for name in row.settings))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["trial", "state", "mean_return", "returns", "seconds", *names, "error"])
        for row in rows:
            settings = [make_label(row.settings[x]) if x in row.settings else "" for x in names]
            mean_return = "" if row.mean_return is None else repr(row.mean_return)
            returns = " ".join(map(repr, row.returns))
            cells = [row.number, row.state, mean_return, returns, f"{row.seconds:.1f}"]
            writer.writerow([*cells, *settings, row.error])
        write_atomically(self.trials_csv, text.getvalue().encode())


def make_search_name(algorithm: str, env: str, now: datetime | None = None) -> str:
    """Returns the name of a new folder.

    >>> make_search_name("PPO", "ALE/Pong-v5", datetime(2025, 1, 31, 14, 25, 1))
    'tune-ppo-ALE-Pong-v5-2025-01-31-142501'
    """
    return (
        f"{to_file_name(f'tune-{algorithm.lower()}-{env}')}-{now or datetime.now():%Y-%m-%d-%H%M%S}"
    )


def find_newest_search(parent: str | PathLike[str]) -> SearchFolder | None:
    """Returns the search in the folder `parent` that began last, or None."""
    paths = [path.parent for path in resolve_path(parent).glob("*/tune.json")]
    return SearchFolder(max(paths, key=_get_creation)) if paths else None


def _get_creation(path: Path) -> str:
    try:
        return str(SearchFolder(path).read().get("created", ""))
    except CheckpointError:
        return ""
