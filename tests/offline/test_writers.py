"""Writers of experience: Parquet files of whole episodes, and JSON lines."""

import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path

import lz4.frame
import numpy as np
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from helpers.recorded_files import read_columns
from tfpolicies import MultiAgentBatch, SampleBatch
from tfpolicies.errors import ConfigError
from tfpolicies.offline import parquet_writer
from tfpolicies.offline.json_writer import JsonLinesWriter
from tfpolicies.offline.open_data import open_data
from tfpolicies.offline.parquet_writer import ParquetWriter, write_table

SPACES = (
    spaces.Dict(a=spaces.Box(-1.0, 1.0, (2,), np.float32), b=spaces.Discrete(3)),
    spaces.Discrete(2),
)


def make_batch(episodes, rows=3, ends=True, first=0):
    """Makes rows of episodes, whose observations are the numbers of the rows."""
    count = len(episodes) * rows
    numbers = first + np.arange(count)
    is_last = np.arange(count) % rows == rows - 1
    return SampleBatch(
        {
            "obs": {"a": np.stack([numbers, -numbers], axis=1) / 100, "b": numbers % 3},
            "actions": numbers % 2,
            "rewards": numbers.astype(np.float32),
            "terminateds": is_last & ends,
            "truncateds": np.zeros(count, bool),
            "eps_id": np.repeat(np.array(episodes, np.int64), rows),
            "agent_index": np.zeros(count, np.int64),
            "t": np.arange(count) % rows,
        }
    )


def read_folder(path):
    """Returns all rows of a file, or of the files of a folder."""
    return read_columns(open_data(path, trusted=True))


def test_a_table_states_its_spaces_and_has_a_column_for_each_part(tmp_path):
    write_table(tmp_path / "a.parquet", make_batch([7]), SPACES)
    columns = read_folder(tmp_path / "a.parquet")
    assert columns["obs.a"].tolist() == [[0.0, 0.0], [0.01, -0.01], [0.02, -0.02]]
    assert columns["obs.b"].tolist() == [0, 1, 2]
    metadata = open_data(tmp_path / "a.parquet", trusted=True).metadata
    assert metadata["action_space"]["n"] == 2


def test_rows_of_an_episode_follow_each_other_although_batches_alternate(tmp_path):
    writer = ParquetWriter(tmp_path, {"default_policy": SPACES})
    for part in range(3):
        writer.write(make_batch([1, 2], rows=2, ends=part == 2, first=10 * part))
    writer.write(make_batch([3], ends=False))
    assert list(tmp_path.iterdir()) == []
    writer.close()
    columns = read_folder(tmp_path)
    assert columns["eps_id"].tolist() == [1] * 6 + [2] * 6 + [3] * 3
    assert columns["rewards"][:6].tolist() == [0, 1, 10, 11, 20, 21]
    assert columns["terminateds"].tolist() == [i in (5, 11) for i in range(15)]


def test_files_are_written_as_rows_arrive(tmp_path):
    writer = ParquetWriter(tmp_path, {"default_policy": SPACES}, max_file_size=200)
    writer.write(make_batch([1, 2]))
    writer.write(make_batch([3, 4]))
    files = sorted(tmp_path.glob("output-*_worker-0_*.parquet"))
    assert [pq.ParquetFile(file).metadata.num_rows for file in files] == [6, 6]
    assert {file.name for file in files} == {file.name for file in tmp_path.iterdir()}


def test_episodes_that_do_not_end_are_written_before_they_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_writer, "_MAX_HELD_BYTES", 500)
    writer = ParquetWriter(tmp_path, {"default_policy": SPACES}, max_file_size=1)
    for i in range(10):
        writer.write(make_batch([1], ends=False, first=3 * i))
    written = read_folder(tmp_path)["rewards"]
    assert written.tolist() == list(range(len(written)))
    assert 0 < len(written) < 30


