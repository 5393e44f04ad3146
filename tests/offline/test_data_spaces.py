"""Spaces that files state, and those that are inferred from their numbers."""

import logging

import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies.errors import MissingColumnError, SpaceError
from tfpolicies.offline.data_spaces import infer_spaces
from tfpolicies.offline.memory_data import ArrayData, StreamData
from tfpolicies.storage.spaces_json import encode_space

pytestmark = pytest.mark.core


def infer(columns=None, source=None, **data):
    data = {"obs": [0.5, 1.5, 2.5], "actions": [0, 1, 2], **data}
    return infer_spaces(source or ArrayData(data), columns)


@pytest.mark.parametrize(
    ("obs", "expected"),
    [
        ([1.0, 2, 3], spaces.Box(-np.inf, np.inf, (1,), np.float32)),
        ([1, 2, 3], spaces.Box(-np.inf, np.inf, (1,), np.float32)),
        (np.zeros((3, 4)), spaces.Box(-np.inf, np.inf, (4,), np.float32)),
        (np.zeros((3, 4, 2), np.float32), spaces.Box(-np.inf, np.inf, (4, 2), np.float32)),
        (np.zeros((3, 4), np.uint8), spaces.Box(-np.inf, np.inf, (4,), np.float32)),
        (np.zeros((3, 4, 4, 1), np.uint8), spaces.Box(0, 255, (4, 4, 1), np.uint8)),
        (np.zeros((3, 4, 4), np.int64), spaces.Box(-np.inf, np.inf, (4, 4), np.float32)),
    ],
)
def test_observations_are_boxes_without_bounds_and_bytes_are_images(obs, expected):
    assert infer(obs=obs)[0] == expected


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ([0, 4, 2], spaces.Discrete(5)),
        (np.array([0, 4, 2], np.uint8), spaces.Discrete(5)),
        ([False, True, False], spaces.Discrete(2)),
        ([[0, 1], [2, 0], [1, 1]], spaces.MultiDiscrete([3, 2])),
        ([0.5, -1.5, 1], spaces.Box(-1.5, 1.0, (1,), np.float32)),
        (
            [[0.5, 3], [-1.5, 3], [1, 3]],
            spaces.Box(np.float32([-1.5, 3]), np.float32([1, 3]), (2,), np.float32),
        ),
    ],
)
def test_actions_are_choices_from_0_or_boxes_between_their_values(actions, expected):
    assert infer(actions=actions)[1] == expected


def test_nested_columns_are_dicts():
    obs, actions = infer_spaces(
        ArrayData(
            {
                "obs": {"eye": np.zeros((3, 2, 2), np.uint8), "arm": [1.0, 2.0, 3.0]},
                "actions": {"a": [0, 1, 0], "b": [0.5, 1.5, 0.5]},
            }
        )
    )
    assert obs == spaces.Dict(
        eye=spaces.Box(0, 255, (2, 2), np.uint8), arm=spaces.Box(-np.inf, np.inf, (1,))
    )
    assert actions == spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0.5, 1.5, (1,)))


def test_columns_may_come_from_others():
    columns = {"obs": ["x", "y"], "actions": lambda data: data["z"] - 1}
    obs, actions = infer(columns, x=[1, 2, 3], y=[1, 2, 3], z=[1, 2, 1])
    assert obs == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert actions == spaces.Discrete(2)


def test_all_rows_are_read_also_of_streams():
    batches = [{"obs": [0.0, 0.0], "actions": [0, 1]}, {"obs": [0.0], "actions": [7]}]
    assert infer(source=StreamData(lambda: batches, "s"))[1] == spaces.Discrete(8)
    mixed = [{"obs": [0], "actions": [0]}, {"obs": [0.5], "actions": [0.5]}]
    assert infer(source=StreamData(lambda: mixed, "s"))[1] == spaces.Box(0.0, 0.5, (1,))


def test_numbers_that_are_not_finite_do_not_count():
    assert infer(actions=[np.nan, 1.0, -2.0])[1] == spaces.Box(-2.0, 1.0, (1,))


def test_a_warning_states_the_spaces_and_how_to_set_them(caplog):
    with caplog.at_level(logging.WARNING):
        infer()
    (record,) = caplog.records
    assert "Spaces were inferred from 3 rows" in record.message
    assert "Discrete(3)" in record.message
    assert "environment(observation_space=..., action_space=...)" in record.message


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"actions": [1, 2, 3]}, "actions has the integers from 1 to 3, but choices count from 0"),
        ({"actions": [-1, 0, 1]}, "actions has the integers from -1 to 1"),
        ({"actions": [0, 1, 10**6]}, "actions has the integers from 0 to 1000000"),
        ({"actions": [2.5, 2.5, 2.5]}, "actions must vary"),
        ({"actions": np.array(["a", "b", "c"], object)}, "actions must have numbers"),
        ({"obs": np.array(["a", "b", "c"], object)}, "obs must have numbers"),
    ],
)
def test_numbers_that_do_not_tell_their_space_are_refused_with_advice(data, problem):
    with pytest.raises(SpaceError) as caught:
        infer(**data)
    assert problem in str(caught.value)


def test_actions_that_count_from_one_get_the_space_to_set():
    with pytest.raises(SpaceError, match=r"Discrete\(3, start=1\)\), or subtract 1 by"):
        infer(actions=[1, 2, 3])


def test_rows_of_different_shapes_are_refused():
    batches = [{"obs": [[1, 2]], "actions": [0]}, {"obs": [[1]], "actions": [0]}]
    with pytest.raises(SpaceError, match=r"obs must have one shape, but row 1 of s has \(1,\)"):
        infer(source=StreamData(lambda: batches, "s"))


def test_missing_columns_are_named():
    with pytest.raises(MissingColumnError, match="no column 'actions'"):
        infer_spaces(ArrayData({"obs": [1]}))


def test_spaces_that_files_state_are_used_unless_columns_come_from_others():
    source = ArrayData({"obs": [1.0], "actions": [0]})
    expected = (spaces.Box(-3.0, 3.0, (1,)), spaces.Discrete(4, start=1))
    names = ("observation_space", "action_space")
    source.metadata = {n: encode_space(x) for n, x in zip(names, expected, strict=True)}
    assert infer_spaces(source) == expected
    assert infer_spaces(source, {"obs": "obs"})[1] == spaces.Discrete(1)
    source.metadata = {"observation_space": source.metadata["observation_space"]}
    assert infer_spaces(source)[1] == spaces.Discrete(1)
    source.metadata = {"observation_space": {"a": 1}, "action_space": [2]}
    with pytest.raises(SpaceError, match="The spaces that the data state cannot be read"):
        infer_spaces(source)
