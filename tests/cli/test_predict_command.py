"""`tfpolicies predict`: actions for the rows of a Parquet file."""

import functools
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from helpers.factories import PLANE, make
from helpers.serving import MATRIX, export, inputs_of, policy_of, to_observations
from tfpolicies.cli import main
from tfpolicies.errors import MissingPackageError
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.serving.parquet_actions import write_actions

pytestmark = pytest.mark.usefixtures("kept_programs")

PAIR = spaces.Box(-10.0, 10.0, (2,), np.float32)


def make_comparing(**kinds):
    """Returns a policy whose greedy action is 1 where the first number is larger, else 0."""
    policy = make(obs=PAIR, **kinds)
    weights = {name: np.zeros_like(x) for name, x in policy.get_weights().items()}
    weights["layer_0/kernel"][:, 0] = [1.0, -1.0]
    weights["layer_2/kernel"][0, 1] = 1.0
    policy.set_weights(weights)
    return policy


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return str(export(make_comparing(), tmp_path_factory.mktemp("exports") / "make_comparing"))


@pytest.fixture(scope="module")
def export_of(tmp_path_factory):
    """Returns a policy of the matrix and the folder of its export, which is made once."""
    home = tmp_path_factory.mktemp("matrix")

    @functools.cache
    def make_export(kind):
        policy = policy_of(kind)
        return policy, str(export(policy, home / kind))

    return make_export


def write(path, columns, row_group=2):
    pq.write_table(pa.table(columns), path, row_group_size=row_group)
    return str(path)


@pytest.mark.core
def test_rows_of_three_row_groups_get_the_known_actions(tmp_path, exported, capsys):
    columns = {"id": [7, 8, 9, 10, 11], "left": [1.0, 0, 3, -4, 5], "right": [0.0, 1, 2, -3, 6]}
    data = write(tmp_path / "rows.parquet", columns)
    assert pq.ParquetFile(data).num_row_groups == 3

    assert main(["predict", exported, data, "--columns", "left,right", "--batch", "2"]) == 0

    result = pq.read_table(tmp_path / "rows.actions.parquet").to_pydict()
    assert result == {**columns, "action": [1, 0, 1, 0, 0]}
    assert capsys.readouterr().out.startswith("5 rows in ")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rows.actions.parquet",
        "rows.parquet",
    ]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 2), pa.large_list(pa.int32())], ids=str
)
def test_lists_of_any_kind_are_observations(tmp_path, exported, kind):
    obs = pa.array([[1, 0], [0, 1], [2, 1]], kind)
    data, target = write(tmp_path / "rows.parquet", {"obs": obs}), tmp_path / "acted.parquet"

    assert main(["predict", exported, data, "--to", str(target), "--keep", ""]) == 0

    assert pq.read_table(target).to_pydict() == {"action": [1, 0, 1]}


@pytest.mark.parametrize("kind", [kind for kind in MATRIX if kind != "memory"])
def test_actions_are_those_of_the_policy_for_all_spaces(tmp_path, export_of, kind):
    (policy, folder), rows = export_of(kind), 70
    arrays = inputs_of(policy, rows)
    columns = {name: list(x.reshape(rows, -1) if x.ndim > 1 else x) for name, x in arrays.items()}
    data = write(tmp_path / "rows.parquet", columns, row_group=30)
    target = tmp_path / "acted.parquet"

    assert main(["predict", folder, data, "--to", str(target), "--keep", ""]) == 0

    expected = policy.predict(to_observations(arrays))
    parts = expected if isinstance(expected, tuple) else (expected,)
    result = pq.read_table(target)
    names = ["action_0", "action_1"] if isinstance(expected, tuple) else ["action"]
    assert result.column_names == names
    for name, part in zip(names, parts, strict=True):
        np.testing.assert_allclose(np.array(result[name].to_pylist()), part, atol=1e-6)


def test_nested_lists_and_flat_ones_give_the_same_actions(tmp_path, export_of):
    policy, folder = export_of("image")
    images = inputs_of(policy, 5)["obs"]
    write(tmp_path / "flat.parquet", {"obs": list(images.reshape(5, -1))})
    write(tmp_path / "nested.parquet", {"obs": images.tolist()})

    for name in ("flat", "nested"):
        assert main(["predict", folder, str(tmp_path / f"{name}.parquet")]) == 0

    flat, nested = (
        pq.read_table(tmp_path / f"{name}.actions.parquet")["action"] for name in ("flat", "nested")
    )
    assert flat == nested


def test_a_seed_gives_the_same_samples_whatever_runs_together(tmp_path):
    folder = str(export(make_comparing(actions=PLANE), tmp_path / "samples"))
    data = write(tmp_path / "rows.parquet", {"obs": [[0.0, 0.0]] * 100})
    samples = []
    for options in (["--batch", "7"], [], ["--seed", "1"]):
        assert main(["predict", folder, data, "--explore", *options]) == 0
        samples.append(pq.read_table(tmp_path / "rows.actions.parquet")["action"].to_pylist())

    np.testing.assert_allclose(samples[0], samples[1], atol=1e-6)
    assert samples[0] != samples[2]
    assert len({tuple(action) for action in samples[0]}) > 50


def test_an_empty_table_gets_an_empty_column(tmp_path, exported):
    data = write(tmp_path / "rows.parquet", {"obs": pa.array([], pa.list_(pa.float32()))})

    assert main(["predict", exported, data]) == 0

    assert pq.read_table(tmp_path / "rows.actions.parquet")["action"].to_pylist() == []


