"""Reads run folders for comparison and diagnosis; does not need TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import CheckpointError
from tfpolicies.reporting.progress_csv import read_progress_columns
from tfpolicies.reporting.progress_row import EVALUATION_MEAN, RECENT_PREFIX
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.system.regular_files import read_regular

_MAX_ERROR_BYTES = 1 << 20
_RECENT_MEAN = f"{RECENT_PREFIX}mean"


@dataclass(frozen=True, kw_only=True, eq=False)
class RunRecord:
    """A run as its folder describes it, at the time of reading; see `read_run`.

    Attributes:
        folder: of the run.
        created: the time at which it began.
        algorithm: a name such as `"PPO"`, or `"module:Class"`; "" if unknown.
        env: the name of the environment; None without one, or if unknown.
        seed: of all random numbers; None if it was not set, or is unknown.
        config: the settings that differ from the algorithm's defaults, as JSON values; see
            `describe_run`.
        command: the options of `tfpolicies train`; empty for a run of a script.
        places: the versions and machines that it used, in order:
            `{"started": time, "versions": {...}, "machine": {...}}`.
        columns: the numbers of each iteration by column of `progress.csv`, float64
            `[iterations]`, NaN where a cell is empty.
        ended_by: "target" or "steps" if the run reached its goal, "callback" if one ended it, else
            None.
        error: the traceback of the last error that ended the training, or None.
        commit: that was checked out in the folder where the run was started last, or None.
    """

    folder: RunFolder
    created: datetime
    algorithm: str
    env: str | None
    seed: int | None
    config: Mapping[str, Json]
    command: Mapping[str, Json]
    places: tuple[Mapping[str, Any], ...]
    columns: Mapping[str, np.ndarray]
    ended_by: str | None
    error: str | None
    commit: str | None = None

    def __repr__(self) -> str:
        return f"RunRecord({str(self.folder.path)!r}, {self.num_iterations} iterations)"

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.path.name

    @property
    def num_iterations(self) -> int:
        return len(self.columns.get("iteration", ()))

    def get_column(self, name: str) -> np.ndarray:
        """Returns a column of `progress.csv`, float64 `[iterations]`; NaNs if there is none."""
        return self.columns.get(name, np.full(self.num_iterations, np.nan))

    def get_returns(self) -> np.ndarray:
        """Returns the mean return of recent training episodes, float64 `[iterations]`."""
        name = _RECENT_MEAN if _RECENT_MEAN in self.columns else "episode_reward_mean"
        return self.get_column(name)

    def get_evaluation_returns(self) -> np.ndarray:
        """Returns the mean return of each iteration's evaluation, float64 `[iterations]`.

        It is NaN in iterations without an evaluation.
        """
        return self.get_column(EVALUATION_MEAN)


def read_run(path: str | PathLike[str]) -> RunRecord:
    """Reads a run folder, also of a run that is training or was killed.

    Args:
        path: the folder.

    Raises:
        CheckpointError: if it is not a run folder, or its `run.json` or `progress.csv` is damaged.
    """
    folder = RunFolder.open(path)
    settings, description = folder.settings, folder.description
    command = _get_dict(settings, "train")
    algorithm = description.get("algorithm") or command.get("algo") or settings.get("learn")
    env = description.get("env", command.get("env"))
    seed = description.get("seed", command.get("seed"))
    places = description.get("places")
    places = places if isinstance(places, list) else []
    ended_by, commit = settings.get("finished"), description.get("commit")
    return RunRecord(
        folder=folder,
        created=folder.creation_time,
        algorithm=algorithm if isinstance(algorithm, str) else "",
        env=env if isinstance(env, str) else None,
        seed=seed if isinstance(seed, int) else None,
        config=_get_dict(description, "config"),
        command=command,
        places=tuple(place for place in places if isinstance(place, dict)),
        columns=read_progress_columns(folder.progress_csv),
        ended_by=ended_by if isinstance(ended_by, str) else None,
        error=_read_error(folder.error_txt),
        commit=commit if isinstance(commit, str) else None,
    )


def _get_dict(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    return dict(value) if isinstance(value, dict) else {}


def _read_error(path: Path) -> str | None:
    if not os.path.lexists(path):
        return None
    try:
        return read_regular(path, _MAX_ERROR_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}. Move it away.") from error
