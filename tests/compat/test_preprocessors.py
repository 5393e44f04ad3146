"""Preprocessors under RLlib's names, and flat observations in models."""

import types

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import OBS, TWO, make
from helpers.rllib_models import with_model
from tfpolicies import PGTF2Policy, compat, errors

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
        (OBS, compat.NoPreprocessor, (3,)),
        (spaces.Box(-1, 1, (), np.float32), compat.NoPreprocessor, ()),
        (BITS, compat.NoPreprocessor, (3,)),
        (TWO, compat.OneHotPreprocessor, (2,)),
        (spaces.MultiDiscrete([[2, 2], [3, 3]]), compat.OneHotPreprocessor, (10,)),
        (spaces.Tuple([TWO, OBS]), compat.TupleFlatteningPreprocessor, (5,)),
        (NESTED, compat.DictFlatteningPreprocessor, (9,)),
        (FRAMES, compat.GenericPixelPreprocessor, (210, 160, 3)),
        (RAM, compat.AtariRamPreprocessor, (128,)),
    ],
    ids=str,
)
def test_the_class_of_a_preprocessor_depends_on_the_space(space, kind, shape):
    result = compat.ModelCatalog.get_preprocessor(types.SimpleNamespace(observation_space=space))
    assert type(result) is kind is compat.get_preprocessor(space)
    assert isinstance(result, compat.Preprocessor)
    assert result.shape == shape == result.observation_space.shape
    assert result.size == np.prod(shape)
    assert type(compat.ModelCatalog.get_preprocessor(space, compat.MODEL_DEFAULTS)) is kind


def test_bits_become_floats_with_include_multi_binary():
    result = compat.ModelCatalog.get_preprocessor_for_space(BITS, include_multi_binary=True)
    assert type(result) is compat.MultiBinaryPreprocessor is compat.get_preprocessor(BITS, True)
    bits = result.transform(np.array([1, 0, 1], np.int8))
    assert (bits.tolist(), bits.dtype) == ([1, 0, 1], np.float32)
    assert result.observation_space == spaces.Box(0, 1, (3,), np.float32)
    assert result.observation_space.original_space is BITS


def test_rows_have_choices_one_hot_and_pixels_unchanged():
    result = compat.get_preprocessor(NESTED)(NESTED)
    row = result.transform(ONE)
    assert (row.tolist(), row.dtype) == (ROW, np.float32)
    assert result.observation_space.original_space is NESTED
    image = compat.get_preprocessor(IMAGE)(IMAGE)
    np.testing.assert_array_equal(image.transform(ONE["b"][1]), ONE["b"][1])
    assert image.observation_space is IMAGE
    choices = compat.get_preprocessor(TWO)(TWO).transform_batch(np.array([1, 0]))
    assert choices.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(errors.ObservationError, match="no part 'b/0'"):
        result.transform({"a": 1})


def test_a_policy_acts_on_the_rows_of_its_preprocessor():
    policy = make(obs=NESTED)
    rows = compat.ModelCatalog.get_preprocessor(NESTED).transform(ONE)
    expected = policy.compute_single_action(ONE, explore=False)[2]["action_dist_inputs"]
    actual = policy.compute_single_action(rows, explore=False)[2]["action_dist_inputs"]
    np.testing.assert_array_equal(actual, expected)


def test_preprocessors_refuse_wrong_spaces_and_options():
    with pytest.raises(
        errors.SpaceError, match=r"obs_space must be a gymnasium\.Space, got 'CartPole'"
    ):
        compat.ModelCatalog.get_preprocessor("CartPole")
    with pytest.raises(errors.UnsupportedSpaceError, match="Text"):
        compat.ModelCatalog.get_preprocessor(spaces.Text(3))
    with pytest.raises(errors.ModelSettingError, match="dims"):
        compat.ModelCatalog.get_preprocessor(OBS, {"dims": 42})


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
    assert compat.ModelCatalog.get_action_shape(space, framework="tf2") == (dtype, shape)


@pytest.mark.parametrize("lib", ["numpy", np, "tf", tf])
def test_flat_observations_are_nested_again(lib):
    space = compat.get_preprocessor(NESTED)(NESTED).observation_space
    result = compat.restore_original_dimensions(np.array([[ROW]], np.float32), space, lib)
    kind = np.ndarray if lib in ("numpy", np) else tf.Tensor
    assert isinstance(result["a"], kind)
    assert np.asarray(result["a"]).tolist() == [[[0, 1]]]
    assert np.asarray(result["b"][0]).tolist() == [[[0, 1, 1, 0, 0]]]
    assert np.asarray(result["b"][1]).tolist() == [[[[[7], [255]]]]]
    assert compat.restore_original_dimensions(result, space) is result


def test_flat_observations_of_another_width_are_refused():
    with pytest.raises(errors.ModelError, match=r"must have 9 columns, got the shape \(2, 4\)"):
        compat.restore_original_dimensions(np.zeros((2, 4)), NESTED)
    rows = np.zeros((2, 4))
    assert compat.restore_original_dimensions(rows, TWO) is rows


class Inner(compat.TFModelV2):
    def forward(self, input_dict, state, seq_lens):
        del seq_lens
        pixels = tf.reshape(input_dict["obs"]["b"][1], [-1, 2])
        return pixels + tf.reduce_sum(input_dict["obs_flat"], 1, keepdims=True), state


class Outer(compat.TFModelV2):
    """Passes flat observations on to models with the same space."""

    def __init__(self, *args):
        super().__init__(*args)
        self.inner, self.dense = Inner(*args), compat.FullyConnectedNetwork(*args)

    def forward(self, input_dict, state, seq_lens):
        flat = {"obs": input_dict["obs_flat"]}
        outputs, _ = self.inner(flat, state, seq_lens)
        return outputs + 0.0 * self.dense(flat)[0], state


def test_models_in_models_get_flat_observations_nested():
    policy = with_model(Outer, PGTF2Policy, obs=NESTED)
    for values in (ONE, np.array(ROW)):
        result = policy.compute_single_action(values, explore=False)[2]["action_dist_inputs"]
        assert result.tolist() == [272, 520]  # 7 and 255, and the sum 265 of the row
