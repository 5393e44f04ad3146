"""Observations as RLlib's preprocessors make them, given to policies."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.arrays import assert_arrays_equal
from helpers.factories import TWO, make
from tfpolicies.errors import ObservationError
from tfpolicies.models.rllib_flattening import decode_flat_observations
from tfpolicies.models.spaces import batch_leaves, leaves

HAND = spaces.Tuple([spaces.Discrete(4), spaces.Discrete(3), TWO])  # as in Blackjack
ROOM = spaces.Dict(
    at=spaces.MultiDiscrete([2, 3], start=[0, 5]),
    camera=spaces.Box(0, 255, (1, 2, 1), np.uint8),
    keys=spaces.MultiBinary(2),
    level=spaces.Discrete(2, start=7),
    speed=spaces.Box(-9, 9, (2, 1), np.float32),
)
IN_ROOM = {
    "at": np.array([[1, 7], [0, 5]]),
    "camera": np.array([[[[9], [255]]], [[[0], [1]]]], np.uint8),
    "keys": np.array([[1, 0], [1, 1]], np.int8),
    "level": np.array([7, 8]),
    "speed": np.array([[[0.5], [-2.0]], [[0.0], [9.0]]], np.float32),
}
FLAT_ROOM = np.float32(
    [[0, 1, 0, 0, 1, 9, 255, 1, 0, 1, 0, 0.5, -2.0], [1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0.0, 9.0]]
)
IN_HAND = (np.array([3, 0, 1]), np.array([0, 1, 2]), np.array([1, 0, 1]))
FLAT_HAND = np.float32(
    [[0, 0, 0, 1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0, 1, 0, 1]]
)
CHOICES, CHOSEN = spaces.MultiDiscrete([[2], [3]]), np.array([[[1], [0]]])
CASES = {
    "a choice": (spaces.Discrete(3), np.array([2, 0]), np.array([[0, 0, 1], [1, 0, 0]])),
    "choices": (CHOICES, CHOSEN, np.float32([[0, 1, 1, 0, 0]])),
    "a tuple": (HAND, IN_HAND, FLAT_HAND),
    "a dict": (ROOM, IN_ROOM, FLAT_ROOM),
}


def decode(space, batch):
    """Returns the leaves of a batch of flat rows."""
    return decode_flat_observations(leaves(space), batch, ObservationError("does not fit"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inference", ["tf", "onnx", "session"])
def test_preprocessed_rows_mean_the_observations_that_they_were_made_of(case, inference):
    space, obs, rows = CASES[case]
    policy = make(obs=space, inference=inference)
    expected = policy.compute_actions(obs, explore=False)
    for values in (rows, list(rows)):
        actual = policy.compute_actions(values, explore=False)
        for name in ("action_dist_inputs", "vf_preds"):
            np.testing.assert_array_equal(actual.extras[name], expected.extras[name])
    np.testing.assert_array_equal(
        policy.compute_log_likelihoods(expected.actions, rows),
        policy.compute_log_likelihoods(expected.actions, obs),
    )
    traces = policy.program.functions.traces
    assert dict(traces) == dict.fromkeys(traces, 1)


def test_every_leaf_comes_back_in_its_own_shape_and_dtype():
    actual, expected = decode(ROOM, FLAT_ROOM), batch_leaves(leaves(ROOM), IN_ROOM, "obs")
    assert [(x.dtype, x.shape) for x in actual] == [(x.dtype, x.shape) for x in expected]
    assert_arrays_equal(actual, expected)


def test_a_policy_with_a_memory_takes_one_preprocessed_observation():
    policy = make(obs=spaces.Discrete(3), model={"use_lstm": True, "lstm_cell_size": 2})
    start = policy.get_initial_state()
    expected, memory, _ = policy.compute_single_action(1, start, explore=False)
    actual, other, _ = policy.compute_single_action(np.eye(3)[1], start, explore=False)
    assert actual == expected
    np.testing.assert_array_equal(memory, other)


def test_batches_that_fit_the_space_are_not_decoded():
    ones = spaces.MultiDiscrete([1, 1])
    policy = make(obs=ones)
    with pytest.raises(ObservationError, match=r"\[B, 2\] of int64; got shape \(1, 3\)"):
        policy.compute_actions(np.ones((1, 3)))
    assert policy.compute_actions(np.zeros((4, 2))).actions.shape == (4,)
    pair = spaces.Tuple([spaces.Box(-9, 9, (), np.float32)] * 2)
    parts = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    np.testing.assert_array_equal(batch_leaves(leaves(pair), parts, "obs"), parts)
    policy = make(obs=pair)
    rows = policy.compute_actions(np.array([*parts, [5.0, 6.0]], np.float32), explore=False)
    columns = (np.array([1.0, 3.0, 5.0]), np.array([2.0, 4.0, 6.0]))
    expected = policy.compute_actions(columns, explore=False).extras["action_dist_inputs"]
    np.testing.assert_array_equal(rows.extras["action_dist_inputs"], expected)
    parts = np.zeros((3, 9), np.int64)  # of a tuple of three
    assert make(obs=HAND).compute_actions(parts).actions.shape == (9,)
    assert make(obs=HAND).compute_actions(parts[:, :5]).actions.shape == (5,)


@pytest.mark.parametrize("row", [[0.2, 0.8, 0.0], [0, 0, 0], [1, 1, 0], [2, -1, 0]])
def test_a_choice_that_is_not_one_hot_is_refused_and_its_row_and_place_named(row):
    policy = make(obs=spaces.Discrete(3))
    with pytest.raises(ObservationError, match=r"obs_batch must be of Discrete\(3\).*row 1 has \["):
        policy.compute_actions(np.array([[1, 0, 0], row]))
    rows = FLAT_ROOM.copy()
    rows[0, 9:11] = 0
    with pytest.raises(ObservationError, match=r"obs_batch_level must be of .*row 0 has \[0\.0"):
        make(obs=ROOM).compute_actions(rows)


@pytest.mark.parametrize(
    ("space", "batch"),
    [
        (spaces.Box(-1, 1, (2, 3), np.float32), np.zeros((4, 6), np.float32)),
        (spaces.MultiBinary([2, 2]), np.zeros((4, 4))),
        (spaces.Discrete(3), np.zeros((2, 4))),
        (spaces.Discrete(3), np.array([["a", "b", "c"]])),
        (ROOM, [[1.0, 2.0], [3.0]]),
        (ROOM, np.zeros(13, np.float32)),
    ],
    ids=str,
)
def test_other_forms_are_refused_by_their_name(space, batch):
    with pytest.raises(ObservationError, match="does not fit"):
        decode(space, batch)
    with pytest.raises(ObservationError, match="obs_batch"):
        make(obs=space).compute_actions(batch)
    with pytest.raises(ObservationError, match=r"new_obs must be a dict or tuple.*\[3, 9\] of fl"):
        batch_leaves(leaves(HAND), FLAT_HAND, "new_obs")
