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


def test_a_new_run_is_named_after_its_date_and_time_and_holds_its_settings(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "runs", "ppo-CartPole-v1", {"seed": 3}, now=NOON)
    assert run.path == tmp_path / "runs" / "ppo-CartPole-v1-2025-01-31-120005"
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "events",
        "export",
        "lock",
        "run.json",
    ]
    assert RunFolder.open(run.path).path == run.path
    assert run.settings == {"seed": 3}
    assert run.creation_time == NOON


def test_a_run_made_in_the_same_second_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path, "ppo", {"seed": 1}, now=NOON)
    second = RunFolder.create(tmp_path, "ppo", {"seed": 2}, now=NOON)
    third = RunFolder.create(tmp_path, "ppo", {"seed": 3}, now=NOON)
    assert [second.path.name, third.path.name] == [
        "ppo-2025-01-31-120005-2",
        "ppo-2025-01-31-120005-3",
    ]
    assert first.settings == {"seed": 1}


@pytest.mark.parametrize(
    ("name", "folder"),
    [("ALE/Pong-v5", "ALE-Pong-v5"), ("../up", "up"), ("mod:Env v0", "mod-Env-v0")],
)
def test_a_name_never_leaves_its_parent_folder(tmp_path: Path, name: str, folder: str) -> None:
    run = RunFolder.create(tmp_path, name, now=NOON)
    assert run.path == tmp_path / f"{folder}-2025-01-31-120005"


def test_a_name_without_a_letter_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`name` must hold a letter"):
        RunFolder.create(tmp_path / "runs", "../..")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [object(), float("nan")])
def test_settings_that_json_cannot_hold_are_refused_and_nothing_is_made(
    tmp_path: Path, value: object
) -> None:
    with pytest.raises(UsageError, match="`settings` must be JSON values"):
        RunFolder.create(tmp_path / "runs", "ppo", {"value": value})
    assert list(tmp_path.iterdir()) == []


def test_settings_can_be_replaced_and_the_date_stays(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "ppo", {"target": 475}, now=NOON)
    run.write_settings({"target": 490})
    assert (run.settings, run.creation_time) == ({"target": 490}, NOON)
    with pytest.raises(UsageError, match="JSON"):
        run.write_settings({"target": {1, 2}})
    assert run.settings == {"target": 490}


def test_opening_says_why_a_path_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it does not exist"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"it has no run\.json"):
        RunFolder.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="it is a file"):
        RunFolder.open(tmp_path / "file")


def test_opening_the_folder_of_all_runs_names_the_newest_one(tmp_path: Path) -> None:
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
def test_a_foreign_or_damaged_run_json_is_refused(
    tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=reason):
        RunFolder.open(tmp_path)


def test_runs_are_found_newest_first_and_foreign_folders_are_passed_over(tmp_path: Path) -> None:
    older = RunFolder.create(tmp_path, "zeta", now=NOON)
    newer = RunFolder.create(tmp_path, "alpha", now=EVENING)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text("not ours")
    assert [run.path for run in find_runs(tmp_path)] == [newer.path, older.path]
    assert find_runs(tmp_path / "none") == []


# -- who writes ------------------------------------------------------------------------------------


def test_a_run_that_is_held_can_be_read_by_all_and_written_by_nobody_else(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "ppo", {"seed": 3}) as run:
        again = RunFolder.open(run.path)
        assert again.settings == {"seed": 3}
        with pytest.raises(FolderInUseError, match=rf"in use by process {os.getpid()}, which"):
            again.acquire()
    with again.acquire() as held:
        assert held.acquire() is again


def test_a_run_of_a_process_that_is_going_is_held_once_it_has_gone(tmp_path: Path) -> None:
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


def test_who_holds_a_run_removes_what_killed_writers_left(tmp_path: Path) -> None:
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


def test_the_newest_run_is_the_newest_one_with_a_whole_checkpoint(tmp_path: Path) -> None:
    older = RunFolder.create(tmp_path, "zeta", now=NOON)
    started = RunFolder.create(tmp_path, "alpha", now=EVENING)
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
