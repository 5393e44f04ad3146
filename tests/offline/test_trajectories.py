"""Trajectories from recorded rows: ends, next observations, order, and alternating episodes."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.recorded_files import read_chunks, write_json_lines
from tfpolicies.errors import BatchError
from tfpolicies.offline.column_map import ColumnMap
from tfpolicies.offline.data_source import Chunk
from tfpolicies.offline.json_lines import JsonLines
from tfpolicies.offline.trajectories import group_by_episode, make_trajectories

pytestmark = pytest.mark.core

LINE = spaces.Box(-99.0, 99.0, (1,), np.float32)
NAMES = ("obs", "new_obs", "actions", "rewards", "eps_id", "agent_index", "t")
NAMES = (*NAMES, "terminateds", "truncateds")


def make_rows(needs_next_obs=True, first_unroll=0, **columns):
    arrays = {name: np.asarray(x) for name, x in columns.items()}
    chunk = Chunk(arrays, len(arrays["obs"]), "log", 10)
    column_map = ColumnMap(arrays)
    steps = column_map.read(chunk, (LINE, LINE), NAMES)
    return make_trajectories(
        steps, column_map, needs_next_obs=needs_next_obs, first_unroll=first_unroll
    )


def test_next_observations_are_those_of_the_next_rows():
    rows = make_rows(obs=[1, 2, 3, 4, 5], eps_id=[7, 7, 7, 8, 8], terminateds=[0, 0, 1, 0, 1])
    assert rows.obs[0].ravel().tolist() == [1, 2, 3, 4, 5]
    assert rows.new_obs[0].ravel().tolist() == [2, 3, 3, 5, 5]
    assert rows.ends.tolist() == [False, False, True, False, True]
    assert rows.columns["truncateds"].tolist() == [False] * 5
    assert rows.dropped == 0


def test_recorded_next_observations_are_kept():
    rows = make_rows(obs=[1, 2], new_obs=[2, 9], eps_id=[7, 7])
    assert rows.new_obs[0].ravel().tolist() == [2, 9]
    assert rows.columns["truncateds"].tolist() == [False, True]
    assert rows.dropped == 0


def test_the_last_row_of_a_cut_off_episode_is_the_next_observation_of_the_row_before():
    rows = make_rows(
        obs=[1, 2, 3, 4, 5, 6],
        rewards=[1, 2, 3, 4, 5, 6],
        eps_id=[7, 7, 7, 8, 9, 9],
        truncateds=[0, 0, 1, 0, 0, 0],
    )
    assert rows.dropped == 3
    assert rows.obs[0].ravel().tolist() == [1, 2, 5]
    assert rows.new_obs[0].ravel().tolist() == [2, 3, 6]
    assert rows.columns["rewards"].tolist() == [1, 2, 5]
    assert rows.columns["truncateds"].tolist() == [False, True, True]
    assert rows.columns["terminateds"].tolist() == [False] * 3
    assert rows.ends.tolist() == [False, True, True]
    assert rows.columns["eps_id"].tolist() == [7, 7, 9]
    assert rows.columns["unroll_id"].tolist() == [0, 0, 2]


def test_without_next_observations_a_cut_off_episode_is_truncated_and_keeps_all_rows():
    rows = make_rows(needs_next_obs=False, obs=[1, 2, 3], eps_id=[7, 7, 8])
    assert rows.new_obs is None
    assert rows.columns["truncateds"].tolist() == [False, True, True]
    assert rows.ends.tolist() == [False, True, True]


def test_a_table_of_cut_off_episodes_of_one_row_has_no_rows_left():
    rows = make_rows(obs=[1, 2], eps_id=[7, 8])
    assert rows.dropped == 2
    assert len(rows.ends) == len(rows.obs[0]) == len(rows.new_obs[0]) == 0


def test_columns_that_are_not_recorded_are_counted():
    rows = make_rows(first_unroll=100, obs=[1, 2, 3, 4, 5], terminateds=[0, 1, 0, 0, 1])
    assert rows.columns["eps_id"].tolist() == [100, 100, 101, 101, 101]
    assert rows.columns["unroll_id"].tolist() == [100, 100, 101, 101, 101]
    assert rows.columns["t"].tolist() == [0, 1, 0, 1, 2]
    assert rows.columns["agent_index"].tolist() == [0] * 5


def test_rows_out_of_order_are_named():
    with pytest.raises(BatchError, match="t is 1 in row 12 of log, after 1"):
        make_rows(obs=[1, 2, 3], eps_id=[7, 7, 7], t=[0, 1, 1])
    make_rows(obs=[1, 2, 3], eps_id=[7, 7, 8], t=[5, 9, 0])


def test_alternating_episodes_are_grouped_in_the_order_of_their_first_rows(tmp_path):
    first = {"obs": [1, 2, 3, 4], "eps_id": [8, 7, 8, 7], "t": [0, 0, 1, 1]}
    second = {"obs": [5, 6, 7], "eps_id": [9, 7, 9], "t": [0, 2, 1]}
    path = write_json_lines(tmp_path / "a.json", first, second)
    (chunk,) = read_chunks(JsonLines([path]))
    column_map = ColumnMap(chunk.columns)
    grouped = group_by_episode(chunk, column_map)
    assert grouped.columns["obs"].tolist() == [1, 3, 2, 4, 6, 5, 7]
    assert grouped.columns["eps_id"].tolist() == [8, 8, 7, 7, 7, 9, 9]
    assert grouped.describe_row(3) == f"row 3 in line 1 of {path}"
    assert grouped.describe_row(4) == f"row 1 in line 2 of {path}"
    assert np.flatnonzero(column_map.find_starts(grouped)).tolist() == [0, 2, 5]


def test_agents_of_an_episode_are_separate_trajectories():
    columns = {
        "obs": np.arange(6),
        "eps_id": np.array([7, 7, 7, 7, 7, 7]),
        "agent_index": np.array([0, 1, 0, 1, 0, 1]),
    }
    grouped = group_by_episode(Chunk(columns, 6, "log"), ColumnMap(columns))
    assert grouped.columns["obs"].tolist() == [0, 2, 4, 1, 3, 5]


def test_rows_without_ids_stay_in_their_order():
    chunk = Chunk({"obs": np.arange(3), "terminateds": np.array([0, 1, 0])}, 3, "log")
    assert group_by_episode(chunk, ColumnMap(chunk.columns)) is chunk
