"""Views of trajectories: shifts and ranges at their beginnings, ends and between."""

import dataclasses

import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies.batch.view_builder import Trajectories, TrajectoryHistory, get_history_lengths
from tfpolicies.batch.view_defaults import add_state_views, make_default_view_requirements
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import MissingColumnError

pytestmark = pytest.mark.core

LINE = spaces.Box(-9.0, 9.0, (1,), np.float32)
FIVE = np.arange(1.0, 6.0)  # 1 2 3 4 5
ONE = np.array([False] * 4 + [True])  # one trajectory of five rows
TWO = np.array([False, True, False, False, True])  # one of two, one of three


def build_view(shift, ends=ONE, past=None, **arguments):
    """Returns a view of a column with the numbers from 1 to 5."""
    view = ViewRequirement("x", shift=shift, **arguments)
    return Trajectories(ends, past).build_views({"x": FIVE}, {"y": view})["y"].tolist()


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (0, [1, 2, 3, 4, 5]),
        (-1, [0, 1, 2, 3, 4]),
        (-3, [0, 0, 0, 1, 2]),
        (-9, [0, 0, 0, 0, 0]),
        (1, [2, 3, 4, 5, 0]),
        ([-1], [0, 1, 2, 3, 4]),
        ([-2, 0], [[0, 1], [0, 2], [1, 3], [2, 4], [3, 5]]),
        ([0, -1], [[1, 0], [2, 1], [3, 2], [4, 3], [5, 4]]),
        ("-1:1", [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 0]]),
        ("-3:-1", [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]),
        ("-4:0:2", [[0, 0, 1], [0, 0, 2], [0, 1, 3], [0, 2, 4], [1, 3, 5]]),
    ],
)
def test_every_form_of_a_shift(shift, expected):
    assert build_view(shift) == expected


def test_an_index_is_a_position_in_the_trajectory():
    assert build_view(0, index=1) == [2] * 5
    assert build_view(0, index=-1) == [5] * 5
    assert build_view(0, index=7) == build_view(0, index=-7) == [0] * 5
    assert build_view(0, TWO, index=0) == [1, 1, 3, 3, 3]
    assert build_view(0, TWO, index=-1) == [2, 2, 5, 5, 5]


def test_the_observation_after_the_last_row_is_new_obs():
    columns = {"obs": np.array([[1], [2], [3]]), "new_obs": np.array([[2], [9], [4]])}
    views = {
        "later": ViewRequirement("obs", shift=1),
        "window": ViewRequirement("obs", shift="-1:2"),
    }
    result = Trajectories(np.array([False, True, True])).build_views(columns, views)
    assert result["later"].tolist() == [[2], [9], [4]]
    assert result["window"][..., 0].tolist() == [[0, 1, 2, 9], [1, 2, 9, 0], [0, 3, 4, 0]]


def test_nested_columns_and_those_that_are_seen_as_they_are():
    columns = {"obs": {"a": np.array([[1], [2]], np.uint8), "b": (np.array([5, 6]),)}}
    views = {"old": ViewRequirement("obs", shift=-1), "same": ViewRequirement("obs")}
    result = Trajectories(np.array([False, True])).build_views(columns, views)
    assert result["old"]["a"].tolist() == [[0], [1]]
    assert result["old"]["a"].dtype == np.uint8
    assert result["old"]["b"][0].tolist() == [0, 5]
    assert result["same"] is columns["obs"]


def test_a_source_that_was_not_collected_is_named():
    trajectories = Trajectories(ONE)
    with pytest.raises(MissingColumnError, match=r"'y' needs the column 'z'.*there are.*'x'"):
        trajectories.build_views({"x": FIVE}, {"y": ViewRequirement("z")})
    assert trajectories.build_views({"x": FIVE}, {"y": ViewRequirement()}) == {}  # postprocessing's


def test_a_view_never_shows_another_trajectory():
    assert build_view(-1, TWO) == [0, 1, 0, 3, 4]
    assert build_view("-1:1", TWO) == [[0, 1, 2], [1, 2, 0], [0, 3, 4], [3, 4, 5], [4, 5, 0]]


def test_a_running_episode_continues_after_the_rows_before():
    rows = [np.array([[-3.0, -2.0, -1.0], [-6.0, -5.0, -4.0]])]
    past = TrajectoryHistory(np.array([3, 1]), {"x": rows})
    view = build_view("-3:-1", TWO, past)
    assert view[:2] == [[-3, -2, -1], [-2, -1, 1]]
    assert view[2:] == [[0, 0, -4], [0, -4, 3], [-4, 3, 4]]  # it is one row old
    assert build_view(-5, TWO, past) == [0] * 5  # older rows are not kept
    assert build_view(0, TWO, past, index=0) == [1, 1, 3, 3, 3]
    past = TrajectoryHistory(np.array([3, 0]), {"x": [rows[0] * [[1], [0]]]})
    history = Trajectories(TWO, past).get_history({"x": FIVE}, ["x"], 4)
    assert history.num_rows.tolist() == [4, 3]
    assert history.leaves["x"][0].tolist() == [[-2, -1, 1, 2], [0, 3, 4, 5]]


def test_history_lengths_are_the_farthest_looks_back_on_each_column():
    views = {
        "a": ViewRequirement("x", shift="-3:1"),
        "b": ViewRequirement("x", shift=-5),
        "c": ViewRequirement("y", shift=1),
        "d": ViewRequirement("y", index=-1),
    }
    assert get_history_lengths(views) == {"x": 5}


def test_the_default_columns():
    views = make_default_view_requirements(LINE, spaces.Discrete(3))
    assert set(views) == {
        *("obs", "new_obs", "actions", "prev_actions", "rewards", "prev_rewards"),
        *("terminateds", "truncateds", "infos", "eps_id", "unroll_id", "agent_index", "t"),
    }
    assert (views["new_obs"].data_col, views["new_obs"].shift) == ("obs", 1)
    assert (views["prev_actions"].data_col, views["prev_actions"].shift) == ("actions", -1)
    assert (views["prev_rewards"].data_col, views["prev_rewards"].shift) == ("rewards", -1)
    assert views["prev_actions"].space == spaces.Discrete(3)
    assert not views["infos"].used_for_training
    for name, view in views.items():
        view.require_causal(name)
    acting = {name for name, view in views.items() if view.used_for_compute_actions}
    previous = {"prev_actions", "prev_rewards"}
    assert acting == {"obs", "eps_id", "unroll_id", "agent_index", "t"} | previous


def test_a_memory_adds_its_states_and_keeps_what_is_there():
    views = make_default_view_requirements(LINE, LINE)
    state = [np.zeros(4, np.float32), np.zeros((2, 3), np.float32)]
    result = add_state_views(views, state, max_seq_len=20)
    assert set(result) - set(views) == {"state_in_0", "state_out_0", "state_in_1", "state_out_1"}
    assert result["state_in_1"].data_col == "state_out_1"
    assert result["state_in_1"].space.shape == (2, 3)
    assert result["state_in_0"].batch_repeat_value == 20
    assert not result["state_out_0"].used_for_compute_actions
    attention = add_state_views(views, state[:1], max_seq_len=20, shift="-50:-1")
    assert len(attention["state_in_0"].shift_arr) == 50
    view = dataclasses.replace(result["state_in_0"], shift=-2)
    assert add_state_views({"state_in_0": view}, state, max_seq_len=9)["state_in_0"] is view
