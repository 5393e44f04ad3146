"""Runs are logged to a real MLflow server on this machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from helpers.workers import make_callbacks, make_small_config
from tfpolicies import MLflowLogger, PGConfig
from tfpolicies.cli import main
from tfpolicies.errors import MissingPackageError
from tfpolicies.loggers import mlflow_logger
from tfpolicies.reporting.progress_csv import read_progress

pytestmark = [
    pytest.mark.loggers,
    pytest.mark.usefixtures("kept_programs"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of MLflow's packages
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BATCH = 32  # steps of an iteration
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "loggers.md"


def find_free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """An MLflow server of a folder, which can be stopped and started again."""

    def __init__(self, folder):
        self._folder = folder
        self._port = find_free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process = None

    def start(self):
        words = ["server", "--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        words += ["--backend-store-uri", f"sqlite:///{self._folder / 'runs.sqlite'}"]
        words += ["--artifacts-destination", str(self._folder / "artifacts")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                assert self._process.poll() is None
                time.sleep(0.1)

    def stop(self):
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server):
    from mlflow import MlflowClient

    return MlflowClient(server.uri)


def build(**settings):
    config = make_small_config("CartPole-v1", PGConfig, seed=5)
    config.rollouts(rollout_fragment_length=8, batch_mode="truncate_episodes")
    return config.update_from_dict({"log_level": "WARN", **settings}).build()


def learn(algorithm, iterations, logger, run_dir=None):
    return algorithm.learn(iterations * BATCH, progress=False, callbacks=[logger], run_dir=run_dir)


def find_runs(client, experiment):
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def list_artifacts(client, run_id, path=None):
    names = []
    for file in client.list_artifacts(run_id, path):
        names += list_artifacts(client, run_id, file.path) if file.is_dir else [file.path]
    return names


def test_a_run_has_settings_metrics_by_step_versions_and_files(server, client, tmp_path):
    files = ["learning_curve", "checkpoints"]
    logger = MLflowLogger("all", tracking_uri=server.uri, tags={"team": "a"}, files=files)
    learn(build(lr=0.25), 3, logger, tmp_path / "mine")
    (run,) = find_runs(client, "all")
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    params, tags = run.data.params, run.data.tags
    names = ("algorithm", "env", "lr", "gamma", "model.fcnet_hiddens", "seed")
    assert [params[name] for name in names] == ["PG", "CartPole-v1", "0.25", "0.99", "[4]", "5"]
    assert tags["team"] == "a"
    assert tags["version.tensorflow"].startswith("2.")
    assert int(tags["machine.cores"]) >= 1
    rows = read_progress(tmp_path / "mine" / "progress.csv")
    for name in ("iteration", "learner/default_policy/policy_loss"):
        history = client.get_metric_history(run.info.run_id, name)
        logged = {metric.step: metric.value for metric in history}
        assert logged == pytest.approx({row["env_steps"]: row[name] for row in rows})
    artifacts = list_artifacts(client, run.info.run_id)
    assert {"learning_curve.png", "checkpoints/latest/algorithm.json"} <= set(artifacts)


def test_a_resumed_run_continues_its_mlflow_run_unless_it_was_deleted(server, client, tmp_path):
    for iterations in (1, 2):
        learn(build(), iterations, MLflowLogger("resumed", tracking_uri=server.uri), tmp_path)
    (run,) = find_runs(client, "resumed")
    history = client.get_metric_history(run.info.run_id, "iteration")
    assert [metric.value for metric in history] == [1, 2]
    client.delete_run(run.info.run_id)
    learn(build(), 3, MLflowLogger("resumed", tracking_uri=server.uri), tmp_path)
    (new_run,) = find_runs(client, "resumed")
    assert new_run.info.run_id != run.info.run_id
    assert new_run.data.metrics["iteration"] == 3


def test_a_run_that_fails_or_is_interrupted_says_so(server, client):
    for error, status in ((ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")):

        def fail(algorithm, result, error=error):
            raise error

        logger = MLflowLogger(status, tracking_uri=server.uri)
        with pytest.raises(error):
            build().learn(BATCH, progress=False, callbacks=[logger, fail])
        (run,) = find_runs(client, status)
        assert run.info.status == status


def test_a_nan_of_the_learner_is_a_metric_and_other_characters_are_replaced(server, client):
    def replace(algorithm, result):
        result["info"]["learner"]["default_policy"]["learner_stats"]["mean#é"] = float("nan")

    logger = MLflowLogger("nan", tracking_uri=server.uri)
    learn(build(callbacks=make_callbacks(on_train_result=replace)), 1, logger)
    (run,) = find_runs(client, "nan")
    assert str(run.data.metrics["learner/default_policy/mean__"]) == "nan"


def test_a_server_that_goes_and_comes_back_gets_all_rows(tmp_path, monkeypatch, caplog):
    from mlflow import MlflowClient

    monkeypatch.setattr("tfpolicies.loggers.background_logger._SEND_INTERVAL", 0.05)
    monkeypatch.setattr("tfpolicies.loggers.background_logger._MAX_RETRY_INTERVAL", 0.1)
    server = Server(tmp_path)
    logger = MLflowLogger("away", tracking_uri=server.uri)

    def interrupt(algorithm, result):
        if algorithm.iteration == 2:
            server.start()

    build().learn(4 * BATCH, progress=False, callbacks=[logger, interrupt])
    try:
        (run,) = find_runs(MlflowClient(server.uri), "away")
        history = MlflowClient(server.uri).get_metric_history(run.info.run_id, "iteration")
        assert [metric.value for metric in history] == [1, 2, 3, 4]
    finally:
        server.stop()
    messages = [x.getMessage() for x in caplog.records if x.name == "tfpolicies"]
    assert [x for x in messages if x.startswith("MLflow does not take")][1:] == []


def test_the_command_logs_to_mlflow_and_resumes(server, client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "command")
    words = ["train", "CartPole-v1", "--algo", "PG", "--num-envs", "2", "--logger", "mlflow"]
    for setting in (f"train_batch_size={BATCH}", "rollout_fragment_length=8", "inference=tf"):
        words += ["--set", setting]
    words += ["--set", "model.fcnet_hiddens=[4]", "--set", "jit_compile=False"]
    assert main([*words, "--steps", str(2 * BATCH)]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "run.json").read_text())["settings"]["train"]["logger"] == [
        "mlflow"
    ]
    assert main(["train", "--resume", str(folder), "--steps", str(20 * BATCH)]) == 0
    (run,) = find_runs(client, "command")
    assert (run.info.run_name, run.info.status) == (folder.name, "FINISHED")
    history = client.get_metric_history(run.info.run_id, "iteration")
    iterations = [row["iteration"] for row in read_progress(folder / "progress.csv")]
    assert [metric.value for metric in history] == iterations


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    from mlflow import MlflowClient

    (run,) = find_runs(MlflowClient("sqlite:///mlflow.db"), "cartpole")
    assert run.data.metrics["env_steps"] >= 5_000
    assert (tmp_path / "runs" / "wandb" / "trackers" / "wandb.json").exists()


def test_a_missing_package_is_said_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(mlflow_logger, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tfpolicies\[mlflow\]'"):
        MLflowLogger()
