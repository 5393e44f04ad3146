"""The learning benchmark: what is run, what is filed, and what counts as passed."""

import json
import subprocess

import pytest

from benchmarks.learning.cells import Runner, Table, commit_of, key_of, thinned
from benchmarks.learning.peer_settings import arguments, normalised
from benchmarks.learning.tables import alone, between, failures, quartiles, verdict, verdicts
from benchmarks.learning.tasks import TASKS, Cell, Task, cells

TASK = Task("SAC", "Pendulum-v1", 20_000, {"ours": 2, "sb3": 2, "sbx": 1})


def row(cell, mean, error=""):
    known = {"return_mean": mean, "error": error}
    return {**key_of(cell)._asdict(), **known}


# -- verdicts -------------------------------------------------------------------------------------


def test_with_five_seeds_the_median_reaches_the_lower_quartile():
    peer = [100.0, 200.0, 300.0, 400.0, 500.0]
    assert quartiles(peer) == (200.0, 300.0, 400.0)
    assert verdict([200.0, 200.0, 200.0, 160.0, 900.0], peer).passed is True
    assert verdict([199.0, 199.0, 199.0, 160.0, 900.0], peer).passed is False


def test_with_five_seeds_no_more_of_ours_may_fail():
    peer = [290.0, 300.0, 300.0, 300.0, 310.0]
    assert verdict([149.0, 310.0, 310.0, 310.0, 310.0], peer).passed is False
    assert verdict([150.0, 310.0, 310.0, 310.0, 310.0], peer).passed is True


def test_seeds_with_negative_returns_fail_below_twice_the_median():
    assert failures([-150.0, -299.0, -301.0], -150.0) == 1


def test_with_three_seeds_half_the_range_of_the_peer_is_allowed():
    peer = [80.0, 100.0, 120.0]
    assert verdict([80.0, 80.0, 80.0], peer).passed is True
    assert verdict([79.0, 79.0, 300.0], peer).passed is False


def test_fewer_seeds_are_stated():
    assert verdict([1.0, 2.0, 3.0], [500.0]).passed is None


def test_without_a_peer_the_threshold_of_the_source_counts():
    assert alone([474.0, 500.0, 500.0], 475.0).passed is True
    assert alone([474.0], 475.0).passed is False
    assert alone([474.0], None).passed is None


def test_a_peer_has_no_verdict_before_all_cells_are_finished():
    assert verdicts(TASK, {"ours": [1.0], "sb3": [1.0, 2.0]}) == {}
    assert set(verdicts(TASK, {"ours": [1.0, 1.0], "sb3": [1.0], "sbx": [1.0]})) == {"sbx"}


# -- cells ----------------------------------------------------------------------------------------


def test_libraries_take_turns():
    results = [(cell.library, cell.seed) for cell in cells([TASK])]
    assert results == [("sb3", 1), ("sbx", 1), ("ours", 1), ("ours", 2), ("sb3", 2)]


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
