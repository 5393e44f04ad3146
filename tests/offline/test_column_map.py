"""Columns of batches from columns of tables: sources, shapes, dtypes, and each refusal."""

import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies.errors import (
    BatchError,
    ConfigError,
    MissingColumnError,
    ObservationError,
    TfPoliciesError,
)
from tfpolicies.offline.column_checks import require_order
from tfpolicies.offline.column_map import ColumnMap
from tfpolicies.offline.data_source import Chunk

pytestmark = pytest.mark.core

LINE = spaces.Box(-9.0, 9.0, (2,), np.float32)
NESTED = spaces.Dict(cat=spaces.Discrete(3), pos=spaces.Box(-9.0, 9.0, (2,)))


def make_chunk(first_row=0, **columns):
    arrays = {name: np.asarray(x) for name, x in columns.items()}
    return Chunk(arrays, len(next(iter(arrays.values()))), "log.parquet", first_row)


def read(chunk, names, obs=LINE, actions=LINE, columns=None):
    return ColumnMap(chunk.columns, columns).read(chunk, (obs, actions), names)


def read_obs(space, obs, columns=None, **others):
    return read(make_chunk(10, obs=obs, **others), ["obs"], obs=space, columns=columns).obs


def read_actions(space, actions, **others):
    return read(make_chunk(10, actions=actions, **others), ["actions"], actions=space).actions


def catch(function, *args, **kwargs):
    """Returns the class and the message of the error that a call raises."""
    with pytest.raises(TfPoliciesError) as caught:
        function(*args, **kwargs)
    return type(caught.value), str(caught.value)


# -- sources ----------------------------------------------------------------------------------


def test_columns_have_their_own_names_or_those_of_the_mapping():
    chunk = make_chunk(state=[[1, 2], [3, 4]], actions=[[5, 6], [7, 8]], r=[1, 2])
    steps = read(chunk, ["obs", "actions", "rewards"], columns={"obs": "state", "rewards": "r"})
    assert steps.obs[0].tolist() == [[1, 2], [3, 4]]
    assert steps.obs[0].dtype == np.float32
    assert steps.actions[0].tolist() == [[5, 6], [7, 8]]
    assert steps.columns["rewards"].tolist() == [1, 2]
    assert steps.new_obs is None


def test_a_list_of_columns_is_a_vector():
    chunk = make_chunk(a=[1, 2], b=[[3.5], [4.5]], obs=[0, 0])
    assert read(chunk, ["obs"], columns={"obs": ["b", "a"]}).obs[0].tolist() == [[3.5, 1], [4.5, 2]]


def test_a_function_returns_a_column_of_all_others():
    chunk = make_chunk(a=[1.0, 2.0], b=[3.0, 4.0])
    columns = {
        "obs": lambda x: np.stack([x["a"], x["a"] + x["b"]], axis=1),
        "rewards": lambda x: -x["b"],
    }
    steps = read(chunk, ["obs", "rewards"], columns=columns)
    assert steps.obs[0].tolist() == [[1, 4], [2, 6]]
    assert steps.columns["rewards"].tolist() == [-3, -4]


def test_a_nested_space_has_a_column_or_a_source_for_each_part():
    chunk = make_chunk(**{"obs.cat": [0, 2], "obs.pos": [[1, 2], [3, 4]], "x": [5, 6]})
    cat, pos = read(chunk, ["obs"], obs=NESTED).obs
    assert (cat.tolist(), cat.dtype) == ([0, 2], np.int64)
    assert pos.tolist() == [[1, 2], [3, 4]]
    columns = {"obs": {"cat": "obs.cat", "pos": ["x", "x"]}}
    assert read(chunk, ["obs"], obs=NESTED, columns=columns).obs[1].tolist() == [[5, 5], [6, 6]]
    deep = spaces.Tuple([spaces.Dict(a=spaces.Discrete(2)), spaces.Discrete(3)])
    chunk = make_chunk(**{"obs.0.a": [1], "obs.1": [2]})
    assert [x.tolist() for x in read(chunk, ["obs"], obs=deep).obs] == [[1], [2]]
    columns = {"obs": {"0": {"a": "obs.1"}, "1": "obs.0.a"}}
    assert catch(read, chunk, ["obs"], obs=deep, columns=columns)[0] is ObservationError
    columns = {"obs": {"0.a": "obs.0.a", "1": "obs.1"}}
    assert [x.tolist() for x in read(chunk, ["obs"], obs=deep, columns=columns).obs] == [[1], [2]]


