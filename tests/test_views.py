"""Views: shifted, windowed and repeated columns, for whole fragments and for the newest step."""

import dataclasses

import numpy as np
import pytest
from gymnasium import spaces
from tfpolicies.batch.acting_views import ActingViews

from tfpolicies.batch.sequences import chop_into_sequences
from tfpolicies.batch.view_builder import training_views, trajectory_views
from tfpolicies.batch.view_defaults import default_view_requirements, with_memory
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import BatchError, BatchUsageError, MissingColumnError, SpaceError

LINE = spaces.Box(-9.0, 9.0, (1,), np.float32)
FIVE = np.arange(1.0, 6.0)  # 1 2 3 4 5


def seen(shift, column=FIVE, **arguments):
    """Returns what is seen of one trajectory's column."""
    view = ViewRequirement("x", shift=shift, **arguments)
    return trajectory_views({"x": column}, {"y": view})["y"].tolist()


# -- one trajectory ---------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (0, [1, 2, 3, 4, 5]),
        (-1, [0, 1, 2, 3, 4]),
        (-4, [0, 0, 0, 0, 1]),
        (-9, [0, 0, 0, 0, 0]),
        (1, [2, 3, 4, 5, 0]),
        ([-1], [0, 1, 2, 3, 4]),
        ([-2, 0], [[0, 1], [0, 2], [1, 3], [2, 4], [3, 5]]),
        ([0, -1], [[1, 0], [2, 1], [3, 2], [4, 3], [5, 4]]),
        ("-1:1", [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 0]]),
        ("-2:-1", [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]),
        ("-4:0:2", [[0, 0, 1], [0, 0, 2], [0, 1, 3], [0, 2, 4], [1, 3, 5]]),
    ],
)
def test_every_form_of_a_shift(shift, expected):
    assert seen(shift) == expected


@pytest.mark.core
def test_attention_sees_a_long_window_once_per_sequence():
    column = np.arange(1.0, 61.0)[:, None] * [1, 10]
    view = ViewRequirement("x", shift="-50:-1", batch_repeat_value=20)
    found = trajectory_views({"x": column}, {"y": view})
    assert found["y"].shape == (3, 50, 2)
    assert found["seq_lens"].tolist() == [20, 20, 20]
    assert not found["y"][0].any()
    assert found["y"][1, :, 0].tolist() == [0] * 30 + list(range(1, 21))
    assert found["y"][2, :, 1].tolist() == [0] * 10 + list(range(10, 401, 10))


def test_a_repeated_value_is_taken_at_the_beginning_of_each_sequence():
    view = ViewRequirement("x", shift=-1, batch_repeat_value=2)
    found = trajectory_views({"x": FIVE}, {"y": view, "x": ViewRequirement()})
    assert found["y"].tolist() == [0, 2, 4]
    assert found["x"].tolist() == [1, 2, 3, 4, 5]
    assert found["seq_lens"].tolist() == [2, 2, 1]
    assert found["seq_lens"].dtype == np.int32
    other = ViewRequirement("x", batch_repeat_value=3)
    with pytest.raises(BatchUsageError, match="batch_repeat_value"):
        trajectory_views({"x": FIVE}, {"y": view, "z": other})


def test_an_index_is_a_position_in_the_trajectory():
    assert seen(0, index=1) == [2] * 5
    assert seen(0, index=-1) == [5] * 5
    assert seen(0, index=7) == seen(0, index=-7) == [0] * 5


def test_rows_of_the_same_episode_may_lie_before_the_trajectory():
    views = {
        "one": ViewRequirement("x", shift=-1),
        "window": ViewRequirement("x", shift="-3:0"),
    }
    found = trajectory_views({"x": FIVE[:2]}, views, before={"x": np.array([-2.0, -1.0])})
    assert found["one"].tolist() == [-1, 1]
    assert found["window"].tolist() == [[0, -2, -1, 1], [-2, -1, 1, 2]]


