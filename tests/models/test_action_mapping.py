"""Mapping of normalised actions to those of the environment, always members of the space."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.arrays import assert_arrays_equal
from helpers.factories import make
from helpers.space_strategies import ACTION_SPACES
from tfpolicies.models.action_mapping import ActionMapping
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.spaces import unflatten

pytestmark = pytest.mark.core

BOUNDED = spaces.Box(np.array([0.0, -2.0], np.float32), np.array([10.0, 2.0], np.float32))
HALF = spaces.Box(
    np.array([0.0, -np.inf, -np.inf], np.float32), np.array([np.inf, 1.0, np.inf], np.float32)
)


NESTED = spaces.Dict(
    arm=BOUNDED,
    keys=spaces.MultiBinary(2),
    walk=spaces.Tuple(
        [
            spaces.Discrete(3, start=-5),
            spaces.Box(np.array([-1, 3]), np.array([2, 9]), (2,), np.int16),
        ]
    ),
)


def to_env(space, actions, *, normalize=True, clip=False):
    """Maps a batch of actions of a space that is not nested, in NumPy and in TensorFlow."""
    mapping = ActionMapping(space, normalize, clip)
    (leaf,) = mapping.leaves
    array = np.asarray(actions, leaf.dtype)
    (mapped,) = mapping.to_env([array])
    (traced,) = with_tensors(mapping, [array])
    assert mapped.dtype == traced.dtype == space.dtype
    np.testing.assert_allclose(mapped, traced, rtol=1e-6, atol=1e-37)  # subnormals become 0 there
    return mapped


def with_tensors(mapping, actions):
    """Maps arrays as the graph does; returns arrays."""
    tensors = [tf.constant(action) for action in actions]
    return [x.numpy() for x in mapping.to_env(tensors, cast=tf.cast, clip=tf.clip_by_value)]


def from_env(space, actions, *, normalize=True):
    """Inverts `to_env`."""
    (normalised,) = ActionMapping(space, normalize, False).from_env([np.asarray(actions)])
    return normalised


LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("space", "actions", "expected"),
    [
        (BOUNDED, [[-1, -1], [0, 0], [1, 1], [0.5, -0.5]], [[0, -2], [5, 0], [10, 2], [7.5, -1]]),
        (BOUNDED, [[-7, 7]], [[0, 2]]),
        (HALF, [[-3, 3, 99], [3, -3, -99]], [[0, 1, 99], [3, -3, -99]]),
        (spaces.Box(-LARGEST, LARGEST, (1,)), [[0], [1], [-2]], [[0], [LARGEST], [-LARGEST]]),
    ],
)
def test_floats_are_mapped_to_the_bounds_there_are_and_clipped(space, actions, expected):
    assert to_env(space, actions).tolist() == expected


@pytest.mark.parametrize(("clip", "expected"), [(True, [[10, -1]]), (False, [[11, -1]])])
def test_without_normalisation_actions_are_clipped_or_left(clip, expected):
    assert to_env(BOUNDED, [[11, -1]], normalize=False, clip=clip).tolist() == expected


@pytest.mark.parametrize(
    ("space", "actions", "expected"),
    [
        (spaces.Discrete(3, start=-1), [0, 2], [-1, 1]),
        (
            spaces.MultiDiscrete([3, 2], start=[-1, 10], dtype=np.int32),
            [[0, 0], [2, 1]],
            [[-1, 10], [1, 11]],
        ),
        (
            spaces.Box(np.array([250, 3], np.uint8), np.array([255, 4], np.uint8), dtype=np.uint8),
            [[0, 0], [5, 1]],
            [[250, 3], [255, 4]],
        ),
        (spaces.Box(2**64 - 3, 2**64 - 1, (1,), np.uint64), [[0], [2]], [[2**64 - 3], [2**64 - 1]]),
        (spaces.Box(0, 1, (2,), np.bool_), [[0, 1]], [[False, True]]),
        (spaces.MultiBinary((1, 2)), [[[0, 1]]], [[[0, 1]]]),
    ],
    ids=str,
)
def test_whole_numbers_begin_at_the_start_or_the_low_of_their_space(space, actions, expected):
    mapped = to_env(space, actions)
    assert mapped.tolist() == expected
    back = from_env(space, mapped)
    assert back.tolist() == actions
    assert back.dtype == (np.int8 if isinstance(space, spaces.MultiBinary) else np.int64)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_actions_are_members_of_a_box_of_any_float_type(dtype):
    space = spaces.Box(0.1, 0.3, (2,), dtype)
    for action in to_env(space, [[-9, -1], [0, 0.3], [1, 9]]):
        assert action in space
        assert action.dtype == dtype
    point = spaces.Box(2, 2, (1,), dtype)
    assert to_env(point, [[-1], [5]]).tolist() == [[2], [2]]
    assert from_env(point, [[2.0]]).tolist() == [[2.0]]


def test_integers_without_a_bound_below_stay_what_they_are():
    """Adding the lowest int64 to them would make nonsense of what custom policies choose."""
    space = spaces.Box(np.array([-np.inf, 5]), np.array([np.inf, 9]), dtype=np.int32)
    for from_zero in (True, False):
        mapping = ActionMapping(space, normalize=True, clip=False, zero_based=from_zero)
        assert mapping.to_env([np.array([[3, 1]])])[0].tolist() == [[3, 6]]


def test_custom_policies_choose_from_the_space_itself():
    def mapped(space, actions, normalize, clip=False):
        mapping = ActionMapping(space, normalize, clip, zero_based=False)
        return mapping.to_env([np.array(actions)])[0].tolist()

    assert mapped(spaces.Discrete(3, start=-1), [-1, 1], normalize=True) == [-1, 1]
    assert mapped(spaces.MultiDiscrete([3, 2], start=[-1, 10]), [[1, 11]], True) == [[1, 11]]
    cells = spaces.Box(4, 8, (2,), np.int64)
    assert mapped(cells, [[0, 4]], normalize=True) == [[4, 8]]
    assert mapped(cells, [[0, 9]], normalize=False, clip=True) == [[4, 8]]
    assert mapped(cells, [[0, 9]], normalize=False) == [[0, 9]]
    assert mapped(BOUNDED, [[0.5, -3.0]], normalize=True) == [[7.5, -2]]


def test_the_leaves_of_a_nested_space_are_mapped_each_by_its_own_rule():
    mapping = ActionMapping(NESTED, normalize=True, clip=False)
    actions = [np.float32([[1, -1]]), np.int8([[0, 1]]), np.int64([2]), np.int64([[3, 0]])]
    mapped = mapping.to_env(actions)
    assert_arrays_equal(mapped, with_tensors(mapping, actions))
    assert [x.tolist() for x in mapped] == [[[10, -2]], [[0, 1]], [-3], [[2, 3]]]
    assert [x.dtype.name for x in mapped] == ["float32", "int8", "int64", "int16"]
    again = mapping.from_env(mapped)
    assert [x.tolist() for x in again] == [x.tolist() for x in actions]
    assert [x.dtype for x in again] == [x.dtype for x in actions]
    raw = dataclasses.replace(mapping, normalize=False)
    assert raw.to_env(actions)[0].tolist() == [[1, -1]]


def test_the_identity_is_recognised():
    def is_identity(space, normalize=False, clip=False):
        return ActionMapping(space, normalize, clip).is_identity

    assert is_identity(spaces.Discrete(3), normalize=True)
    assert not is_identity(spaces.Discrete(3, start=1))
    assert is_identity(spaces.MultiDiscrete([2, 2]))
    assert not is_identity(spaces.MultiDiscrete([2, 2], start=[0, 1]))
    assert not is_identity(spaces.MultiDiscrete([2, 2], dtype=np.int32))
    assert is_identity(spaces.MultiBinary(2), normalize=True)
    assert is_identity(spaces.Box(0, 3, (2,), np.int64), normalize=True)
    assert not is_identity(spaces.Box(1, 3, (2,), np.int64))
    assert not is_identity(spaces.Box(0, 3, (2,), np.uint8))
    assert is_identity(BOUNDED)
    assert not is_identity(BOUNDED, normalize=True)
    assert not is_identity(BOUNDED, clip=True)
    assert not is_identity(spaces.Box(-1, 1, (2,), np.float64))
    assert is_identity(spaces.Tuple([spaces.Discrete(2), BOUNDED]))
    assert not is_identity(spaces.Tuple([spaces.Discrete(2), BOUNDED]), clip=True)


FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)  # TensorFlow flushes those to 0
BOUNDS = st.tuples(FLOATS | st.just(-np.inf), FLOATS | st.just(np.inf)).filter(
    lambda b: b[0] < b[1]
)


@settings(max_examples=150)
@given(ACTION_SPACES, st.booleans(), st.sampled_from([0.0, 1.0, 30.0, 3e38]), st.integers(0, 99))
def test_every_action_given_to_the_environment_is_in_the_space(space, normalize, scale, seed):
    dist_class = ActionDistribution.for_space(space)
    rng = np.random.default_rng(seed)
    inputs = tf.constant(rng.normal(size=(4, dist_class.num_inputs)), tf.float32)
    noise = tf.constant(dist_class.draw_noise(rng, 4))
    mapping = ActionMapping(space, normalize, clip=not normalize)
    actions = [
        tf.clip_by_value(action * scale, tf.float32.min, tf.float32.max)
        if action.dtype == tf.float32
        else action
        for action in dist_class(inputs).sample_leaves(noise)
    ]
    mapped = mapping.to_env([action.numpy() for action in actions])
    for row in range(4):
        action = unflatten(space, [leaf[row, ...] for leaf in mapped])  # arrays, also of rank 0
        assert action in space
    assert all(np.isfinite(leaf).all() for leaf in mapped)


@given(st.lists(BOUNDS, min_size=1, max_size=3), st.floats(-1, 1, width=32))
def test_from_env_inverts_to_env(bounds, value):
    low, high = (np.array(side, np.float64) for side in zip(*bounds, strict=True))
    space = spaces.Box(low, high, dtype=np.float64)
    inside = np.clip(
        value, np.where(np.isfinite(high), -1, low), np.where(np.isfinite(low), 1, high)
    )
    normalised = np.where(np.isfinite(low) & np.isfinite(high), value, inside)
    again = from_env(space, to_env(space, normalised[None]))[0]
    width = np.where(np.isfinite(high - low), high - low, 1.0)
    scale = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)) / width)
    finite = np.isfinite(scale)
    error = np.abs(again - normalised.astype(np.float32))[finite]
    assert (error <= 1e-6 + 1e-14 * scale[finite]).all()


def test_a_policy_acts_normalised_and_maps_each_action_once():
    policy = make(actions=BOUNDED)
    obs = np.ones((40, 3), np.float32)
    batch = policy.compute_actions(obs, explore=True)
    assert np.abs(batch.actions).max() > 1  # a Gaussian's samples, not yet clipped
    env_actions = np.stack([policy.to_env_action(action) for action in batch.actions])
    np.testing.assert_allclose(env_actions, to_env(BOUNDED, batch.actions), rtol=1e-6)
    assert all(action in BOUNDED for action in env_actions)
    for_env, columns = policy.driver.acting.act([obs])
    np.testing.assert_allclose(for_env, to_env(BOUNDED, columns["actions"]), rtol=1e-6)


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([2, 2]), BOUNDED], ids=str)
def test_mapped_actions_are_arrays_of_the_callers_own(space):
    for from_zero in (True, False):
        mapping = ActionMapping(space, normalize=False, clip=False, zero_based=from_zero)
        actions = np.ones((1, 2), space.dtype)
        (mapped,) = mapping.to_env([actions])
        mapped[...] = 0
        assert actions.tolist() == [[1, 1]]


def test_env_action_takes_its_rules_from_the_call_or_from_the_config():
    policy = make(actions=BOUNDED, clip_actions=True)
    action = np.array([2.0, 0.5], np.float32)
    assert policy.to_env_action(action).tolist() == [10, 1]
    assert policy.to_env_action(action, unsquash=False).tolist() == [2, 0.5]
    assert policy.to_env_action(np.array([20.0, 0.5]), unsquash=False).tolist() == [10, 0.5]
    assert policy.to_env_action([20.0, 0.5], unsquash=False, clip=False).tolist() == [20, 0.5]


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_actions_for_a_float64_box_are_members_on_both_runtimes(inference):
    space = spaces.Box(0.1, 0.3, (2,), np.float64)
    policy = make(actions=space, inference=inference)
    for_env, columns = policy.driver.acting.act([np.ones((50, 3), np.float32)])
    assert all(action in space for action in for_env)
    assert for_env.dtype == np.float64
    assert columns["actions"].dtype == np.float32