def test_old_dones_are_terminateds():
    chunk = make_chunk(dones=[0, 1])
    column_map = ColumnMap(chunk.columns)
    assert column_map.has("terminateds")
    assert column_map.find_sources(["terminateds"], []) == ["dones"]
    assert column_map.read_column(chunk, "terminateds").tolist() == [False, True]


def test_sources_are_the_columns_to_decode():
    available = ["a", "b", "obs.x", "obs.y", "rewards", "other"]
    column_map = ColumnMap(available, {"actions": ["a", "b"], "new_obs": {"x": "a", "y": "obs.y"}})
    assert column_map.find_sources(["rewards", "t"], ["obs"]) == ["obs.x", "obs.y", "rewards"]
    assert column_map.find_sources(["actions", "new_obs"], []) == ["a", "b", "obs.y"]
    assert ColumnMap(available, {"t": lambda x: x["a"]}).find_sources(["rewards"], []) is None


# -- errors of the mapping ----------------------------------------------------------------------


def test_a_missing_column_is_named_with_a_suggestion():
    column_map = ColumnMap(["next_state", "state", "act", "terminal"])
    for name, other in (("obs", "state"), ("new_obs", "next_state"), ("actions", "act")):
        assert catch(column_map.find_sources, [], [name]) == (
            MissingColumnError,
            f"The table has no column {name!r}, which is needed; it has ['next_state', 'state', "
            f"'act', 'terminal']. Say where it comes from: columns={{{name!r}: {other!r}}}.",
        )
    assert "columns={'rewards': ...}" in catch(column_map.find_sources, [], ["rewards"])[1]


def test_a_source_that_the_table_lacks_is_named_with_a_suggestion():
    error = catch(ColumnMap, ["temperature", "load"], {"obs": ["temperatur", "load"]})
    assert error == (
        MissingColumnError,
        "columns['obs'] names 'temperatur', which the table does not have. Did you mean "
        "'temperature'? It has ['temperature', 'load'].",
    )


@pytest.mark.parametrize("columns", [3, {"obs": 3}, {3: "a"}, {"obs": []}, {"obs": [1]}, [("a",)]])
def test_a_mapping_of_another_form_is_refused(columns):
    error, message = catch(ColumnMap, ["a"], columns)
    assert error is ConfigError
    assert message.startswith("columns must be a dict from columns of batches")
    assert message.endswith(f"got {columns!r}.")


def test_a_part_without_a_source_is_named():
    chunk = make_chunk(a=[1, 2])
    error = catch(read, chunk, ["obs"], obs=NESTED, columns={"obs": {"cat": "a"}})
    assert error[0] is ConfigError
    assert "columns['obs'] must have the part 'pos' of the space, got {'cat': 'a'}" in error[1]


def test_a_function_of_the_wrong_number_of_rows_is_refused():
    chunk = make_chunk(a=[1, 2])
    for value in ([1], 3):
        error = catch(read, chunk, ["rewards"], columns={"rewards": lambda x, value=value: value})
        assert "columns['rewards'] must return an array [2, ...], one entry for each" in error[1]


def test_a_column_in_a_list_has_one_number_for_each_row():
    chunk = make_chunk(a=[1, 2], b=[[3, 4], [5, 6]], c=np.array(["x", "y"], object))
    assert (
        "Column 'b' must have one number for each row"
        in catch(read, chunk, ["obs"], columns={"obs": ["a", "b"]})[1]
    )
    assert (
        "c must have numbers, but is 'x' in row 0 of log.parquet"
        in catch(read, chunk, ["obs"], columns={"obs": ["a", "c"]})[1]
    )


def test_a_column_that_only_some_rows_lack_is_named():
    column_map = ColumnMap(["a", "b"], {"obs": ["a", "b"]})
    chunk = make_chunk(5, a=[1])
    error = catch(column_map.read, chunk, (LINE, LINE), ["obs"])
    assert error[0] is MissingColumnError
    assert "columns['obs'] names 'b', which row 5 of log.parquet lacks" in error[1]


# -- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_numbers_that_are_not_finite_are_named_by_place(value):
    obs = np.ones((4, 2))
    obs[2, 1] = value
    error, message = catch(read_obs, LINE, obs)
    assert error is ObservationError
    assert message == (
        f"obs must be finite numbers of float32, but obs[1] is {value} in row 12 of log.parquet. "
        "Leave the row out, or replace the number."
    )
    error, message = catch(read, make_chunk(10, rewards=obs[:, 1]), ["rewards"])
    assert error is BatchError
    assert f"rewards must be finite numbers, but rewards is {value} in row 12 of" in message