def test_before_the_episode_is_the_initial_value():
    views = {"h": ViewRequirement("x", shift="-2:-1")}
    column = np.array([[1.0, 2.0], [3.0, 4.0]])
    found = trajectory_views({"x": column}, views, initial={"x": [7.0, 8.0]})
    assert found["h"].tolist() == [[[7, 8], [7, 8]], [[7, 8], [1, 2]]]


@pytest.mark.core
def test_the_observation_after_the_last_row_is_new_obs():
    columns = {"obs": np.array([[1], [2], [3]]), "new_obs": np.array([[2], [3], [4]])}
    views = {
        "new_obs": ViewRequirement("obs", shift=1),
        "window": ViewRequirement("obs", shift="0:2"),
    }
    found = trajectory_views(columns, views)
    assert found["new_obs"].tolist() == [[2], [3], [4]]
    assert found["window"][..., 0].tolist() == [[1, 2, 3], [2, 3, 4], [3, 4, 0]]


def test_nested_columns_and_lists():
    columns = {
        "obs": {"a": np.array([[1], [2]], np.uint8), "b": (np.array([5, 6]),)},
        "infos": [{"k": 0}, {}],
    }
    views = {"old": ViewRequirement("obs", shift=-1), "infos": ViewRequirement()}
    found = trajectory_views(columns, views)
    assert found["old"]["a"].tolist() == [[0], [1]]
    assert found["old"]["a"].dtype == np.uint8
    assert found["old"]["b"][0].tolist() == [0, 5]
    assert found["infos"] is columns["infos"]
    with pytest.raises(BatchUsageError, match="list such as `infos`"):
        trajectory_views(columns, {"i": ViewRequirement("infos", shift=-1)})


def test_columns_that_do_not_fit_are_named():
    views = {"y": ViewRequirement("z")}
    with pytest.raises(MissingColumnError, match="'y' is made of 'z'"):
        trajectory_views({"x": FIVE}, views)
    assert trajectory_views({"x": FIVE}, {"y": ViewRequirement("z", used_for_training=False)}) == {}
    with pytest.raises(BatchError, match="one N and T"):
        trajectory_views({"x": FIVE, "y": FIVE[:2]}, views)
    ones = np.ones((2, 3))
    with pytest.raises(BatchError, match="`episode_starts`"):
        training_views({"x": ones}, {}, episode_starts=[True])
    with pytest.raises(BatchError, match="`before`"):
        training_views({"x": ones}, {}, before={"x": np.ones((3, 1))})
    with pytest.raises(BatchError, match="`known_before`"):
        training_views({"x": ones}, {}, known_before=[1])


# -- fragments of several environments --------------------------------------------------------

X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
STARTS = np.array([[False, False, True, False], [True, False, False, True]])


@pytest.mark.core
def test_nothing_is_seen_of_another_episode():
    views = {
        "before": ViewRequirement("x", shift=-1),
        "window": ViewRequirement("x", shift="-1:1"),
        "first": ViewRequirement("x", index=0),
    }
    found = training_views({"x": X}, views, episode_starts=STARTS)
    assert found["before"].tolist() == [0, 1, 0, 3, 0, 5, 6, 0]
    assert found["window"].tolist() == [
        *([0, 1, 2], [1, 2, 0], [0, 3, 4], [3, 4, 0]),
        *([0, 5, 6], [5, 6, 7], [6, 7, 0], [0, 8, 0]),
    ]
    assert found["first"].tolist() == [1, 1, 3, 3, 5, 5, 5, 8]


@pytest.mark.core
def test_a_running_episode_goes_on_from_the_rows_before():
    before = {"x": np.array([[-3, -2, -1], [-6, -5, -4]])}
    views = {"window": ViewRequirement("x", shift="-2:-1")}
    found = training_views({"x": X}, views, episode_starts=STARTS, before=before)["window"]
    assert found[:4].tolist() == [[-2, -1], [-1, 1], [0, 0], [0, 3]]
    assert found[4:].tolist() == [[0, 0], [0, 5], [5, 6], [0, 0]]
    young = training_views(
        {"x": X}, views, episode_starts=STARTS, before=before, known_before=np.array([1, 3])
    )["window"]
    assert young[:4].tolist() == [[0, -1], [-1, 1], [0, 0], [0, 3]]
    assert young[4:].tolist() == found[4:].tolist()


