"""Preprocessors under RLlib's names, and what models are given of flat observations."""

import types

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import OBS, TWO, make
from tfpolicies import PGTF2Policy
from tfpolicies.compat import (
    MODEL_DEFAULTS,
    AtariRamPreprocessor,
    DictFlatteningPreprocessor,
    FullyConnectedNetwork,
    GenericPixelPreprocessor,
    ModelCatalog,
    MultiBinaryPreprocessor,
    NoPreprocessor,
    OneHotPreprocessor,
    Preprocessor,
    TFModelV2,
    TupleFlatteningPreprocessor,
    get_preprocessor,
    one_hot,
    restore_original_dimensions,
)
from tfpolicies.errors import (
    ModelError,
    ModelSettingError,
    ObservationError,
    SpaceError,
    UnsupportedSpaceError,
)

BITS = spaces.MultiBinary(3)
FRAMES = spaces.Box(0, 255, (210, 160, 3), np.uint8)
RAM = spaces.Box(0, 255, (128,), np.uint8)
IMAGE = spaces.Box(0, 255, (1, 2, 1), np.uint8)
NESTED = spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.MultiDiscrete([2, 3]), IMAGE]))
ONE = {"a": 1, "b": (np.array([1, 0]), np.array([[[7], [255]]], np.uint8))}
ROW = [0, 1, 0, 1, 1, 0, 0, 7, 255]


@pytest.mark.parametrize(
    ("space", "kind", "shape"),
    [
        (OBS, NoPreprocessor, (3,)),
        (spaces.Box(-1, 1, (), np.float32), NoPreprocessor, ()),
        (BITS, NoPreprocessor, (3,)),
        (TWO, OneHotPreprocessor, (2,)),
        (spaces.MultiDiscrete([[2, 2], [3, 3]]), OneHotPreprocessor, (10,)),
        (spaces.Tuple([TWO, OBS]), TupleFlatteningPreprocessor, (5,)),
        (NESTED, DictFlatteningPreprocessor, (9,)),
        (FRAMES, GenericPixelPreprocessor, (210, 160, 3)),
        (RAM, AtariRamPreprocessor, (128,)),
    ],
    ids=str,
)
def test_the_space_says_which_class_preprocesses(space, kind, shape):
    result = ModelCatalog.get_preprocessor(types.SimpleNamespace(observation_space=space))
    assert type(result) is kind is get_preprocessor(space)
    assert isinstance(result, Preprocessor)
    assert result.shape == shape == result.observation_space.shape
    assert result.size == np.prod(shape)
    assert type(ModelCatalog.get_preprocessor(space, MODEL_DEFAULTS)) is kind


def test_bits_become_floats_where_that_is_asked_for():
    result = ModelCatalog.get_preprocessor_for_space(BITS, include_multi_binary=True)
    assert type(result) is MultiBinaryPreprocessor is get_preprocessor(BITS, True)
    bits = result.transform(np.array([1, 0, 1], np.int8))
    assert (bits.tolist(), bits.dtype) == ([1, 0, 1], np.float32)
    assert result.observation_space == spaces.Box(0, 1, (3,), np.float32)
    assert result.observation_space.original_space is BITS


def test_rows_hold_choices_one_hot_and_pixels_as_they_are():
    result = get_preprocessor(NESTED)(NESTED)
    row = result.transform(ONE)
    assert (row.tolist(), row.dtype) == (ROW, np.float32)
    assert result.observation_space.original_space is NESTED
    with pytest.raises(ObservationError, match="no part 'b/0'"):
        result.transform({"a": 1})


def test_boxes_stay_as_they_are():
    result = get_preprocessor(IMAGE)(IMAGE)
    np.testing.assert_array_equal(result.transform(ONE["b"][1]), ONE["b"][1])
    assert result.observation_space is IMAGE


def test_a_policy_acts_on_what_its_preprocessor_makes():
    policy = make(obs=NESTED)
    rows = ModelCatalog.get_preprocessor(NESTED).transform(ONE)
    expected = policy.compute_single_action(ONE, explore=False)[2]["action_dist_inputs"]
    actual = policy.compute_single_action(rows, explore=False)[2]["action_dist_inputs"]
    np.testing.assert_array_equal(actual, expected)


