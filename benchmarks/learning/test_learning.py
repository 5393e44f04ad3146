"""The learning benchmark: what is run, what is filed, and what counts as passed."""

import json
import math
import re
import subprocess

import pytest

from benchmarks import RESULTS, ROOT
from benchmarks.learning import tables
from benchmarks.learning.cells import Runner, Table, commit_of, key_of, thinned
from benchmarks.learning.peer_settings import arguments, normalised
from benchmarks.learning.run_cells import estimate_minutes
from benchmarks.learning.tables import (
    PAGE,
    between,
    compare_with_source,
    count_failed,
    list_by_outcome,
    quartiles,
    verdict,
    verdicts,
    write,
)
from benchmarks.learning.tasks import TASKS, Cell, Task, cells

TASK = Task("SAC", "Pendulum-v1", 20_000, {"ours": 2, "sb3": 2, "sbx": 1})


DESCRIPTION = {"algorithm": TASK.algorithm, "env": TASK.env, "steps": TASK.steps}


def row(cell, mean, error=""):
    known = {"return_mean": mean, "error": error}
    return {**key_of(cell)._asdict(), **known}


# -- verdicts -------------------------------------------------------------------------------------


def test_the_median_reaches_the_lower_quartile_of_the_peer():
    peer = [100.0, 200.0, 300.0, 400.0, 500.0]
    assert quartiles(peer) == (200.0, 300.0, 400.0)
    assert verdict([200.0, 200.0, 200.0, 160.0, 900.0], peer).passed is True
    assert verdict([199.0, 199.0, 199.0, 160.0, 900.0], peer).passed is False
    assert verdict([90.0, 90.0, 90.0], [80.0, 100.0, 120.0]).passed is True  # the same with three
    assert verdict([89.0, 89.0, 300.0], [80.0, 100.0, 120.0]).passed is False


def test_no_more_of_our_seeds_may_fail():
    peer = [290.0, 300.0, 300.0, 300.0, 310.0]
    assert verdict([149.0, 310.0, 310.0, 310.0, 310.0], peer).passed is False
    assert verdict([150.0, 310.0, 310.0, 310.0, 310.0], peer).passed is True


def test_a_failed_seed_of_three_counts_as_one_of_five_does():
    result = verdict([1515.0, 2117.0, 37.6], [671.0, 1151.0, 1401.0])
    assert result.passed is False
    assert "failed seeds 1 of 3 against 0 of 3" in result.words


def test_shares_of_failed_seeds_are_compared_when_libraries_have_different_numbers():
    peer = [100.0, 300.0, 300.0]
    assert verdict([300.0, 300.0, 300.0, 300.0, 10.0], peer).passed is True  # 1 of 5 and 1 of 3
    assert verdict([300.0, 300.0, 300.0, 10.0, 10.0], peer).passed is False  # 2 of 5 and 1 of 3


def test_seeds_with_negative_returns_fail_below_twice_the_median():
    assert count_failed([-150.0, -299.0, -301.0], -150.0) == 1


def test_fewer_than_three_seeds_are_not_compared():
    assert verdict([1.0, 2.0, 3.0], [500.0]).passed is None
    assert compare_with_source([500.0, 500.0], 475.0).passed is None


def test_without_a_peer_the_return_of_the_source_counts():
    assert compare_with_source([474.0, 500.0, 500.0], 475.0).passed is True
    assert compare_with_source([474.0, 474.0, 500.0], 475.0).passed is False
    assert compare_with_source([474.0], None).passed is None


def test_without_a_peer_no_seed_may_fail():
    assert compare_with_source([200.0, 500.0, 500.0], 475.0).passed is False


def test_verdicts_count_the_finished_seeds():
    assert verdicts(TASK, {"ours": [], "sb3": [1.0, 1.0, 1.0], "sbx": []}) == {}
    results = verdicts(TASK, {"ours": [1.0, 1.0, 1.0], "sb3": [1.0, 1.0, 1.0], "sbx": []})
    assert {name: result.passed for name, result in results.items()} == {"sb3": True}


def test_the_page_shows_the_stored_results(tmp_path, monkeypatch):
    page = tmp_path / "learning.md"
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(tables, "PAGE", page)
    monkeypatch.setattr(tables, "FIGURE", tmp_path / "learning.png")
    write(Table(RESULTS))
    assert page.read_text() == PAGE.read_text()


def test_the_readme_counts_the_tasks_that_are_passed_and_missed():
    outcomes = list_by_outcome(Table(RESULTS))
    passed, missed = len(outcomes[True]), len(outcomes[False])
    text = " ".join((ROOT / "README.md").read_text().split())
    sentence = re.search(
        r"compares (\d+) tasks with [\w -]+: (\d+) are passed, (\d+) are missed", text
    )
    assert sentence, "the README does not say how many tasks are passed and missed"
    assert tuple(map(int, sentence.groups())) == (passed + missed, passed, missed)


# -- cells ----------------------------------------------------------------------------------------


def test_libraries_take_turns():
    results = [(cell.library, cell.seed) for cell in cells([TASK])]
    assert results == [("sb3", 1), ("sbx", 1), ("ours", 1), ("ours", 2), ("sb3", 2)]


def test_short_tasks_have_five_seeds():
    finished = Table(RESULTS).finished()
    minutes = {task.name: [0.0] for task in TASKS}
    for key, cell in finished.items():
        if key.task in minutes:
            minutes[key.task].append(float(cell["cpu_seconds"]) / 60)
    long = {task.name for task in TASKS if max(minutes[task.name]) >= 30}
    few = {task.name for task in TASKS if min(task.seeds.values()) < 5}
    assert few - long == set()