def test_a_fraction_is_not_an_integer():
    for value in (0.5, np.nan, np.inf, -0.1):
        error, message = catch(read_obs, spaces.Discrete(3), [0, 1, value])
        assert error is ObservationError
        assert f"obs must have numbers of int64, as its space does, but obs is {value}" in message
        assert "in row 12 of log.parquet" in message
    image = spaces.Box(0, 255, (2, 2), np.uint8)
    pixels = np.zeros((2, 2, 2))
    assert read_obs(image, pixels)[0].dtype == np.uint8
    for value in (256, -1, 0.5):
        pixels[1, 0, 1] = value
        message = catch(read_obs, image, pixels)[1]
        assert f"must have numbers of uint8, as its space does, but obs[0, 1] is {float(value)} in"


def test_integers_flags_and_floats_are_converted_if_nothing_is_lost():
    assert read_obs(spaces.Discrete(3), [0.0, 2.0])[0].dtype == np.int64
    assert read_obs(LINE, np.ones((2, 2), bool))[0].tolist() == [[1, 1], [1, 1]]
    assert read_obs(spaces.MultiBinary(2), np.ones((2, 2), bool))[0].tolist() == [[1, 1], [1, 1]]
    assert read_obs(LINE, np.ones((2, 2), np.float16))[0].dtype == np.float32
    chunk = make_chunk(t=[0.0, 1.0], terminateds=[0.0, 1.0], rewards=[1, 2], eps_id=[7, 8])
    columns = read(chunk, ["t", "terminateds", "rewards", "eps_id"]).columns
    assert {name: x.dtype.name for name, x in columns.items()} == {
        "t": "int64",
        "terminateds": "bool",
        "rewards": "float32",
        "eps_id": "int64",
    }


def test_texts_are_refused_where_numbers_are_needed():
    texts = np.array(["a", "b"], object)
    for name in ("rewards", "t", "terminateds"):
        error, message = catch(read, make_chunk(10, **{name: texts}), [name])
        assert error is BatchError
        assert f"{name} must have numbers, but is 'a' in row 10 of log.parquet" in message
    assert "obs must have numbers" in catch(read_obs, spaces.Discrete(2), texts)[1]
    mixed = np.array([1.0, 2.0, None], object)
    assert "but is None in row 12" in catch(read, make_chunk(10, rewards=mixed), ["rewards"])[1]


def test_flags_and_integers_are_exact():
    assert (
        "terminateds must be true or false, but terminateds is 2 in row 11"
        in catch(read, make_chunk(10, terminateds=[0, 2]), ["terminateds"])[1]
    )
    assert (
        "t must be integers, but t is 0.5 in row 11"
        in catch(read, make_chunk(10, t=[0, 0.5]), ["t"])[1]
    )


# -- choices ------------------------------------------------------------------------------------


def test_actions_that_count_from_one_are_refused_with_advice():
    error, message = catch(read_actions, spaces.Discrete(3), [1, 2, 3])
    assert error is ObservationError
    assert message == (
        "actions must be a choice of Discrete(3), but actions is 3 in row 12 of log.parquet. If "
        "the table counts from 1, use Discrete(3, start=1), or a function in columns={...} that "
        "subtracts 1."
    )
    assert read_actions(spaces.Discrete(3, start=1), [1, 2, 3])[0].tolist() == [1, 2, 3]
    assert "is 0 in row 10" in catch(read_actions, spaces.Discrete(3, start=1), [0, 2, 3])[1]


@pytest.mark.parametrize(
    ("space", "actions", "place"),
    [
        (spaces.MultiDiscrete([2, 3]), [[1, 2], [1, 3]], "actions[1] is 3 in row 11"),
        (spaces.MultiDiscrete([2], start=[5]), [[5], [7]], "actions[0] is 7 in row 11"),
        (spaces.MultiBinary(2), [[0, 1], [2, 0]], "actions[0] is 2 in row 11"),
        (spaces.Box(-1, 3, (1,), np.int32), [[-1], [4]], "actions[0] is 4 in row 11"),
    ],
)
def test_choices_outside_of_the_space_are_named(space, actions, place):
    assert place in catch(read_actions, space, actions)[1]


