"""Trials of a search in Optuna's journal, with hand-made returns."""

import math
from pathlib import Path

import pytest

from tfpolicies.errors import CheckpointError, MissingPackageError
from tfpolicies.tuning import choice, int_uniform, log_uniform, uniform
from tfpolicies.tuning.search_space import SearchSpace
from tfpolicies.tuning.study import COMPLETE, FAILED, PRUNED, Study, TrialRow

pytest.importorskip("optuna")

SPACE = SearchSpace.from_mapping(
    {"x": uniform(0.0, 1.0), "lr": log_uniform(1e-5, 1e-2), "net": choice([[4], [8]])}
)


def make_study(folder: Path, seed: int = 0, space: SearchSpace = SPACE) -> Study:
    return Study(folder / "journal.log", space, seed, num_evaluations=6)


def finish(study, number, folder, mean_return, state=COMPLETE, settings=()):
    returns = () if mean_return is None else (mean_return,)
    row = TrialRow(number, state, mean_return, returns, dict(settings), 1.0, "", (), ())
    study.finish(row, folder)


def run(study, folder, count, score=lambda values: values["x"]):
    """Runs trials up to a number; returns their values."""
    result = []
    while study.num_trials < count:
        number, values = study.begin()
        result.append(values)
        finish(study, number, folder, score(values) if values else 0.0, settings=values)
    return result


def test_trial_0_has_no_values_and_others_have_one_of_each_range(tmp_path):
    first, *others = run(make_study(tmp_path), tmp_path, 4)
    assert first == {}
    for values in others:
        assert 0 <= values["x"] <= 1
        assert 1e-5 <= values["lr"] <= 1e-2
        assert values["net"] in ([4], [8])


def test_a_seed_gives_the_same_trials_in_one_process_or_two(tmp_path):
    folders = [tmp_path / name for name in ("whole", "halves", "other")]
    for folder in folders:
        folder.mkdir()
    whole = run(make_study(folders[0]), folders[0], 24)
    halves = run(make_study(folders[1]), folders[1], 13)
    halves += run(make_study(folders[1]), folders[1], 24)
    assert whole == halves
    assert run(make_study(folders[2], seed=1), folders[2], 24) != whole


def test_later_trials_are_better_than_the_first(tmp_path):
    rows = run(make_study(tmp_path), tmp_path, 60)
    assert sum(x["x"] for x in rows[40:]) / 20 > sum(x["x"] for x in rows[1:11]) / 10 + 0.1


def test_unfinished_trials_keep_their_values(tmp_path):
    study = make_study(tmp_path)
    run(study, tmp_path, 3)
    number, values = study.begin()
    assert study.get_unfinished() == [3]
    again = make_study(tmp_path)
    assert again.get_unfinished() == [3]
    assert again.reopen(3) == values
    again.report(3, 1, 0.5)
    third = make_study(tmp_path)
    assert third.reopen(3) == values
    third.report(3, 1, 0.5)  # as the process before did
    finish(third, number, tmp_path, 0.5)
    assert third.get_unfinished() == []


def test_a_trial_below_the_median_of_five_others_is_pruned(tmp_path):
    study = make_study(tmp_path)
    for mean_return in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0):  # trial 0, and five others
        number, _ = study.begin()
        for evaluation in range(1, 7):
            assert not study.report(number, evaluation, mean_return)
        finish(study, number, tmp_path, mean_return)
    number, _ = study.begin()
    assert [study.report(number, k, 2.9) for k in (1, 2, 3)] == [False, False, True]
    finish(study, number, tmp_path, None, PRUNED)
    number, _ = study.begin()
    assert [study.report(number, k, 3.0) for k in (1, 2, 3, 4)] == [False] * 4
    assert not study.report(number, 5, 1.0)  # the best one so far counts
    assert not study.report(number, 6, math.nan)


def test_trial_0_is_not_pruned(tmp_path):
    study = make_study(tmp_path)
    assert study.begin()[0] == 0
    assert not any(study.report(0, k, -1e9) for k in range(1, 7))


def test_settings_that_fail_are_avoided(tmp_path):
    space = SearchSpace.from_mapping({"kind": choice(["good", "bad"]), "x": uniform(0.0, 1.0)})
    study = make_study(tmp_path, space=space)
    kinds = []
    while study.num_trials < 60:
        number, values = study.begin()
        kinds.append(values.get("kind"))
        failed = kinds[-1] == "bad"
        state = FAILED if failed else COMPLETE
        finish(study, number, tmp_path, None if failed else 1.0, state)
    assert kinds[30:].count("bad") < kinds[30:].count("good") / 2


def test_rows_are_read_back(tmp_path):
    study = make_study(tmp_path)
    study.begin()
    study.begin()
    folders = (tmp_path / "trials" / "a", tmp_path / "trials" / "b")
    settings = {"model.fcnet_hiddens": [4], "grad_clip": math.inf, "net": None}
    row = TrialRow(1, COMPLETE, 2.0, (1.0, 3.0), settings, 4.5, "", ("note",), folders)
    study.finish(row, tmp_path)
    assert make_study(tmp_path).read_rows(tmp_path) == [row]


def test_the_setting_that_decides_is_the_most_important(tmp_path):
    study = make_study(tmp_path)
    run(study, tmp_path, 8)
    assert study.compute_importances() == {}  # trial 0 does not count
    run(study, tmp_path, 40)
    importances = study.compute_importances()
    assert next(iter(importances)) == "x"
    assert importances["x"] > 0.5
    assert sum(importances.values()) == pytest.approx(1.0)


def test_without_differences_nothing_is_important(tmp_path):
    study = make_study(tmp_path)
    run(study, tmp_path, 20, score=lambda values: 1.0)
    assert study.compute_importances() == {}


def test_a_line_that_a_killed_process_left_is_removed(tmp_path):
    run(make_study(tmp_path), tmp_path, 3)
    with open(tmp_path / "journal.log", "ab") as file:
        file.write(b'{"op_code": 4, "worker')
    study = make_study(tmp_path)
    assert study.num_trials == 3
    run(study, tmp_path, 5)
    assert make_study(tmp_path).num_trials == 5


@pytest.mark.parametrize("content", [b"no json\n", b"[1]\n", b'{"op_code": 77}\n'])
def test_a_damaged_journal_is_an_error(tmp_path, content):
    (tmp_path / "journal.log").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        make_study(tmp_path)


def test_whole_numbers_are_sampled_as_such(tmp_path):
    space = SearchSpace.from_mapping({"n": int_uniform(2, 3)})
    values = run(make_study(tmp_path, space=space), tmp_path, 12, score=lambda x: 1.0)
    assert {x["n"] for x in values[1:]} == {2, 3}


def test_without_optuna_the_error_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tfpolicies\[tune\]'"):
        make_study(tmp_path)
