"""ViewRequirement: source, shift and use of a column."""

import dataclasses

import gymnasium
import numpy as np
import pytest

from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import BatchError, SpaceError

pytestmark = pytest.mark.core


def test_the_default_is_the_current_float_of_the_same_column():
    view = ViewRequirement()
    assert view.data_col is None
    assert view.space == gymnasium.spaces.Box(-np.inf, np.inf, shape=(), dtype=np.float32)
    assert view.shift_arr.tolist() == [0]
    assert view.batch_repeat_value == 1
    assert view.used_for_compute_actions
    assert view.used_for_training
    assert view == ViewRequirement()


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (-1, [-1]),
        ([-2, 0], [-2, 0]),
        (np.array([-1, 0]), [-1, 0]),
        ("-3:-1", [-3, -2, -1]),
        ("-6:0:2", [-6, -4, -2, 0]),
    ],
)
def test_a_shift_is_a_number_several_or_a_range_with_both_ends(shift, expected):
    view = ViewRequirement("obs", shift=shift)
    assert view.shift_arr.tolist() == expected
    assert view.shift_arr.dtype == np.int64
    assert view == dataclasses.replace(view)
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.shift = 0
    pruned = dataclasses.replace(view, used_for_training=False)
    assert not pruned.used_for_training
    assert pruned.shift_arr.tolist() == expected


@pytest.mark.parametrize(
    "shift", ["", "3", "a:b", "1:2:3:4", "0:-3", "0:4:0", 1.5, [], [0.5], None]
)
def test_a_malformed_shift_is_refused(shift):
    with pytest.raises(AssertionError, match="`shift`"):
        ViewRequirement(shift=shift)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_col", 3),
        ("data_col", ""),
        ("index", "1"),
        ("batch_repeat_value", 0),
        ("used_for_training", 1),
    ],
)
def test_malformed_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        ViewRequirement(**{name: value})
    with pytest.raises(SpaceError, match="Gymnasium"):
        ViewRequirement(space=(4,))


def test_acting_cannot_look_ahead():
    ViewRequirement("obs", shift=1, used_for_compute_actions=False).require_causal("new_obs")
    ViewRequirement("obs", shift="-3:0").require_causal("window")
    with pytest.raises(BatchError, match="'new_obs' has the shift 1"):
        ViewRequirement("obs", shift=1).require_causal("new_obs")