def test_choices_of_nested_actions_and_of_observations_are_named():
    space = spaces.Dict(a=spaces.Discrete(2))
    chunk = make_chunk(10, **{"actions.a": [0, 2]})
    assert "actions.a is 2 in row 11" in catch(read, chunk, ["actions"], actions=space)[1]
    assert "obs is 3 in row 11" in catch(read_obs, spaces.Discrete(3), [0, 3])[1]
    chunk = make_chunk(10, **{"obs.cat": [0, 3], "obs.pos": np.zeros((2, 2))})
    assert "obs.cat is 3 in row 11" in catch(read, chunk, ["obs"], obs=NESTED)[1]


def test_floating_point_actions_may_exceed_their_bounds():
    assert read_actions(LINE, [[20.0, -20.0]])[0].tolist() == [[20, -20]]


def test_an_action_that_its_mask_forbids_is_named():
    space = spaces.Dict(action_mask=spaces.MultiBinary(3), observations=spaces.Discrete(9))
    chunk = make_chunk(
        10,
        **{
            "obs.action_mask": [[1, 0, 0], [0, 1, 1], [1, 0, 1]],
            "obs.observations": [1, 2, 3],
            "actions": [0, 2, 1],
        },
    )
    error, message = catch(read, chunk, ["obs", "actions"], obs=space, actions=spaces.Discrete(3))
    assert error is ObservationError
    assert "allowed by obs.action_mask, but actions is 1 in row 12 of log.parquet" in message
    chunk.columns["actions"] = np.array([0, 1, 2])
    steps = read(chunk, ["obs", "actions"], obs=space, actions=spaces.Discrete(3))
    assert steps.obs[0].tolist() == [[1, 0, 0], [0, 1, 1], [1, 0, 1]]
    chunk.columns["actions"] = np.array([[0, 1], [0, 0], [0, 0]])
    assert (
        "actions[1] is 1 in row 10"
        in catch(read, chunk, ["obs", "actions"], obs=space, actions=spaces.MultiDiscrete([1, 2]))[
            1
        ]
    )


# -- shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 2, 3), (2, 1, 3), (2, 3, 1)])
def test_rows_may_be_flat_or_have_axes_of_length_1(shape):
    space = spaces.Box(-9.0, 9.0, (2, 3))
    obs = np.arange(12.0).reshape(2, *shape)
    assert read_obs(space, obs)[0].tolist() == obs.reshape(2, 2, 3).tolist()


@pytest.mark.parametrize("shape", [(3, 2), (7,), (), (2, 3, 2), (6, 1, 2)])
def test_rows_of_another_shape_are_refused(shape):
    error, message = catch(read_obs, spaces.Box(-9.0, 9.0, (2, 3)), np.zeros((2, *shape)))
    assert error is ObservationError
    assert message == (
        "obs must have the shape (2, 3) in each row, as its space does, but row 10 of "
        f"log.parquet has {shape}. Change the space, or convert the column by a function in "
        "columns={...}."
    )


def test_an_image_with_its_axes_in_another_order_is_refused():
    image = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    assert "has (3, 4, 4)" in catch(read_obs, image, np.zeros((1, 3, 4, 4), np.uint8))[1]


def test_a_single_number_has_the_shape_one_or_none():
    assert read_obs(spaces.Box(-9.0, 9.0, (1,)), [1, 2])[0].tolist() == [[1], [2]]
    assert read_obs(spaces.Discrete(3), [[1], [2]])[0].tolist() == [1, 2]
    chunk = make_chunk(rewards=[[1], [2]], t=[[0], [1]], state_in_0=[[1], [2]])
    columns = read(chunk, ["rewards", "t", "state_in_0"]).columns
    assert columns["rewards"].tolist() == [1, 2]
    assert columns["t"].tolist() == [0, 1]
    assert columns["state_in_0"].tolist() == [[1], [2]]


# -- rows that RLlib flattened --------------------------------------------------------------------


def test_one_hot_rows_are_choices():
    assert read_obs(spaces.Discrete(3), [[0, 0, 1], [1, 0, 0]])[0].tolist() == [2, 0]
    assert read_obs(spaces.Discrete(2, start=5), [[0, 1.0]])[0].tolist() == [6]
    space = spaces.MultiDiscrete([2, 3])
    assert read_obs(space, [[0, 1, 1, 0, 0]])[0].tolist() == [[1, 0]]
    message = catch(read_obs, spaces.Discrete(3), [[0, 0, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0]])[1]
    assert "obs is not a flat row of its space in row 12 of log.parquet" in message
    assert "has [1, 0, 1]" in message


