"""Runs read back from their folders."""

import json
import math

import numpy as np
import pytest

from helpers.picklable import Callbacks
from helpers.quick_configs import Corridor, quick_config
from tfpolicies import DQNConfig
from tfpolicies.analysis.run_record import read_run
from tfpolicies.errors import CheckpointError
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.system.machine_info import get_machine, get_versions


def test_a_run_of_a_script_is_described_by_the_settings_that_differ(tmp_path):
    config = quick_config(env="CartPole-v1", gamma=0.9).debugging(seed=7)
    algorithm = config.build()
    algorithm.learn(2 * config.train_batch_size, run_dir=tmp_path / "run", progress=False)
    algorithm.stop()
    record = read_run(tmp_path / "run")
    assert (record.name, record.algorithm, record.env, record.seed) == (
        "run",
        "PPO",
        "CartPole-v1",
        7,
    )
    assert record.config["gamma"] == 0.9
    assert record.config["model"] == {"fcnet_hiddens": [4]}
    assert "lambda" not in record.config
    assert "env" not in record.config
    assert record.num_iterations == 2
    np.testing.assert_array_equal(record.get_column("iteration"), [1, 2])
    np.testing.assert_array_equal(record.get_returns(), record.columns["recent_returns/mean"])
    assert np.isnan(record.get_evaluation_returns()).all()
    assert np.isnan(record.get_column("missing")).all()
    assert (record.ended_by, record.error) == ("steps", None)
    [place] = record.places
    assert place["versions"] == get_versions()
    assert place["machine"]["cores"] == get_machine()["cores"]


def test_another_version_is_added_to_the_places_and_the_same_one_is_not(tmp_path):
    run = RunFolder.create_at(tmp_path / "run", {"learn": "PPO"})
    facts = {"algorithm": "PPO", "env": None, "seed": 1, "config": {}}
    for version in ("1", "1", "2", "1"):
        run.describe(facts, {"tfpolicies": version}, {"cores": 2})
    run.write_settings({"learn": "PPO", "finished": "steps"})
    run.release()
    record = read_run(run.path)
    assert [place["versions"] for place in record.places] == [
        {"tfpolicies": "1"},
        {"tfpolicies": "2"},
    ]
    assert record.ended_by == "steps"
    assert (record.num_iterations, record.columns) == (0, {})


def test_values_without_json_are_shown_by_their_import_path_and_long_ones_by_their_length(tmp_path):
    weights = list(range(5000))
    env_config = {"length": 4, "weights": weights}
    config = quick_config(DQNConfig, Corridor, env_config=env_config)
    algorithm = config.callbacks(Callbacks).build()
    algorithm.learn(4, run_dir=tmp_path, progress=False)
    algorithm.stop()
    config = read_run(tmp_path).config
    assert config["callbacks"] == {"$import": "helpers.picklable:Callbacks"}
    assert config["env_config"].endswith(
        f"({len(json.dumps({'length': 4, 'weights': weights})):,} characters)"
    )


def test_a_run_of_an_earlier_version_is_read_as_far_as_it_goes(tmp_path):
    command = {"env": "CartPole-v1", "algo": "PPO", "seed": 3, "lr": None}
    run = RunFolder.create_at(tmp_path / "run", {"train": command, "finished": "target"})
    run.release()
    record = read_run(run.path)
    assert (record.algorithm, record.env, record.seed) == ("PPO", "CartPole-v1", 3)
    assert (record.command, record.config, record.places) == (command, {}, ())
    assert record.ended_by == "target"


@pytest.mark.parametrize(
    "description", [5, {"places": 3, "algorithm": 4, "config": [], "seed": "x"}]
)
def test_a_strange_description_is_ignored(tmp_path, description):
    run = RunFolder.create_at(tmp_path / "run", {"learn": "PPO"})
    run.release()
    content = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**content, "description": description}))
    record = read_run(run.path)
    assert (record.seed, record.config, record.places) == (None, {}, ())


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run folder: it has no run"):
        read_run(tmp_path)


def test_the_error_that_ended_a_run_is_read(tmp_path):
    run = RunFolder.create_at(tmp_path / "run", {"learn": "PPO"})
    run.error_txt.write_text("Traceback ...\nValueError: no")
    run.release()
    assert read_run(run.path).error == "Traceback ...\nValueError: no"
    assert math.isfinite(read_run(run.path).created.timestamp())


def test_a_script_that_fails_leaves_its_error_until_the_run_continues(tmp_path):
    def fail(algorithm, result):
        raise ZeroDivisionError("the wheel came off")

    config = quick_config(env="CartPole-v1").debugging(seed=1)
    algorithm, batch = config.build(), config.train_batch_size
    with pytest.raises(ZeroDivisionError):
        algorithm.learn(3 * batch, run_dir=tmp_path, progress=False, callbacks=fail)
    algorithm.stop()
    record = read_run(tmp_path)
    assert record.error.endswith("ZeroDivisionError: the wheel came off\n")
    assert record.ended_by is None
    algorithm = config.build()
    algorithm.learn(3 * batch, run_dir=tmp_path, progress=False)
    algorithm.stop()
    record = read_run(tmp_path)
    assert (record.error, record.ended_by, record.num_iterations) == (None, "steps", 3)
