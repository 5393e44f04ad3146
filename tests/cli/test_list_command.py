"""`tfpolicies list`: algorithms, environments and tuned settings."""

import json
import subprocess
import sys

import pytest

from tfpolicies.algorithms.algorithm_registry import get_algorithm_names
from tfpolicies.algorithms.capabilities import ACTIONS, read_capabilities
from tfpolicies.algorithms.tuned_hyperparameters_table import TUNED
from tfpolicies.cli import main


def list_json(capsys, *words):
    assert main(["list", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.core
def test_algorithms_are_listed_with_what_they_take(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", "algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [*ACTIONS, "masks", "memory", "agents"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:11]}
    assert list(rows) == get_algorithm_names()
    assert rows["PPO"] == ["yes"] * 6 + ["several"]
    assert rows["DQN"] == ["yes", "-", "-", "-", "yes", "-", "several"]
    assert rows["TD3"] == ["-", "-", "yes", "-", "-", "-", "several"]
    assert "Schulman et al. 2017" in "\n".join(lines)


def test_algorithms_as_json(capsys):
    records = list_json(capsys, "algorithms", "--algo", "SAC")
    assert records == {"SAC": read_capabilities()["SAC"].to_json()}
    assert records["SAC"]["actions"] == ["discrete", "continuous"]


@pytest.mark.core
def test_environments_are_filtered_by_a_part_of_their_names(capsys):
    groups = list_json(capsys, "environments", "--filter", "CARTpole")
    names = {name for group in groups for name in group["names"]}
    assert {"CartPole-v0", "CartPole-v1"} <= names
    assert all("cartpole" in name.lower() for name in names)


def test_long_groups_are_cut_unless_a_filter_is_given(capsys):
    assert main(["list", "environments"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "CartPole-v1" in output
    assert "MinAtar/Breakout-v1" in output
    assert "more: --filter PART" in output
    assert main(["list", "environments", "--filter", "pettingzoo:"]) == 0
    output = capsys.readouterr().out
    assert "more" not in output
    assert "pettingzoo:sisl/waterworld_v4" in output or "pettingzoo:sisl/" in output


def test_tuned_settings_are_listed(capsys):
    words = ["list", "tuned", "--algo", "SAC", "--filter", "cheetah-v5"]
    assert main(words) == 0
    output = capsys.readouterr().out
    for text in (
        "HalfCheetah-v5",
        "1,000,000 steps",
        "train_batch_size",
        "Unlike the source: actor and critics",
    ):
        assert text in output
    assert main(["list", "tuned"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(TUNED)


def test_tuned_settings_as_json_are_valid_json(capsys):
    records = list_json(capsys, "tuned")
    assert len(records) == len(TUNED)
    entry = next(x for x in records if (x["algorithm"], x["environment"]) == ("DQN", "CartPole-v1"))
    assert (entry["steps"], entry["threshold"]) == (50_000, 500.0)


def test_without_a_subject_there_is_an_overview(capsys):
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    for text in ("PPO", "Gymnasium, classic control", "tfpolicies list tuned", "environments"):
        assert text in output
    assert set(list_json(capsys)) == {"algorithms", "environments", "tuned"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["environments", "--filter", "nothing of this name"], "No environment has 'nothing"),
        (["algorithms", "--filter", "ZZ"], "No algorithm has 'ZZ' in its name; there are PPO"),
        (["tuned", "--filter", "nothing"], "an environment with 'nothing' in its name"),
        (["environments", "--algo", "PPO"], "--algo is for `list algorithms`"),
        (["algorithm"], "Did you mean 'algorithms'?"),
    ],
)
def test_a_list_without_entries_is_an_error(capsys, words, message):
    assert main(["list", *words]) == 2
    assert message in capsys.readouterr().err


def test_lists_need_no_tensorflow():
    code = (
        "import sys; from tfpolicies.cli import main;"
        "status = main(['list']); sys.exit(status or 'tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


MINE = """
from tfpolicies import PG

class MINE(PG):
    \"\"\"An algorithm of another package.\"\"\"
"""


@pytest.mark.soak
def test_an_algorithm_of_another_package_is_listed_by_building_it(tmp_path, monkeypatch, capsys):
    info = tmp_path / "other_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tfpolicies.algorithms]\nMINE = other_module")
    (tmp_path / "other_module.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    records = list_json(capsys, "algorithms", "--filter", "mine")
    assert records == {
        "MINE": {
            **read_capabilities()["PG"].to_json(),
            "summary": "An algorithm of another package.",
        }
    }
