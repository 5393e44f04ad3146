"""Spaces as leaves: order, dtypes, checks of batches, keys."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from helpers.arrays import assert_arrays_equal
from helpers.space_strategies import ACTION_SPACES
from tfpolicies.errors import ObservationError, UnsupportedSpaceError
from tfpolicies.models.preprocessing import encode, encode_action, get_encoded_shape
from tfpolicies.models.spaces import (
    action_leaves,
    batch_leaves,
    get_at_path,
    leaves,
    space_key,
    unflatten,
)

NESTED = spaces.Dict(
    body=spaces.Tuple([spaces.Discrete(3, start=5), spaces.Box(-1, 1, (2,), np.float64)]),
    camera=spaces.Box(0, 255, (2, 2, 3), np.uint8),
    keys=spaces.MultiBinary(4),
)


def batch(rows=2):
    return {
        "camera": np.zeros((rows, 2, 2, 3), np.uint8),
        "body": (np.full(rows, 6), np.ones((rows, 2))),
        "keys": np.ones((rows, 4), np.int8),
    }


@pytest.mark.core
def test_leaves_have_the_order_names_shapes_and_dtypes_of_the_space():
    names = ["body_0", "body_1", "camera", "keys"]
    assert [leaf.name("obs") for leaf in leaves(NESTED)] == [f"obs_{name}" for name in names]
    assert [leaf.shape for leaf in leaves(NESTED)] == [(), (2,), (2, 2, 3), (4,)]
    dtypes = {leaves: ["int64", "float32", "uint8", "int64"]}
    dtypes[action_leaves] = ["int64", "float32", "int64", "int8"]
    for get_leaves, expected in dtypes.items():
        assert [leaf.dtype.name for leaf in get_leaves(NESTED)] == expected
    assert leaves(spaces.Discrete(2))[0].name("obs") == "obs"
    text = spaces.Dict(talk=spaces.Tuple([spaces.Text(5)]))
    with pytest.raises(UnsupportedSpaceError, match="'talk/0'"):
        leaves(text)
    with pytest.raises(UnsupportedSpaceError, match=r"'talk/0'.*gymnasium\.ActionWrapper"):
        action_leaves(text)


@pytest.mark.core
def test_a_nested_batch_becomes_its_leaves_and_comes_back():
    arrays = batch_leaves(leaves(NESTED), batch(), "obs")
    assert [array.dtype.name for array in arrays] == ["int64", "float32", "uint8", "int64"]
    nested = unflatten(NESTED, arrays)
    assert list(nested) == ["body", "camera", "keys"]
    assert nested["body"][0].tolist() == [6, 6]
    assert get_at_path(nested, ("body", "1")).tolist() == [[1, 1], [1, 1]]
    array = np.zeros((2, 3), np.float32)
    assert batch_leaves(leaves(spaces.Box(-1, 1, (3,))), array, "obs")[0] is array


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.zeros((2, 4)), r"obs must be an array \[B, 3\] of float32; got shape \(2, 4\)"),
        (np.zeros(3), "compute_single_action"),
        ((np.zeros(3), {"lives": 3}), "obs, info = env.reset()"),
        ([[1.0], [1.0, 2.0]], "ragged"),
        ([["a", "b", "c"]], "must be an array"),
        (None, "must be an array"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(wrong, words):
    with pytest.raises(ObservationError, match=words):
        batch_leaves(leaves(spaces.Box(-1, 1, (3,))), wrong, "obs")


def test_a_missing_part_unequal_rows_and_a_scaled_image_are_named():
    image = leaves(spaces.Box(0, 255, (1, 2, 3), np.uint8))
    with pytest.raises(ObservationError, match=r"obs\[0, 0, 1, 2\] is 0\.5\. .* images by 255"):
        batch_leaves(image, np.array([[[[0, 1, 0], [1, 1, 0.5]]]]), "obs")
    incomplete = batch()
    del incomplete["body"]
    with pytest.raises(ObservationError, match="body/0"):
        batch_leaves(leaves(NESTED), incomplete, "obs")
    uneven = {**batch(2), "keys": np.ones((3, 4))}
    with pytest.raises(ObservationError, match=r"batch sizes \[2, 3\]"):
        batch_leaves(leaves(NESTED), uneven, "obs")


def test_space_keys_are_equal_for_equal_spaces_only():
    three = spaces.Discrete(3)
    variants = [
        *(three, spaces.Discrete(4), spaces.Discrete(3, start=1)),
        *(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 2, (2,)), spaces.Box(-1, 1, (1, 2))),
        spaces.Box(-1, 1, (2,), np.float64),
        *(spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([3, 2])),
        *(spaces.MultiBinary(2), spaces.MultiBinary(3)),
        *(spaces.Tuple([three]), spaces.Dict(a=three), spaces.Dict(b=three), NESTED),
    ]
    assert len({space_key(space) for space in variants}) == len(variants)
    assert space_key(spaces.Box(-1, 1, (2,))) == space_key(spaces.Box(-1, 1, (2,)))


@pytest.mark.core
def test_discrete_parts_are_encoded_one_hot_from_their_start():
    space = spaces.Dict(
        a=spaces.Discrete(3, start=5),
        b=spaces.MultiDiscrete([2, 3]),
        c=spaces.MultiDiscrete([[2, 2]], start=[[1, 0]]),
        d=spaces.Box(0, 255, (2,), np.uint8),
    )
    parts = leaves(space)
    rows = [np.array([5, 7]), np.array([[0, 2], [1, 0]]), np.array([[[2, 0]], [[1, 1]]])]
    encoded = list(map(encode, parts, [*rows, np.array([[1, 255], [0, 2]], np.uint8)]))
    assert [get_encoded_shape(leaf) for leaf in parts] == [(3,), (5,), (4,), (2,)]
    assert [x.numpy().tolist() for x in encoded] == [
        [[1, 0, 0], [0, 0, 1]],
        [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]],
        [[0, 1, 1, 0], [1, 0, 0, 1]],
        [[1, 255], [0, 2]],
    ]
    assert {x.dtype.name for x in encoded} == {"float32"}


@pytest.mark.core
def test_images_are_scaled_and_other_numbers_and_bits_kept():
    space = spaces.Dict(
        bits=spaces.MultiBinary((2, 2)),
        deep=spaces.Box(-5, 300, (1, 1, 1), np.int32),
        image=spaces.Box(0, 255, (1, 2, 3), np.uint8),
        line=spaces.Box(0, 255, (2,), np.uint8),
        video=spaces.Box(0, 255, (1, 1, 1, 1), np.uint8),
    )
    rows = {
        "bits": [[[0, 1], [1, 0]]],
        "deep": [[[[300]]]],
        "image": np.array([[[[0, 51, 255], [1, 2, 3]]]], np.uint8),
        "line": [[7, 255]],
        "video": [[[[[255]]]]],
    }
    parts = leaves(space)
    encoded = list(map(encode, parts, batch_leaves(parts, rows, "obs")))
    assert [get_encoded_shape(leaf) for leaf in parts] == [leaf.shape for leaf in parts]
    expected = rows | {"image": (rows["image"].astype(np.float32) / 255).tolist()}
    assert [x.numpy().tolist() for x in encoded] == list(expected.values())
    assert {x.dtype.name for x in encoded} == {"float32"}
    (whole,) = leaves(spaces.MultiBinary(3))
    assert encode(whole, np.array([[1, 0, 1]])).numpy().tolist() == [[1, 0, 1]]


@pytest.mark.core
def test_actions_are_encoded_from_zero_whatever_the_start():
    for space, actions, expected in [
        (spaces.Discrete(3, start=5), np.array([0, 2]), [[1, 0, 0], [0, 0, 1]]),
        (spaces.MultiDiscrete([2, 2], start=[1, 0]), np.array([[0, 1]]), [[1, 0, 0, 1]]),
        (spaces.MultiBinary(2), np.array([[0, 1]], np.int8), [[0, 1]]),
    ]:
        (leaf,) = action_leaves(space)
        assert encode_action(leaf, actions).numpy().tolist() == expected


@given(ACTION_SPACES, st.integers(0, 3))
def test_nesting_undoes_taking_apart(space, rows):
    arrays = [np.full((rows, *leaf.shape), i, leaf.dtype) for i, leaf in enumerate(leaves(space))]
    assert_arrays_equal(batch_leaves(leaves(space), unflatten(space, arrays), "obs"), arrays)
