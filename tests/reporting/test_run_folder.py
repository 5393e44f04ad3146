"""Folders of runs: names, settings, locks, and the newest run."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from tfpolicies.errors import CheckpointError, FolderInUseError, UsageError
from tfpolicies.reporting.run_folder import RunFolder, find_newest_run, find_runs

NOON = datetime(2025, 1, 31, 12, 0, 5)
EVENING = datetime(2025, 1, 31, 19, 30, 0)


def test_a_new_run_is_named_after_its_time_and_holds_settings(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "runs", "ppo-CartPole-v1", {"seed": 3}, now=NOON)
    assert run.path == tmp_path / "runs" / "ppo-CartPole-v1-2025-01-31-120005"
    names = {path.name for path in run.path.iterdir()}
    assert names == {"checkpoints", "events", "export", "lock", "run.json"}
    assert RunFolder.open(run.path).path == run.path
    assert run.settings == {"seed": 3}
    run.write_settings({"seed": 4})
    assert (run.settings, run.creation_time) == ({"seed": 4}, NOON)
    with pytest.raises(UsageError, match="JSON"):
        run.write_settings({"seed": {1, 2}})
    assert run.settings == {"seed": 4}


def test_a_run_made_in_the_same_second_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    runs = [RunFolder.create(tmp_path, "ppo", {"seed": seed}, now=NOON) for seed in (1, 2, 3)]
    names = [f"ppo-2025-01-31-120005{end}" for end in ("", "-2", "-3")]
    assert [run.path.name for run in runs] == names
    assert runs[0].settings == {"seed": 1}


@pytest.mark.parametrize(
    ("name", "folder"),
    [("ALE/Pong-v5", "ALE-Pong-v5"), ("../up", "up"), ("mod:Env v0", "mod-Env-v0")],
)
def test_a_name_never_leaves_its_parent_folder(tmp_path: Path, name: str, folder: str) -> None:
    run = RunFolder.create(tmp_path, name, now=NOON)
    assert run.path == tmp_path / f"{folder}-2025-01-31-120005"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("../..", 1, "`name` must hold a letter"),
        ("ppo", object(), "`settings` must be JSON values"),
        ("ppo", float("nan"), "`settings` must be JSON values"),
    ],
)
def test_wrong_names_and_settings_are_refused_and_nothing_is_made(tmp_path, name, value, words):
    with pytest.raises(UsageError, match=words):
        RunFolder.create(tmp_path / "runs", name, {"value": value})
    assert list(tmp_path.iterdir()) == []


def test_opening_another_path_gives_the_reason_and_the_newest_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it does not exist"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"it has no run\.json"):
        RunFolder.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="it is a file"):
        RunFolder.open(tmp_path / "file")
    RunFolder.create(tmp_path, "zeta", now=NOON)
    RunFolder.create(tmp_path, "alpha", now=EVENING)
    with pytest.raises(CheckpointError, match=r"newest runs are \['.*alpha-2025-01-31-193000'"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is damaged"),
        ("[]", "was not written by"),
        (json.dumps({"format": "other"}), "was not written by"),
        (json.dumps({"format": "tfpolicies-run", "format_version": 99}), "format version 99"),
    ],
)
def test_a_foreign_or_damaged_run_json_is_refused(tmp_path, content, reason):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=reason):
        RunFolder.open(tmp_path)


def test_only_one_process_writes_to_a_run_and_all_read_it(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "ppo", {"seed": 3}) as run:
        other = RunFolder.open(run.path)
        assert other.settings == {"seed": 3}
        with pytest.raises(FolderInUseError, match=rf"in use by process {os.getpid()}, which"):
            other.acquire()
    with other.acquire() as acquired:
        assert acquired.acquire() is other


def test_a_run_is_acquired_once_the_process_that_holds_it_has_ended(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "ppo").release()
    (path,) = tmp_path.iterdir()
    code = (
        "import sys, time\nfrom tfpolicies.reporting.run_folder import RunFolder\n"
        "with RunFolder.open(sys.argv[1]).acquire():\n    print(flush=True)\n    time.sleep(0.5)"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with RunFolder.open(path).acquire():
            assert other.wait() == 0


def test_acquiring_a_run_removes_half_written_files_of_killed_writers(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "ppo")
    run.release()
    (run.checkpoints / "latest").mkdir()
    (run.checkpoints / "latest" / ".algorithm.json.0123abcd.tfp-tmp").write_text("half")
    (run.export / ".export.0123abcd.tfp-tmp" / "saved_model").mkdir(parents=True)
    (run.path / ".progress.csv.89abcdef.tfp-tmp").write_text("half")
    (run.path / "notes.tfp-tmp").write_text("of the user")
    run.acquire().release()
    left = [str(path.relative_to(run.path)) for path in run.path.rglob("*tfp-tmp*")]
    assert left == ["notes.tfp-tmp"]


def test_runs_are_listed_newest_first_and_the_newest_has_a_whole_checkpoint(tmp_path: Path) -> None:
    older = RunFolder.create(tmp_path, "zeta", now=NOON)
    started = RunFolder.create(tmp_path, "alpha", now=EVENING)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text("not ours")
    assert [run.path for run in find_runs(tmp_path)] == [started.path, older.path]
    assert find_runs(tmp_path / "none") == []
    assert find_newest_run(tmp_path) is None
    for run in (older, started):
        run.latest.mkdir()
        (run.latest / "extra-0123456789abcdef.h5").write_bytes(b"arrays come first")
    (older.latest / "algorithm.json").write_text("{}")
    assert find_newest_run(tmp_path).path == older.path
    (started.latest / "algorithm.json").write_text("{}")
    assert find_newest_run(tmp_path).path == started.path


@pytest.mark.parametrize("change", [{"settings": None}, {"created": "once"}, {"created": 5}])
def test_a_run_json_without_its_parts_is_refused(tmp_path, change):
    run = RunFolder.create(tmp_path, "ppo", {"steps": 1})
    run.release()
    content = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**content, **change}))
    assert find_runs(tmp_path) == []
    with pytest.raises(CheckpointError, match="is damaged: its creation time"):
        _ = RunFolder.open(run.path).settings
