"""`tfpolicies doctor`: the causes that keep a run from learning."""

import json

import numpy as np
import pytest

from helpers.made_runs import NUM_ROWS, make_run
from helpers.processes import run_python
from helpers.quick_configs import quick_config
from tfpolicies.cli import main
from tfpolicies.reporting.run_folder import RunFolder

GROWING = np.linspace(20.0, 450.0, NUM_ROWS)


@pytest.mark.parametrize("width", [80, 120])
def test_causes_are_listed_with_evidence_advice_and_figures(width, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    run = make_run(tmp_path / "run", {"gamma": 0.5}, length=200)
    assert main(["doctor", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "1 cause was found."
    assert lines[3] == "1. gamma is too small for the episodes"
    assert lines[4].startswith("   gamma=0.5 looks 1 / (1 - gamma) = 2 steps ahead")
    assert "learning rate                  0.001" in [line.rstrip() for line in lines]
    assert all(len(line) <= width for line in lines[1:])
    assert all(line == line.rstrip() for line in lines[3:7])


def test_a_run_that_learns_ends_with_0(tmp_path, capsys):
    run = make_run(tmp_path / "run", returns=GROWING)
    assert main(["doctor", str(run)]) == 0
    assert "Nothing was found that keeps this run from learning." in capsys.readouterr().out


def test_the_newest_run_of_a_folder_is_used_also_without_a_checkpoint(tmp_path, capsys):
    make_run(tmp_path / "old", returns=GROWING)
    run_json = tmp_path / "old" / "run.json"
    content = json.loads(run_json.read_text())
    run_json.write_text(json.dumps({**content, "created": "2020-01-01T00:00:00"}))
    make_run(tmp_path / "new", returns=GROWING, has_checkpoint=False)
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["run"] == "new"
    assert [cause["name"] for cause in content["causes"]] == ["no_checkpoint"]


def test_a_run_that_trains_says_so(tmp_path, capsys):
    path = make_run(tmp_path / "run", returns=GROWING)
    with RunFolder.open(path).acquire():
        assert main(["doctor", str(path)]) == 0
    assert "It is training now." in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "{", '{"format": "other"}'])
def test_damaged_folders_are_errors_in_words(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert main(["doctor", str(tmp_path)]) == 2
    assert "run" in capsys.readouterr().err


def test_a_run_with_a_checkpoint_needs_no_tensorflow(tmp_path):
    """Its settings are those of the checkpoint."""
    algorithm = quick_config(env="CartPole-v1", gamma=0.5).build()
    algorithm.learn(64, run_dir=tmp_path / "run", progress=False)
    algorithm.stop()
    code = "import sys; from tfpolicies import diagnose; diagnose(sys.argv[1]);"
    run_python(code + "assert 'tensorflow' not in sys.modules", tmp_path / "run")
