"""From normalised actions to the environment's: always members of the space, mapped once."""

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tiny import make

from tfpolicies.models.action_pipeline import ActionPipeline

BOUNDED = spaces.Box(np.array([0.0, -2.0], np.float32), np.array([10.0, 2.0], np.float32))
HALF = spaces.Box(
    np.array([0.0, -np.inf, -np.inf], np.float32), np.array([np.inf, 1.0, np.inf], np.float32)
)


def to_env(space, actions, *, normalize=True, clip=False):
    dtype = np.int64 if isinstance(space, spaces.Discrete) else np.float32
    pipeline = ActionPipeline(space, normalize, clip)
    return pipeline.to_env(tf.constant(np.asarray(actions, dtype))).numpy()


@pytest.mark.core
def test_the_unit_interval_is_mapped_to_the_bounds_and_clipped():
    mapped = to_env(BOUNDED, [[-1, -1], [0, 0], [1, 1], [0.5, -0.5], [-7, 7]])
    assert mapped.tolist() == [[0, -2], [5, 0], [10, 2], [7.5, -1], [0, 2]]


@pytest.mark.core
def test_a_half_bounded_component_is_clipped_to_the_bound_it_has():
    assert to_env(HALF, [[-3, 3, 99], [3, -3, -99]]).tolist() == [[0, 1, 99], [3, -3, -99]]


def test_without_normalisation_actions_are_clipped_or_left():
    assert to_env(BOUNDED, [[11, -1]], normalize=False, clip=True).tolist() == [[10, -1]]
    assert to_env(BOUNDED, [[11, -1]], normalize=False).tolist() == [[11, -1]]
    assert ActionPipeline(BOUNDED, False, False).is_identity


def test_discrete_actions_begin_at_the_start_of_the_space():
    space = spaces.Discrete(3, start=-1)
    assert to_env(space, [0, 2]).tolist() == [-1, 1]
    assert ActionPipeline(space, True, False).from_env([-1, 1]).tolist() == [0, 2]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_actions_are_members_of_a_box_of_any_float_type(dtype):
    space = spaces.Box(0.1, 0.3, (2,), dtype)
    for action in to_env(space, [[-9, -1], [0, 0.3], [1, 9]]):
        assert action in space
        assert action.dtype == dtype


def test_a_box_of_one_point_or_of_all_floats_still_gives_members():
    point = spaces.Box(np.float32(2), np.float32(2), (1,))
    assert to_env(point, [[-1], [5]]).tolist() == [[2], [2]]
    assert ActionPipeline(point, True, False).from_env([[2.0]]).tolist() == [[2.0]]
    largest = np.finfo(np.float32).max
    wide = spaces.Box(-largest, largest, (1,))
    assert to_env(wide, [[0], [1], [-2]]).tolist() == [[0], [largest], [-largest]]


FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)  # TensorFlow flushes those to 0
BOUNDS = st.tuples(FLOATS | st.just(-np.inf), FLOATS | st.just(np.inf)).filter(
    lambda b: b[0] < b[1]
)


@given(st.lists(BOUNDS, min_size=1, max_size=3), FLOATS, st.sampled_from([np.float32, np.float64]))
def test_every_normalised_action_becomes_a_member_of_the_box(bounds, value, dtype):
    low, high = (np.array(side, dtype) for side in zip(*bounds, strict=True))
    space = spaces.Box(low, high, dtype=dtype)
    (action,) = to_env(space, [[value] * len(bounds)])
    assert action in space


@given(st.lists(BOUNDS, min_size=1, max_size=3), st.floats(-1, 1, width=32))
def test_from_env_inverts_to_env(bounds, value):
    low, high = (np.array(side, np.float64) for side in zip(*bounds, strict=True))
    space = spaces.Box(low, high, dtype=np.float64)
    inside = np.clip(
        value, np.where(np.isfinite(high), -1, low), np.where(np.isfinite(low), 1, high)
    )
    normalised = np.where(np.isfinite(low) & np.isfinite(high), value, inside)
    pipeline = ActionPipeline(space, True, False)
    again = pipeline.from_env(to_env(space, normalised[None]))[0]
    width = np.where(np.isfinite(high - low), high - low, 1.0)
    scale = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)) / width)
    finite = np.isfinite(scale)
    error = np.abs(again - normalised.astype(np.float32))[finite]
    assert (error <= 1e-6 + 1e-14 * scale[finite]).all()


@pytest.mark.core
def test_a_policy_acts_normalised_and_maps_each_action_once():
    policy = make(actions=BOUNDED)
    obs = np.ones((40, 3), np.float32)
    batch = policy.compute_actions(obs, explore=True)
    assert np.abs(batch.actions).max() > 1  # a Gaussian's samples, not yet clipped
    env_actions = np.stack([policy.env_action(action) for action in batch.actions])
    np.testing.assert_allclose(env_actions, to_env(BOUNDED, batch.actions), rtol=1e-6)
    assert all(action in BOUNDED for action in env_actions)
    for_env, columns = policy.act_columns([obs])
    np.testing.assert_allclose(for_env, to_env(BOUNDED, columns["actions"]), rtol=1e-6)


def test_env_action_takes_its_rules_from_the_call_or_from_the_config():
    policy = make(actions=BOUNDED, clip_actions=True)
    action = np.array([2.0, 0.5], np.float32)
    assert policy.env_action(action).tolist() == [10, 1]
    assert policy.env_action(action, unsquash=False).tolist() == [2, 0.5]
    assert policy.env_action(np.array([20.0, 0.5]), unsquash=False).tolist() == [10, 0.5]
    assert policy.env_action([20.0, 0.5], unsquash=False, clip=False).tolist() == [20, 0.5]


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_actions_for_a_float64_box_are_members_on_both_runtimes(inference):
    space = spaces.Box(0.1, 0.3, (2,), np.float64)
    policy = make(actions=space, inference=inference)
    for_env, columns = policy.act_columns([np.ones((50, 3), np.float32)])
    assert all(action in space for action in for_env)
    assert for_env.dtype == np.float64
    assert columns["actions"].dtype == np.float32