def test_preprocessors_refuse_what_is_no_space_and_no_option():
    with pytest.raises(SpaceError, match=r"obs_space must be a gymnasium\.Space, got 'CartPole'"):
        ModelCatalog.get_preprocessor("CartPole")
    with pytest.raises(UnsupportedSpaceError, match="Text"):
        ModelCatalog.get_preprocessor(spaces.Text(3))
    with pytest.raises(ModelSettingError, match="dims"):
        ModelCatalog.get_preprocessor(OBS, {"dims": 42})


@pytest.mark.parametrize(
    ("space", "dtype", "shape"),
    [
        (TWO, np.int64, (None,)),
        (spaces.MultiDiscrete([2, 3]), np.int64, (None, 2)),
        (BITS, np.int8, (None, 3)),
        (spaces.Box(-1, 1, (2, 3), np.float64), tf.float32, (None, 2, 3)),
        (spaces.Box(0, 4, (2,), np.int64), tf.int32, (None, 2)),
        (spaces.Tuple([TWO, spaces.Dict(a=TWO)]), tf.int32, (None, 2)),
        (spaces.Tuple([TWO, spaces.Box(-1, 1, (2, 3))]), tf.float32, (None, 7)),
    ],
    ids=str,
)
def test_the_shape_of_actions_is_that_of_rllib(space, dtype, shape):
    assert ModelCatalog.get_action_shape(space, framework="tf2") == (dtype, shape)


def test_numbers_become_one_hot_arrays_of_a_depth():
    assert one_hot(np.array([[0], [2]]), depth=3).tolist() == [[[1, 0, 0]], [[0, 0, 1]]]
    assert one_hot(1, 2).tolist() == [0, 1]


# -- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lib", ["numpy", np, "tf", tf])
def test_flat_observations_are_nested_again(lib):
    space = get_preprocessor(NESTED)(NESTED).observation_space
    result = restore_original_dimensions(np.array([[ROW]], np.float32), space, lib)
    kind = np.ndarray if lib in ("numpy", np) else tf.Tensor
    assert isinstance(result["a"], kind)
    assert np.asarray(result["a"]).tolist() == [[[0, 1]]]
    assert np.asarray(result["b"][0]).tolist() == [[[0, 1, 1, 0, 0]]]
    assert np.asarray(result["b"][1]).tolist() == [[[[[7], [255]]]]]
    assert restore_original_dimensions(result, space) is result


def test_flat_observations_of_another_width_are_refused():
    with pytest.raises(ModelError, match=r"must have 9 columns, got the shape \(2, 4\)"):
        restore_original_dimensions(np.zeros((2, 4)), NESTED)
    rows = np.zeros((2, 4))
    assert restore_original_dimensions(rows, TWO) is rows


class Inner(TFModelV2):
    """Reads one part of nested observations."""

    def forward(self, input_dict, state, seq_lens):
        del seq_lens
        pixels = tf.reshape(input_dict["obs"]["b"][1], [-1, 2])
        return pixels + tf.reduce_sum(input_dict["obs_flat"], 1, keepdims=True), state


class Outer(TFModelV2):
    """Hands flat observations to models that are told the same space."""

    def __init__(self, *args):
        super().__init__(*args)
        self.inner, self.dense = Inner(*args), FullyConnectedNetwork(*args)

    def forward(self, input_dict, state, seq_lens):
        flat = {"obs": input_dict["obs_flat"]}
        outputs, _ = self.inner(flat, state, seq_lens)
        return outputs + 0.0 * self.dense(flat)[0], state


def test_a_model_is_given_flat_observations_nested_whoever_calls_it():
    ModelCatalog.register_custom_model("outer of flat observations", Outer)
    policy = make(PGTF2Policy, obs=NESTED, model={"custom_model": "outer of flat observations"})
    for values in (ONE, np.array(ROW)):
        result = policy.compute_single_action(values, explore=False)[2]["action_dist_inputs"]
        assert result.tolist() == [272, 520]  # 7 and 255, and the sum 265 of the row