def test_each_policy_has_files_that_name_it(tmp_path):
    writer = ParquetWriter(tmp_path, {"left": SPACES, "right": SPACES})
    writer.write(MultiAgentBatch({"left": make_batch([1]), "right": make_batch([1, 2])}, 6))
    writer.close()
    rows = {}
    for file in tmp_path.iterdir():
        metadata = open_data(file, trusted=True).metadata
        rows[metadata["policy_id"]] = pq.ParquetFile(file).metadata.num_rows
    assert rows == {"left": 3, "right": 6}


@pytest.mark.parametrize("options", [{}, {"compress_columns": ["obs"]}], ids=["plain", "packed"])
def test_json_lines_are_read_equal(options, tmp_path):
    writer = JsonLinesWriter(tmp_path, **options)
    writer.write(make_batch([1, 2]))
    writer.close()
    (file,) = tmp_path.glob("output-*_worker-0_0.json")
    line = json.loads(file.read_text())
    assert line["type"] == "SampleBatch"
    assert isinstance(line["obs"]["a"], str if options else list)
    columns = read_folder(tmp_path)
    assert columns["obs.a"].tolist() == make_batch([1, 2])["obs"]["a"].tolist()
    assert columns["rewards"].tolist() == [0, 1, 2, 3, 4, 5]


def test_rllib_packing_packs_a_pickle_in_an_lz4_frame(tmp_path):
    batch = make_batch([1])
    writer = JsonLinesWriter(tmp_path, compress_columns=["rewards"], rllib_packing=True)
    writer.write(batch)
    writer.close()
    (file,) = tmp_path.iterdir()
    text = json.loads(file.read_text())["rewards"]
    array = pickle.loads(lz4.frame.decompress(base64.b64decode(text)))
    assert array.tolist() == batch["rewards"].tolist()
    assert array.dtype == np.float32


def test_a_line_is_complete_before_the_next_begins_and_files_roll_over(tmp_path):
    writer = JsonLinesWriter(tmp_path, max_file_size=500, worker_index=3)
    for i in range(4):
        writer.write(make_batch([i]))
        lines = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
        assert len([json.loads(line) for line in lines]) == i + 1
    writer.close()
    assert len(list(tmp_path.glob("output-*_worker-3_*.json"))) > 1


def test_batches_of_several_policies_keep_their_steps(tmp_path):
    writer = JsonLinesWriter(tmp_path)
    writer.write(MultiAgentBatch({"left": make_batch([1]), "right": make_batch([1])}, 3))
    writer.close()
    (file,) = tmp_path.iterdir()
    line = json.loads(file.read_text())
    assert (line["type"], line["count"]) == ("MultiAgentBatch", 3)
    assert set(line["policy_batches"]) == {"left", "right"}


KILLED = """
import sys
sys.path[:0] = sys.argv[2:]
from tests.offline.test_writers import SPACES, make_batch
from tfpolicies.offline.json_writer import JsonLinesWriter
from tfpolicies.offline.parquet_writer import ParquetWriter
import os, signal
kind, folder = sys.argv[1].split(":", 1)
writer = JsonLinesWriter(folder) if kind == "json" else ParquetWriter(
    folder, {"default_policy": SPACES}, max_file_size=200)
for i in range(3):
    writer.write(make_batch([i]))
if kind == "json":
    writer._file.write('{"type": "SampleBatch", "obs": [1, 2')
    writer._file.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_killed_writer_leaves_readable_files(kind, tmp_path):
    root = str(Path(__file__).parents[2])
    paths = [root, f"{root}/tests"]
    command = [sys.executable, "-c", KILLED, f"{kind}:{tmp_path}", *paths]
    assert subprocess.run(command, check=False, timeout=120).returncode == -9
    rewards = read_folder(tmp_path)["rewards"].tolist()
    assert rewards[:6] == [0, 1, 2, 0, 1, 2]


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output=.*must be a folder"):
        JsonLinesWriter(tmp_path / "file" / "folder")