def test_a_missing_cell_is_expected_to_take_as_long_as_the_finished_ones(tmp_path):
    table = Table(tmp_path)
    for seed, seconds in ((1, 60), (2, 180)):
        cell = Cell(TASK, "ours", seed)
        table.add({**row(cell, 5.0), **DESCRIPTION, "cpu_seconds": seconds}, [])
    other = Cell(Task("PPO", "CartPole-v1", 100_000, {}), "ours", 1)
    missing = [Cell(TASK, "ours", 3), Cell(TASK, "sb3", 1), other]
    assert list(estimate_minutes(missing, table).values()) == [2.0, 2.0, math.inf]


def test_each_task_has_a_name_of_its_own():
    assert len({task.name for task in TASKS}) == len(TASKS)


def test_a_finished_cell_is_known_by_its_settings(tmp_path):
    table, cell = Table(tmp_path), Cell(TASK, "ours", 1)
    table.add(row(cell, 5.0), [(10, 1.0), (20, 2.0)])
    changed = Cell(Task("SAC", "Pendulum-v1", 20_000, {}, changes={"gamma": 0.5}), "ours", 1)
    assert key_of(cell) in table.finished()
    assert key_of(changed) not in table.finished()
    assert table.curve_rows()[key_of(cell)] == [(10.0, 1.0), (20.0, 2.0)]


def test_the_peers_own_weights_make_another_cell():
    own = Task("SAC", "Pendulum-v1", 20_000, {"sb3": 1}, own_weights=True)
    assert own.settings() == TASK.settings()
    assert own.digest() != TASK.digest()


def test_a_failed_cell_is_not_finished_and_its_next_row_counts(tmp_path):
    table, cell = Table(tmp_path), Cell(TASK, "ours", 1)
    table.add(row(cell, "", "ValueError"), [])
    assert table.finished() == {}
    assert table.rows()[key_of(cell)]["error"] == "ValueError"
    table.add(row(cell, 5.0), [])
    assert table.finished()[key_of(cell)]["return_mean"] == "5.0"


def test_a_cell_that_fails_is_filed_with_its_last_words_and_does_not_end_the_others(tmp_path):
    table, lines = Table(tmp_path), []
    interpreters = {"ours": tmp_path / "missing", "sb3": tmp_path / "missing"}
    runner = Runner(table, interpreters, tmp_path / "work", lines.append)
    two = [Cell(TASK, "ours", 1), Cell(TASK, "sb3", 1)]
    assert runner.run(two, at_once=2) == 2
    assert {row["error"].split("]")[0] for row in table.rows().values()} == {"[Errno 2"}
    assert len(lines) == 4


def test_a_curve_is_thinned_and_keeps_its_last_point():
    curve = [(float(i), float("nan") if i < 10 else i / 2) for i in range(110)]
    result = thinned(curve, points=50)
    assert len(result) == 50
    assert result[-1] == (109.0, 54.5)
    assert thinned(curve[:12], points=50) == [(10.0, 5.0), (11.0, 5.5)]


def test_code_that_is_not_that_of_the_commit_is_marked(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    (tmp_path / "tfpolicies").mkdir()
    code = tmp_path / "tfpolicies" / "code.py"
    code.write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "notes.txt").write_text("not code")
    assert not commit_of(tmp_path).endswith("-dirty")
    code.write_text("2\n")
    assert commit_of(tmp_path).endswith("-dirty")


def test_lines_between_markers_are_replaced():
    text = "top\n<!-- a -->\nx\n<!-- end of a -->\nlast\n"
    assert between(text, "a", ["1", "2"]) == "top\n<!-- a -->\n1\n2\n<!-- end of a -->\nlast\n"


# -- what peers are told --------------------------------------------------------------------------


def _lists(value):
    if isinstance(value, dict):
        return {name: _lists(each) for name, each in value.items()}
    return list(map(_lists, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_settings_travel_as_json(task):
    assert json.loads(json.dumps(task.settings())) == _lists(task.settings())
    if set(task.seeds) - {"ours"}:
        peer_arguments = arguments(task.algorithm, task.settings(), task.steps)
        assert json.loads(json.dumps(peer_arguments))["gamma"] == task.settings().get("gamma")


def test_a_peer_gets_the_settings_in_its_own_words():
    settings = {
        "lr": 1e-3,
        "gamma": 0.98,
        "tau": 1.0,
        "grad_clip": 10.0,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 4,
        "train_batch_size": 32,
        "training_intensity": 8.0,
        "target_network_update_freq": 250,
        "num_steps_sampled_before_learning_starts": 100,
        "replay_buffer_config": {"type": "MultiAgentReplayBuffer", "capacity": 500},
        "exploration_config": {
            "type": "EpsilonGreedy",
            "initial_epsilon": 1.0,
            "final_epsilon": 0.1,
            "epsilon_timesteps": 200,
        },
        "model": {"fcnet_hiddens": [8], "fcnet_activation": "relu"},
    }
    peer_arguments = arguments("DQN", settings, 1000)
    assert peer_arguments["gradient_steps"] == 2  # 8 rows sampled, 64 trained, 32 each
    assert peer_arguments["exploration_fraction"] == 0.2
    network = {"net_arch": [8], "activation_fn": "relu", "optimizer_kwargs": {"eps": 1e-8}}
    assert peer_arguments["policy_kwargs"] == network
    assert normalised(settings) == {}
    assert normalised({"observation_filter": "MeanStdFilter"}) == {
        "norm_obs": True,
        "norm_reward": False,
    }