WRONG = {
    "no column": ({"abs": [[1.0, 2.0]]}, ["no column 'obs'", "Did you mean 'abs'?", "--columns"]),
    "text": ({"obs": ["a"]}, ["'obs' must have lists of 2 numbers", "string"]),
    "number": ({"obs": [1.0]}, ["'obs' must have lists of 2 numbers", "double"]),
    "depth": ({"obs": [[[1.0], [2.0]]]}, ["'obs' must have lists of 2 numbers"]),
    "length": ({"obs": [[1.0, 2], [1, 2], [1, 2], [1]]}, ["a list of 2, got 1 in row 3"]),
    "nan": ({"obs": [[1.0, 2], [1, 2], [1, 2], [1, np.nan]]}, ["finite", "got nan in row 3"]),
    "infinite": ({"obs": [[1.0, 1e300]]}, ["finite float32, got 1e+300 in row 0"]),
    "null list": ({"obs": [[1.0, 2], [1, 2], None]}, ["'obs' has no value in row 2"]),
    "null": ({"obs": [[1.0, 2], [1, 2], [None, 2]]}, ["'obs' has no value in row 2"]),
    "taken name": ({"obs": [[1.0, 2]], "action": [0]}, ["already has a column 'action'", "--keep"]),
}


@pytest.mark.parametrize(("columns", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    tmp_path, exported, columns, words, refuse
):
    data = write(tmp_path / "rows.parquet", columns)
    (tmp_path / "rows.actions.parquet").write_text("as before")

    said = refuse(["predict", exported, data])

    assert all(word in said for word in words), said
    assert (tmp_path / "rows.actions.parquet").read_text() == "as before"
    assert len([*tmp_path.iterdir()]) == 2


FAR, ZEROS = [[0.0, 0.0]] * 5, [[0.0, 0.0, 0.0]] * 3
MASKS = [[1, 1, 1], [0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("kind", "columns", "words"),
    [
        (
            "mixed",
            {"obs_far": FAR, "obs_near": [0, 1, 2, 5, 0]},
            ["'obs_near' must be from 0 to 4, got 5 at [3]"],
        ),
        (
            "mixed",
            {"obs_far": FAR, "obs_near": [0.0, 1.5, 2.0, 3.0, 4.0]},
            ["'obs_near' must be of int64, got 1.5 in row 1"],
        ),
        ("masked", {"obs": ZEROS, "action_mask": MASKS}, ["row 2 is [0, 0, 0]"]),
        ("memory", {"obs": ZEROS}, ["reads earlier steps", "sequence_id"]),
    ],
    ids=["choice", "fraction", "mask", "memory"],
)
def test_rows_that_a_policy_cannot_act_on_are_named(
    tmp_path, export_of, refuse, kind, columns, words
):
    data = write(tmp_path / "rows.parquet", columns)
    message = refuse(["predict", export_of(kind)[1], data, "--batch", "2"])
    assert all(word in message for word in words), message


def test_columns_are_counted(tmp_path, exported, refuse):
    data = write(tmp_path / "rows.parquet", {"a": [1.0], "b": [1.0], "c": [1.0]})

    said = refuse(["predict", exported, data, "--columns", "a,b,c"])

    assert "must be 1, for obs FP32 [-1, 2] or 2, one for each number, got 3" in said
    assert "different names" in refuse(["predict", exported, data, "--columns", "a,a"])


def test_files_that_cannot_be_read_or_written_are_named(tmp_path, exported, refuse):
    data = write(tmp_path / "rows.parquet", {"obs": [[1.0, 2.0]]})
    (tmp_path / "text.parquet").write_text("text")

    assert "not a file" in refuse(["predict", exported, str(tmp_path / "none.parquet")])
    assert "as a Parquet file" in refuse(["predict", exported, str(tmp_path / "text.parquet")])
    assert "the file that is read" in refuse(["predict", exported, data, "--to", data])
    for target in (tmp_path / "no" / "x.parquet", tmp_path):
        words = ["predict", exported, data, "--to", str(target)]
        assert "in a folder that exists" in refuse(words)
    assert "must hold one ONNX export" in refuse(["predict", str(tmp_path), data])


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(MissingPackageError, match=r"pip install 'tfpolicies\[data\]'"):
        write_actions(OnnxPolicy(exported), tmp_path / "a.parquet", tmp_path / "b.parquet")


def test_memory_does_not_grow_with_the_table(tmp_path, exported, monkeypatch):
    numbers = np.random.default_rng(0).normal(size=(400_000, 2)).astype(np.float32)
    data = write(tmp_path / "rows.parquet", {"a": numbers[:, 0], "b": numbers[:, 1]}, 10_000)
    allocated, before = [], pa.total_allocated_bytes()

    def run_and_measure(policy, *args, whole=OnnxPolicy.run):
        allocated.append(pa.total_allocated_bytes() - before)
        return whole(policy, *args)

    monkeypatch.setattr(OnnxPolicy, "run", run_and_measure)

    words = ["predict", exported, data, "--columns", "a,b", "--batch", "10000"]
    assert main(words) == 0

    assert len(allocated) == 40
    assert max(allocated) < 0.5 * Path(data).stat().st_size


def test_an_interrupted_run_leaves_nothing(tmp_path, exported):
    rows = 400_000
    data = write(tmp_path / "rows.parquet", {"obs": pa.array([[1.0, 0.0]] * rows)}, 1000)
    command = [sys.executable, "-m", "tfpolicies", "predict", exported, data, "--batch", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not [*tmp_path.glob(".*.tfp-tmp")]:
        pass

    process.send_signal(signal.SIGINT)

    assert "Interrupted" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
