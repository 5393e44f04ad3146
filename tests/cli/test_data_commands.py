"""`tfpolicies data`: statistics, faults and pictures of recorded experience, and recording it."""

import json
import math

import numpy as np
import pandas as pd
import pyarrow
import pytest
from pyarrow import parquet

from tfpolicies.cli import main
from tfpolicies.cli.data_statistics import ComponentStats, EpisodeStats, Reservoir
from tfpolicies.offline.open_data import open_data
from tfpolicies.offline.parquet_writer import write_table

pytestmark = pytest.mark.usefixtures("kept_programs")

COLUMNS = {"obs": ["heat", "load"], "actions": "valve", "rewards": "gain", "eps_id": "day"}
MAPPING = json.dumps({**COLUMNS, "t": "minute"})


def make_log(**changes):
    """A log of three days with 4, 3 and 5 steps."""
    lengths = [4, 3, 5]
    rows = sum(lengths)
    log = {
        "day": np.repeat(["mon", "tue", "wed"], lengths),
        "minute": np.concatenate([np.arange(n) * 10 for n in lengths]),
        "heat": np.linspace(10.0, 21.0, rows),
        "load": np.tile([0.25, 0.75], rows // 2),
        "valve": np.arange(rows) % 3,
        "gain": np.repeat([1.0, 2.0, -1.0], lengths),
    }
    return {**log, **changes}


def write_log(path, **changes):
    """Writes a log without pandas, which would turn NaN into missing values."""
    parquet.write_table(pyarrow.table(make_log(**changes)), path)
    return str(path)


def show(succeed, *words):
    return json.loads(succeed(["data", "show", *map(str, words), "--json"]))


# -- data show ------------------------------------------------------------------------------------


@pytest.mark.core
def test_rows_episodes_and_columns_of_a_log_are_shown(tmp_path, succeed):
    path = write_log(tmp_path / "log.parquet")
    report = show(succeed, path, "--columns", MAPPING)
    assert report["rows"] == 12
    episodes = report["episodes"]
    assert (episodes["count"], episodes["cut_off"], episodes["terminated"]) == (3, 3, 0)
    assert episodes["lengths"]["min"] == 3
    assert episodes["lengths"]["mean"] == 4
    returns = np.array([4.0, 6.0, -5.0])
    assert episodes["returns"]["mean"] == pytest.approx(returns.mean())
    assert episodes["returns"]["std"] == pytest.approx(returns.std())
    assert report["actions"]["actions"]["shares"] == pytest.approx(
        {"0": 1 / 3, "1": 1 / 3, "2": 1 / 3}
    )
    assert report["observations"]["obs"]["min"] == pytest.approx([10.0, 0.25])
    assert report["columns"]["day"] == {
        "dtype": "text",
        "shape": [],
        "min": None,
        "mean": None,
        "max": None,
        "not_finite": 0,
    }
    assert report["missing_columns"]["BC"] == []
    assert report["missing_columns"]["MARWIL"] == ["terminateds"]
    assert report["problems"] == []


@pytest.mark.core
def test_the_tables_name_the_columns_of_the_log(tmp_path, succeed):
    path, png = write_log(tmp_path / "log.parquet"), tmp_path / "log.png"
    shown = succeed(["data", "show", path, "--columns", MAPPING, "--to", str(png)])
    for text in ("12 rows in 1 file", "Discrete(3), inferred", "3: 100.0% cut off", "No faults"):
        assert text in shown
    words = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert words["heat"][0] == "10"
    assert words["MARWIL"] == ["needs", "terminateds"]
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert png.stat().st_size > 10_000


def test_boxes_show_how_often_actions_are_at_their_bounds(tmp_path, succeed):
    path = write_log(tmp_path / "log.parquet", valve=np.array([-1.0, 1, 0] + [0.5] * 9))
    report = show(succeed, path, "--columns", MAPPING)
    assert report["actions"]["actions"]["share_at_bounds"] == pytest.approx([2 / 12])
    wider = ["--action-space", "Box(-2, 2, (1,))"]
    report = show(succeed, path, "--columns", MAPPING, *wider)
    assert report["actions"]["actions"]["share_at_bounds"] == [0.0]
    assert report["action_space"]["text"] == "Box(-2.0, 2.0, (1,), float32)"


FAULTS = {
    "counts from 1": (
        {"valve": np.arange(12) % 3 + 1},
        "Give --set 'action_space=Discrete(3, start=1)'",
    ),
    "lacks a column": (
        {"load": None},
        "columns['obs'] names 'load', which the table does not have",
    ),
    "is not a number": (
        {"heat": np.array([10.0] * 5 + [math.nan] + [11.0] * 6)},
        "obs[0] is nan in row 5 of",
    ),
    "is out of order": (
        {"minute": np.array([0, 10, 20, 30, 0, 20, 10, *range(5)])},
        "t is 10 in row 6 of",
    ),
    "has missing values": (
        {"heat": [10.0] * 5 + [None] + [11.0] * 6},
        "Column 'heat' must have a value in each row, but row 5 of",
    ),
    "has no whole number": (
        {"valve": np.array([0, 1, 2.5] * 4)},
        "actions must have numbers of int64",
    ),
}


def write_fault(path, changes):
    log = make_log(**changes)
    if log.get("load") is None:
        del log["load"]
    parquet.write_table(pyarrow.table(log), path)
    return str(path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_data_show_and_by_train(name, tmp_path, here, refuse, capsys):
    changes, message = FAULTS[name]
    path = write_fault(tmp_path / "log.parquet", changes)
    spaces = ["Discrete(3)"] if name == "has no whole number" else []
    stated = [word for space in spaces for word in ("--action-space", space)]
    assert main(["data", "show", path, "--columns", MAPPING, *stated]) == 1
    shown = capsys.readouterr().out
    assert message in shown
    assert "\n1 fault\n" in shown
    mapping = json.dumps({**json.loads(MAPPING), "terminateds": "ended"})
    if name != "lacks a column":
        log = {**make_log(**changes), "ended": np.zeros(12, bool)}
        parquet.write_table(pyarrow.table(log), path)
    stated = [word for space in spaces for word in ("--set", f"action_space={space}")]
    words = ["train", "--algo", "MARWIL", "--data", path, "--columns", mapping, *stated]
    assert message in refuse([*words, "--seed", "1"])
    assert not (here / "runs").exists()


def test_all_faults_of_a_log_are_named_at_once(tmp_path, capsys):
    changes = {key: x for name in FAULTS for key, x in FAULTS[name][0].items()}
    changes["heat"] = FAULTS["is not a number"][0]["heat"]
    changes["valve"] = FAULTS["counts from 1"][0]["valve"]
    changes["wind"] = changes["heat"]
    path = write_fault(tmp_path / "log.parquet", changes)
    mapping = json.dumps(
        {"obs": ["heat"], "new_obs": ["load"], **json.loads(MAPPING) | {"obs": ["heat"]}}
    )
    assert main(["data", "show", path, "--columns", mapping, "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert len(problems) == 4
    for name in ("counts from 1", "is not a number", "is out of order"):
        assert sum(FAULTS[name][1] in problem for problem in problems) == 1
    assert any("columns['new_obs'] names 'load'" in problem for problem in problems)


def test_the_order_of_rows_does_not_stop_an_algorithm_that_needs_none(tmp_path, here, succeed):
    path = write_fault(tmp_path / "log.parquet", FAULTS["is out of order"][0])
    shown = succeed(["train", "--data", path, "--columns", MAPPING, "--steps", "24", "--seed", "1"])
    assert "t is 10 in row 6" in shown
    assert "This algorithm does not need the order." in shown


@pytest.mark.core
def test_episodes_that_alternate_in_json_lines_are_told_apart(tmp_path, succeed):
    line = {"type": "SampleBatch", "obs": [[0.0], [1.0]] * 2, "actions": [0, 1, 0, 1]}
    line |= {"rewards": [1.0, 10.0, 2.0, 20.0], "eps_id": [7, 8, 7, 8], "t": [0, 0, 1, 1]}
    more = {**line, "rewards": [3.0, 30.0, 4.0, 40.0], "t": [2, 2, 3, 3]}
    ends = [{"terminateds": [False] * 4, "truncateds": [False] * 4}]
    ends += [{"terminateds": [False] * 2 + [True, False], "truncateds": [False] * 3 + [True]}]
    path = tmp_path / "log.json"
    path.write_text(
        "".join(json.dumps({**x, **y}) + "\n" for x, y in zip([line, more], ends, strict=True))
    )
    episodes = show(succeed, path)["episodes"]
    assert (episodes["count"], episodes["terminated"], episodes["truncated"]) == (2, 1, 1)
    assert (episodes["returns"]["min"], episodes["returns"]["max"]) == (10.0, 100.0)


def test_stated_spaces_and_nested_observations_are_shown(tmp_path, succeed):
    from gymnasium import spaces

    space = spaces.Dict({"far": spaces.Box(-1, 1, (2,)), "near": spaces.Discrete(3)})
    obs = {"far": np.zeros((4, 2), np.float32), "near": np.array([0, 1, 2, 1])}
    columns = {"obs": obs, "actions": np.zeros((4, 2), np.float32), "eps_id": np.arange(4)}
    write_table(tmp_path / "log.parquet", columns, (space, spaces.Box(-1, 1, (2,))))
    report = show(succeed, tmp_path / "log.parquet")
    assert report["spaces_are_stated"]
    assert [*report["observations"]] == ["obs.far", "obs.near"]
    assert report["episodes"]["count"] == 4
    assert report["episodes"]["returns"] is None


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data", "the following arguments are required: SUBCOMMAND"),
        ("data shw", "there is no 'shw'. Did you mean 'show'?"),
        (
            "data show nowhere.parquet",
            "There is no file of recorded experience at 'nowhere.parquet'",
        ),
        ("data show . --colums x", "Did you mean '--columns'?"),
        (
            "data show . --columns nowhere.json",
            "--columns: must be a JSON object or the path of a file",
        ),
        ("data show . --columns {}x", "must be a JSON object"),
        ("data show . --to picture.jpg", "--to takes a file that ends in .png"),
        ("data show . --action-space Dict()", "--action-space takes one of Box, Discrete"),
        ("data record --to x.parquet", "takes either a run or checkpoint"),
        ("data record runs --random --to x.parquet", "takes either a run or checkpoint"),
        ("data record --random --to x.parquet", "--random needs --env NAME"),
        (
            "data record --random --env CartPole-v1 --to x.csv",
            "ends in .parquet, .pq, .json, .jsonl",
        ),
    ],
)
def test_wrong_words_are_refused(words, message, here, refuse):
    assert message in refuse(words)
    assert list(here.iterdir()) == []


# -- statistics of bounded size -------------------------------------------------------------------


@pytest.mark.core
def test_statistics_do_not_depend_on_the_chunks():
    rows = np.random.default_rng(0).normal(1e6, 1.0, (5000, 3))
    stats = ComponentStats()
    for part in np.array_split(rows, 7):
        stats.add(part)
    np.testing.assert_allclose(stats.mean, rows.mean(axis=0))
    np.testing.assert_allclose(stats.std, rows.std(axis=0), rtol=1e-6)


@pytest.mark.core
def test_a_sample_is_bounded_and_uniform():
    sample = Reservoir(rows=1000)
    for i in range(100):
        sample.add(np.arange(1000 * i, 1000 * (i + 1)))
    assert len(sample.get()) == 1000
    assert abs(sample.get().mean() - 50_000) < 4 * 100_000 / math.sqrt(12 * 1000)


@pytest.mark.core
def test_an_episode_may_continue_in_the_next_chunk():
    episodes, nothing = EpisodeStats(), np.zeros(3, bool)
    episodes.add(np.array([True, False, True]), np.array([1.0, 2, 3]), nothing, nothing, None)
    episodes.add(np.array([False, False, True]), np.array([4.0, 5, 6]), nothing, nothing, None)
    episodes.finish()
    assert episodes.sample.get().tolist() == [[3.0, 2.0], [12.0, 3.0], [6.0, 1.0]]


# -- data record ----------------------------------------------------------------------------------


def read_rows(path):
    """Returns all columns of a file."""
    source = open_data(str(path), trusted=True)
    from tfpolicies.offline.data_source import join_chunks
    from tfpolicies.offline.data_spaces import iter_chunks

    return join_chunks([*iter_chunks(source, None)]).columns, source.metadata


def test_random_episodes_are_recorded_as_the_environment_gave_them(here, succeed):
    import gymnasium as gym

    words = "data record --random --env Pendulum-v1 --episodes 2 --seed 3 --to"
    assert "rows                400" in succeed(f"{words} a.parquet")
    columns, metadata = read_rows("a.parquet")
    assert columns["eps_id"].tolist() == [0] * 200 + [1] * 200
    assert "observation_space" in metadata
    np.testing.assert_allclose(columns["action_prob"], 0.25)
    env = gym.make("Pendulum-v1")
    for episode in range(2):
        obs, _ = env.reset(seed=3 + episode)
        for row in range(200 * episode, 200 * (episode + 1)):
            np.testing.assert_array_equal(columns["obs"][row], obs)
            obs, reward, terminated, truncated, _ = env.step(columns["actions"][row])
            np.testing.assert_allclose(columns["new_obs"][row], obs, rtol=1e-6)
            assert columns["rewards"][row] == pytest.approx(reward)
            assert columns["terminateds"][row] == terminated
            assert columns["truncateds"][row] == truncated
    assert truncated
    succeed(f"{words} b.json")
    other, _ = read_rows("b.json")
    for name, column in columns.items():
        np.testing.assert_allclose(other[name].reshape(column.shape), column)


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    parent = tmp_path_factory.mktemp("pendulum")
    words = [
        "train",
        "Pendulum-v1",
        "--steps",
        "256",
        "--no-tuned",
        "--num-envs",
        "2",
        "--seed",
        "1",
    ]
    quick = ["--set", "train_batch_size=128", "--set", "jit_compile=False"]
    assert main([*words, *quick, "--run-dir", str(parent)]) == 0
    (run,) = parent.iterdir()
    return run


def test_a_policy_records_the_episodes_of_its_evaluation(pendulum, here, succeed):
    evaluated = succeed(["evaluate", str(pendulum), "--episodes", "3", "--seed", "5"])
    words = ["data", "record", str(pendulum), "--episodes", "3", "--seed", "5"]
    shown = succeed([*words, "--to", "greedy.parquet"])
    (mean,) = (line.split()[-1] for line in evaluated.splitlines() if "mean return" in line)
    assert mean in shown
    columns, _ = read_rows("greedy.parquet")
    assert columns["t"].tolist() == [*range(200)] * 3
    assert np.abs(columns["actions"]).max() <= 2.0
    assert np.abs(columns["rewards"]).max() > 1.0
    np.testing.assert_array_equal(columns["action_logp"], 0.0)
    succeed([*words, "--explore", "--to", "sampled.json"])
    sampled, _ = read_rows("sampled.json")
    assert np.std(sampled["action_logp"]) > 0
    np.testing.assert_allclose(sampled["action_prob"], np.exp(sampled["action_logp"]), rtol=1e-4)
    assert sorted(path.name for path in here.iterdir()) == ["greedy.parquet", "sampled.json"]


@pytest.mark.soak
def test_recorded_files_are_learned_from(pendulum, here, succeed):
    succeed(["data", "record", str(pendulum), "--episodes", "2", "--to", "a.parquet"])
    succeed("data record --random --env Pendulum-v1 --episodes 2 --to b.parquet")
    shown = succeed("train --algo SAC --data a.parquet b.parquet --steps 2000 --seed 0")
    assert "Data: 800 rows of a.parquet, b.parquet, 2.5 epochs." in shown
    assert show(succeed, "a.parquet", "b.parquet")["episodes"]["count"] == 4
    assert pd.read_parquet("a.parquet").shape[0] == 400