def test_new_obs_at_an_episodes_end_is_not_the_next_episodes_obs():
    new_obs = np.array([[2, 90, 4, 5], [6, 7, 91, 9]])
    view = {
        "later": ViewRequirement("obs", shift="0:1"),
        "new_obs": ViewRequirement("obs", shift=1),
    }
    found = training_views({"obs": X, "new_obs": new_obs}, view, episode_starts=STARTS)
    assert found["later"][:, 1].tolist() == new_obs.ravel().tolist()
    assert found["new_obs"].tolist() == new_obs.ravel().tolist()


def test_columns_that_are_seen_as_they_are_share_memory():
    found = training_views({"x": X}, {"x": ViewRequirement()})
    assert np.shares_memory(found["x"], X)


@pytest.mark.core
def test_sequences_begin_where_chopping_begins_them():
    rng = np.random.default_rng(0)
    count, length = 3, 11
    starts = rng.random((count, length)) < 0.25
    state = rng.normal(size=(count, length, 2))
    views = with_memory({"x": ViewRequirement()}, [np.zeros(2)], max_seq_len=4)
    last = rng.normal(size=(count, 1, 2))
    found = training_views(
        {"x": rng.normal(size=(count, length)), "state_out_0": state},
        views,
        episode_starts=starts,
        before={"state_out_0": last},
    )
    states_in = np.concatenate([last, state[:, :-1]], axis=1)
    states_in[starts] = 0
    _, (expected,), lengths = chop_into_sequences(
        feature_columns=[found["x"]],
        state_columns=[states_in.reshape(-1, 2)],
        max_seq_len=4,
        episode_ids=starts.cumsum(),
        unroll_ids=np.repeat(np.arange(count), length),
    )
    assert found["seq_lens"].tolist() == lengths.tolist()
    np.testing.assert_array_equal(found["state_in_0"], expected)
    assert found["state_out_0"].shape == (count * length, 2)


# -- acting -----------------------------------------------------------------------------------


@pytest.mark.core
def test_acting_sees_the_last_values_of_each_environment():
    views = {
        "obs": ViewRequirement(space=LINE),
        "prev": ViewRequirement("reward", shift=-1),
        "window": ViewRequirement("obs", space=LINE, shift="-2:0"),
        "some": ViewRequirement("reward", shift=[-3, -1]),
    }
    acting = ActingViews(views, num_rows=2)
    assert set(acting.remembered) == {"obs", "reward"}
    assert acting.current == ("obs",)
    for step in range(1, 4):
        obs = np.array([[step], [10 * step]], np.float32)
        found = acting.views({"obs": obs})
        acting.append({"obs": obs, "reward": [-step, -10 * step]})
    assert found["obs"] is obs
    assert found["prev"].tolist() == [-2, -20]
    assert found["window"][..., 0].tolist() == [[1, 2, 3], [10, 20, 30]]
    assert found["some"].tolist() == [[0, -2], [0, -20]]
    acting.reset(np.array([False, True]))
    found = acting.views({"obs": obs})
    assert found["some"].tolist() == [[-1, -3], [0, 0]]
    assert found["window"][..., 0].tolist() == [[2, 3, 3], [0, 0, 30]]