def test_flat_rows_of_a_nested_space_are_decoded():
    cat, pos = read_obs(NESTED, [[0, 1, 0, 5.5, 6], [1, 0, 0, 7, 8]])
    assert cat.tolist() == [1, 0]
    assert pos.tolist() == [[5.5, 6], [7, 8]]
    rows = np.tile([0, 1, 0, 5.5, 6], (100, 1))
    rows[70, 1] = 0
    assert "in row 80 of log.parquet" in catch(read_obs, NESTED, rows)[1]
    rows[30, 4] = np.nan
    assert (
        "obs must be finite numbers, but is [0.0, 1.0, 0.0, 5.5, nan] in row 40"
        in catch(read_obs, NESTED, rows)[1]
    )
    assert "with rows of the shape (4,)" in catch(read_obs, NESTED, np.zeros((2, 4)))[1]


def test_actions_that_rllib_concatenated_are_split_by_sorted_keys():
    space = spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(-1, 1, (2,))})
    assert read_actions(space, [[0.5, -0.5, 2.0]])[1].tolist() == [2]
    pair = spaces.Tuple([spaces.Discrete(3)] + [spaces.Discrete(2)] * 10)
    result = read_actions(pair, [[2.0, *[0.0] * 8, 1.0, 0.0]])
    assert [x.tolist() for x in result] == [[2], *[[0]] * 8, [1], [0]]
    message = catch(read_actions, space, [[0.5, -0.5, 2.5]])[1]
    assert "actions.b must have numbers of int64" in message
    assert "with rows of the shape (2,)" in catch(read_actions, space, [[0.5, -0.5]])[1]


def test_a_nested_space_without_columns_is_explained():
    error, message = catch(read, make_chunk(a=[1]), ["obs"], obs=NESTED, columns={"obs": "a"})
    assert error is ObservationError
    assert "a column for each part of its space, ['obs.cat', 'obs.pos']" in message


# -- episodes -----------------------------------------------------------------------------------


def test_episodes_start_where_ids_change_or_after_ends():
    def find(**columns):
        chunk = make_chunk(**columns)
        return np.flatnonzero(ColumnMap(chunk.columns).find_starts(chunk)).tolist()

    assert find(eps_id=[1, 1, 2, 2, 1]) == [0, 2, 4]
    assert find(eps_id=[1, 1, 1, 1], agent_index=[0, 0, 1, 1]) == [0, 2]
    assert find(terminateds=[0, 1, 0, 0], truncateds=[0, 0, 1, 0]) == [0, 2, 3]
    assert find(eps_id=[1, 1, 2], terminateds=[1, 0, 1]) == [0, 1, 2]
    assert find(dones=[False, True, False]) == [0, 2]
    error = catch(find, obs=[1, 2])
    assert error[0] is MissingColumnError
    assert "'eps_id'" in error[1]


def test_ids_may_be_texts_numbers_or_several_columns():
    def read_ids(**columns):
        chunk = make_chunk(**columns)
        mapping = {"eps_id": [*columns]} if len(columns) > 1 else None
        return ColumnMap(chunk.columns, mapping).read_column(chunk, "eps_id")

    texts = read_ids(eps_id=np.array(["a", "b", "a"], object))
    assert texts.dtype == np.int64
    assert texts[0] == texts[2] != texts[1]
    assert texts[0] == read_ids(eps_id=np.array(["a"]))[0]
    floats = read_ids(eps_id=[0.5, 0.0, 0.5])
    assert floats[0] == floats[2] != floats[1]
    pairs = read_ids(day=[1, 1, 2], car=[1, 2, 1])
    assert len({*pairs.tolist()}) == 3


@pytest.mark.parametrize("value", [None, np.nan])
def test_a_missing_id_is_named(value):
    chunk = make_chunk(10, eps_id=np.array(["a", value], object))
    error, message = catch(ColumnMap(chunk.columns).read_column, chunk, "eps_id")
    assert error is BatchError
    assert f"eps_id must be an id in each row, but is {value} in row 11" in message


def test_rows_out_of_order_are_named():
    chunk = make_chunk(10, t=[0, 1, 0, 2, 2])
    starts = np.array([True, False, True, False, False])
    error, message = catch(require_order, chunk, chunk.columns["t"], starts)
    assert error is BatchError
    assert "t is 2 in row 14 of log.parquet, after 2. Sort the table" in message
    require_order(chunk, np.array([0, 1, 0, 2, 5]), starts)
