"""Searches with real processes, in an environment whose return is a setting."""

import csv
import json
import threading

import pytest

from helpers.searches import paying_config
from tfpolicies import DQNConfig, tune
from tfpolicies.analysis.run_record import read_run
from tfpolicies.errors import ConfigError, FolderInUseError, UnpicklableError, UsageError
from tfpolicies.tuning import choice, uniform
from tfpolicies.tuning.search_folder import SearchFolder

pytest.importorskip("optuna")

REWARDS = {"env_config.reward": choice([2.0, 3.0, 5.0, 7.0])}
QUICK = {"steps": 64, "eval_episodes": 2, "progress": False}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The result of a search of 6 trials with 2 seeds each."""
    folder = tmp_path_factory.mktemp("search") / "rewards"
    return tune(paying_config(), REWARDS, trials=6, seeds=2, seed=3, folder=folder, **QUICK)


def test_the_result_of_a_trial_is_the_mean_return_of_its_seeds(searched):
    start, *others = searched.trials
    assert (start.settings, start.mean_return, start.returns) == ({}, 1.0, (1.0, 1.0))
    for row in others:
        if row.state == "complete":
            reward = row.settings["env_config.reward"]
            assert row.returns == (reward, reward)
            assert row.mean_return == reward
    best = max(row.settings["env_config.reward"] for row in others if row.returns)
    assert searched.best_return == best
    assert searched.best_settings == {"env_config": {"reward": best}}


def test_each_seed_of_a_trial_is_a_run_with_its_evaluations(searched):
    row = max(searched.trials, key=lambda row: row.mean_return or 0.0)
    assert [folder.name[-7:] for folder in row.folders] == ["-seed-3", "-seed-4"]
    for seed, folder in zip((3, 4), row.folders, strict=True):
        record = read_run(folder)
        assert (record.algorithm, record.seed) == ("PPO", seed)
        assert record.config["env_config"] == {"reward": row.mean_return}
        assert record.get_column("env_steps")[-1] == 64
        assert set(record.get_evaluation_returns()) == {row.mean_return}
        assert record.folder.has_checkpoint


def test_the_files_of_a_search_say_the_same_as_the_result(searched):
    with open(searched.trials_csv) as file:
        lines = list(csv.DictReader(file))
    assert [line["state"] for line in lines] == [row.state for row in searched.trials]
    assert lines[1]["env_config.reward"] == str(searched.trials[1].settings["env_config.reward"])
    best = json.loads(searched.best_json.read_text())
    assert best["env_config"] == {"reward": searched.best_return}
    assert best["train_batch_size"] == 16
    assert "seed" not in best
    assert "env" not in best
    config = paying_config().update_from_dict(best)
    assert config.env_config["reward"] == searched.best_return
    assert searched.picture.read_bytes().startswith(b"\x89PNG")


def test_a_search_continues_in_its_folder(searched):
    again = tune(
        paying_config(), REWARDS, trials=7, seeds=2, seed=3, folder=searched.folder, **QUICK
    )
    assert again.trials[:6] == searched.trials
    assert len(again.trials) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 65}, r"steps \(there 64, here 65\)"),
        ({"config": paying_config(gamma=0.5)}, r"gamma \(there 0.99, here 0.5\)"),
        ({"space": {"gamma": uniform(0.0, 1.0)}}, "space"),
    ],
)
def test_another_search_in_the_folder_is_refused(searched, changes, message):
    arguments = {"config": paying_config(), "space": REWARDS, **QUICK, **changes}
    before = (searched.folder / "tune.json").read_bytes()
    with pytest.raises(UsageError, match=f"holds another search: {message}"):
        tune(**arguments, seeds=2, seed=3, folder=searched.folder)
    assert (searched.folder / "tune.json").read_bytes() == before


@pytest.mark.release
def test_trials_that_were_running_when_the_process_was_killed_run_again(searched, tmp_path):
    """Removes the result of the last trial from the journal, as if it were running."""
    folder = SearchFolder(tmp_path / "copy")
    folder.trials.mkdir(parents=True)
    folder.tune_json.write_bytes((searched.folder / "tune.json").read_bytes())
    lines = (searched.folder / "journal.log").read_bytes().splitlines(keepends=True)
    begun = [number for number, line in enumerate(lines) if b'"op_code":4' in line]
    last = next(
        number
        for number, line in enumerate(lines)
        if number > begun[4] and b"user_attr" in line and b'"number":4' in line
    )
    folder.journal.write_bytes(b"".join(lines[:last]))
    (folder.trials / "trial-004-seed-3").mkdir()
    (folder.trials / "trial-004-seed-3" / "leftover").touch()
    again = tune(paying_config(), REWARDS, trials=5, seeds=2, seed=3, folder=folder.path, **QUICK)
    states = [(row.number, row.state, row.settings, row.returns) for row in again.trials]
    before = [(row.number, row.state, row.settings, row.returns) for row in searched.trials[:5]]
    assert states == before
    assert not (folder.trials / "trial-004-seed-3" / "leftover").exists()


@pytest.mark.release
def test_runs_that_fail_count_as_the_worst_and_two_jobs_share_the_trials(tmp_path):
    space = {
        "env_config.fails": choice([True, False]),
        "env_config.reward": choice([2.0, 3.0]),
        "sgd_minibatch_size": choice([8, 16, 32]),
    }
    options = {"trials": 8, "jobs": 2, "folder": tmp_path / "mixed", **QUICK}
    result = tune(paying_config(), space, **options)
    failed = [row for row in result.trials if row.state == "failed"]
    assert failed
    for row in failed:
        assert row.settings["env_config.fails"] is True
        assert "it broke" in row.error
        assert row.mean_return is None
        assert "it broke" in (row.folders[0] / "error.txt").read_text()
    assert result.best_settings["env_config"]["fails"] is False
    for row in result.trials:
        assert row.settings.get("sgd_minibatch_size", 16) <= 16  # the train batch
        assert (row.repairs != ()) == any("becomes 16" in text for text in row.repairs)


@pytest.mark.release
def test_a_search_ends_at_its_target(tmp_path):
    result = tune(paying_config(), REWARDS, until=1.0, folder=tmp_path / "short", **QUICK)
    assert [row.number for row in result.trials] == [0]


@pytest.mark.release
def test_a_search_in_which_all_trials_fail_ends_early(tmp_path):
    config = paying_config(env_config={"fails": True}, disable_env_checking=True)
    with pytest.raises(
        ConfigError, match=r"The first 5 trials failed, the last one by: .*it broke"
    ):
        tune(config, REWARDS, folder=tmp_path / "broken", **QUICK)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"trials": 0}, UsageError, "trials must be a whole number, 1 or more, got 0"),
        ({"jobs": 1.5}, UsageError, "jobs must be"),
        ({"seed": -1}, UsageError, "seed must be"),
        ({"until": float("nan")}, UsageError, "until must be"),
        ({"space": {"lr": 1e-3}}, ConfigError, "needs a range"),
        ({"config": "PPO"}, UsageError, "tune takes a config"),
        ({"config": DQNConfig()}, ConfigError, "needs an environment"),
    ],
)
def test_an_invalid_argument_is_an_error_before_anything_starts(
    tmp_path, arguments, error, message
):
    config = arguments.pop("config", None) or paying_config()
    with pytest.raises(error, match=message):
        tune(config, **{"space": REWARDS, "folder": tmp_path / "none", **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_cannot_be_sent_is_an_error(tmp_path):
    config = paying_config(env_config={"lock": threading.Lock()})
    with pytest.raises(UnpicklableError, match="cannot be sent to the processes"):
        tune(config, REWARDS, folder=tmp_path / "none", **QUICK)


def test_a_folder_with_other_files_or_in_use_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="is not the folder of a search"):
        tune(paying_config(), REWARDS, folder=tmp_path, **QUICK)
    with SearchFolder(tmp_path / "held").acquire(), pytest.raises(FolderInUseError):
        tune(paying_config(), REWARDS, folder=tmp_path / "held", **QUICK)


def test_a_config_that_cannot_be_built_is_an_error_that_leaves_no_folder(tmp_path):
    config = paying_config(sgd_minibatch_size=64)
    with pytest.raises(ConfigError, match="sgd_minibatch_size"):
        tune(config, REWARDS, folder=tmp_path / "none", **QUICK)
    assert list(tmp_path.iterdir()) == []
