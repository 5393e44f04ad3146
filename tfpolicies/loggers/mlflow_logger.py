"""Logs runs to MLflow."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from tfpolicies.algorithms.run_description import flatten_settings
from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import MissingPackageError
from tfpolicies.loggers.background_logger import BackgroundLogger, LoggedRow, RunFacts, Tracker
from tfpolicies.reporting.progress_row import select_known_numbers
from tfpolicies.system.installed_distributions import get_install_command

if TYPE_CHECKING:
    from mlflow.entities import Metric

_CONNECT_SECONDS = 5.0  # seconds to reach the server; MLflow itself would retry for minutes
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # of one request
_MAX_PARAM_LENGTH = 500  # characters, for all servers
_OTHER_CHARACTERS = re.compile(r"[^\w.\- /]", re.ASCII)
_STATUS = {"signal": "KILLED", "error": "FAILED"}
_PORTS = {"http": 80, "https": 443}
_T = TypeVar("_T")


class MLflowLogger(BackgroundLogger):
    """Logs runs to an MLflow server, or to a folder or database.

    All settings become parameters, and the columns of `progress.csv` metrics, whose step is the
    number of environment steps. Versions and machine are tags. If `learn` has a `run_dir`, a
    resumed run continues its MLflow run; steps that it repeats appear twice.

    Args:
        experiment: the name of the experiment, which is created if missing; None: that of
            `MLFLOW_EXPERIMENT_NAME`, or MLflow's "Default".
        tracking_uri: of the server, such as `"http://localhost:5000"`; None: MLflow's setting, from
            `MLFLOW_TRACKING_URI` or `mlflow.set_tracking_uri`.
        run_name: the name of the run; None: that of the run folder.
        tags: more tags.
        files: artifacts to upload: "learning_curve", "checkpoints", "export" and "videos".
        close_seconds: seconds that the end of a run may wait for the server.

    Raises:
        MissingPackageError: if MLflow is not installed.
    """

    service, key = "MLflow", "mlflow"

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        files: Collection[str] = (),
        close_seconds: float = 60.0,
    ) -> None:
        super().__init__(files=files, close_seconds=close_seconds)
        if find_spec("mlflow") is None:
            raise MissingPackageError(
                "MLflowLogger needs the package mlflow. Install it: "
                f"{get_install_command('mlflow')}"
            )
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._run_name = run_name
        self._tags = dict(tags or {})

    def open_tracker(self, facts: RunFacts) -> Tracker:
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        uri = self._tracking_uri or mlflow.get_tracking_uri()
        experiment = self._experiment or MLFLOW_EXPERIMENT_NAME.get() or "Default"
        name = self._run_name or facts.name
        return _MLflowRun(uri, experiment, name, facts, self._tags)


class _MLflowRun(Tracker):
    """A run of MLflow, by its client; the active run of `mlflow.start_run` is not touched."""

    def __init__(
        self, uri: str, experiment: str, name: str, facts: RunFacts, tags: Mapping[str, str]
    ) -> None:
        from mlflow import MlflowClient

        self._uri = uri
        _require_reachable(uri)
        self._client = MlflowClient(uri)
        self._tags = {**_make_tags(facts), **tags}
        self._settings = facts.settings  # not yet sent
        run_id = self._find_run(facts.stored)
        if run_id is None:
            experiment_id = self._get_experiment_id(experiment)
            run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
        else:
            self._settings = {}  # a parameter never changes
            self._client.update_run(run_id, status="RUNNING")
        self._run_id: str = run_id

    def _find_run(self, stored: Mapping[str, str]) -> str | None:
        """Returns the id of the run that an earlier process opened, unless it was deleted."""
        from mlflow.exceptions import MlflowException

        if stored.get("tracking_uri") != self._uri or "run_id" not in stored:
            return None
        try:
            info = self._client.get_run(stored["run_id"]).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return stored["run_id"] if info.lifecycle_stage == "active" else None

    def _get_experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(name))

    def _send_facts(self) -> None:
        from mlflow.entities import Param, RunTag

        params = [
            Param(_clean(key), _to_text(value)[:_MAX_PARAM_LENGTH])
            for key, value in flatten_settings(self._settings)
        ]
        for chunk in _split(params, _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=chunk)
        run_tags = [RunTag(_clean(key), str(value)) for key, value in self._tags.items()]
        self._client.log_batch(self._run_id, tags=run_tags)
        self._settings, self._tags = {}, {}

    def get_stored(self) -> dict[str, str]:
        return {"tracking_uri": self._uri, "run_id": self._run_id}

    def write(self, rows: Sequence[LoggedRow]) -> None:
        _require_reachable(self._uri)
        if self._tags:
            self._send_facts()
        metrics = [metric for row in rows for metric in _make_metrics(row)]
        for chunk in _split(metrics, _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=chunk)

    def upload(self, path: Path, name: str) -> None:
        _require_reachable(self._uri)
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), name)
        else:
            folder = str(Path(name).parent)
            self._client.log_artifact(self._run_id, str(path), None if folder == "." else folder)

    def close(self, ended_by: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS.get(ended_by, "FINISHED"))


def _split(items: list[_T], size: int) -> Iterator[list[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _require_reachable(uri: str) -> None:
    """Raises an `OSError` if the server of a tracking URI does not accept connections."""
    parts = urlsplit(uri)
    port = parts.port or _PORTS.get(parts.scheme)
    if parts.hostname is not None and port is not None:
        socket.create_connection((parts.hostname, port), _CONNECT_SECONDS).close()


def _make_metrics(row: LoggedRow) -> list[Metric]:
    from mlflow.entities import Metric

    timestamp, step = round(1000 * row.time), int(row.numbers["env_steps"])
    numbers = select_known_numbers(row.numbers)
    return [Metric(_clean(name), value, timestamp, step) for name, value in numbers.items()]


def _make_tags(facts: RunFacts) -> dict[str, Any]:
    versions = {f"version.{name}": version for name, version in facts.versions.items()}
    machine = {f"machine.{name}": _to_text(value) for name, value in facts.machine.items()}
    return {**versions, **machine}


def _to_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _clean(name: str) -> str:
    """Replaces characters that MLflow does not accept in names.

    >>> _clean("learner/agent#1/kl")
    'learner/agent_1/kl'
    """
    return _OTHER_CHARACTERS.sub("_", name)