@pytest.mark.core
def test_acting_and_training_see_the_same():
    rng = np.random.default_rng(1)
    count, length = 3, 9
    starts = rng.random((count, length)) < 0.3
    starts[:, 0] = True
    obs = rng.normal(size=(count, length, 2)).astype(np.float32)
    state = rng.normal(size=(count, length, 4)).astype(np.float32)
    views = {
        "window": ViewRequirement("obs", shift="-4:0:2"),
        "prev": ViewRequirement("obs", shift=-2),
        "memory": ViewRequirement("state", shift="-3:-1"),
    }
    initial = {"obs": np.zeros(2, np.float32), "state": np.full(4, 0.5, np.float32)}
    trained = training_views(
        {"obs": obs, "state": state}, views, episode_starts=starts, initial=initial
    )
    acting, steps = ActingViews(views, count, initial=initial), []
    for t in range(length):
        acting.reset(starts[:, t])
        steps.append(acting.views({"obs": obs[:, t]}))
        acting.append({"obs": obs[:, t], "state": state[:, t]})
    for name, column in trained.items():
        acted = np.stack([step[name] for step in steps], axis=1)
        np.testing.assert_array_equal(column.reshape(acted.shape), acted, err_msg=name)


def test_some_rows_may_act():
    acting = ActingViews({"prev": ViewRequirement("a", shift=-1)}, 3)
    acting.append({"a": [1, 2, 3]})
    acting.append({"a": [30, 10]}, rows=[2, 0])
    assert acting.views({}, rows=[2, 1])["prev"].tolist() == [30, 2]
    seen_before = acting.views({})["prev"]
    acting.append({"a": [7, 7, 7]})
    assert seen_before.tolist() == [10, 2, 30]


def test_nested_values_begin_as_zeros_of_their_space():
    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.Box(0, 1, (2,), np.float64)]))
    views = {"actions": ViewRequirement(space=space, used_for_compute_actions=False)}
    views["prev_actions"] = ViewRequirement("actions", shift=-1)
    acting = ActingViews(views, 2)
    found = acting.views({})["prev_actions"]
    assert found["a"].tolist() == [0, 0]
    assert found["a"].dtype == np.int64
    assert found["b"][0].tolist() == [[0, 0], [0, 0]]
    assert found["b"][0].dtype == np.float32
    acting.append({"actions": {"a": [1, 2], "b": (np.ones((2, 2)),)}})
    assert acting.views({})["prev_actions"]["a"].tolist() == [1, 2]


def test_what_acting_cannot_see_is_refused():
    with pytest.raises(BatchError, match="look ahead"):
        ActingViews({"later": ViewRequirement("obs", shift=1)}, 1)
    with pytest.raises(BatchUsageError, match="absolute positions"):
        ActingViews({"first": ViewRequirement("obs", index=0)}, 1)
    with pytest.raises(SpaceError, match="fixed shape"):
        ActingViews({"old": ViewRequirement("obs", space=spaces.Text(3), shift=-1)}, 1)
    acting = ActingViews({"w": ViewRequirement("x", shift="-1:0")}, 1)
    with pytest.raises(MissingColumnError, match="`views` needs"):
        acting.views({})
    with pytest.raises(MissingColumnError, match="`append` needs"):
        acting.append({})


# -- the default set --------------------------------------------------------------------------


@pytest.mark.core
def test_the_default_columns():
    views = default_view_requirements(LINE, spaces.Discrete(3))
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
    acting = ActingViews(views, 2)
    assert set(acting.current) == {"obs", "eps_id", "unroll_id", "agent_index", "t"}
    assert set(acting.remembered) == {"actions", "rewards"}


def test_a_memory_adds_its_states_and_keeps_what_is_there():
    views = default_view_requirements(LINE, LINE)
    state = [np.zeros(4, np.float32), np.zeros((2, 3), np.float32)]
    more = with_memory(views, state, max_seq_len=20)
    assert set(more) - set(views) == {"state_in_0", "state_out_0", "state_in_1", "state_out_1"}
    assert more["state_in_1"].data_col == "state_out_1"
    assert more["state_in_1"].space.shape == (2, 3)
    assert more["state_in_0"].batch_repeat_value == 20
    assert not more["state_out_0"].used_for_compute_actions
    attention = with_memory(views, state[:1], max_seq_len=20, shift="-50:-1")
    assert len(attention["state_in_0"].shift_arr) == 50
    own = dataclasses.replace(more["state_in_0"], shift=-2)
    assert with_memory({"state_in_0": own}, state, max_seq_len=9)["state_in_0"] is own
