"""Rewrites of converted graphs, which compute the same in less time."""

import numpy as np
import onnx
import pytest
import tensorflow as tf

from helpers.factories import OBS, TWO, make
from helpers.serving import MATRIX
from tfpolicies.program.runtimes.onnx import convert, make_cpu_session

pytestmark = pytest.mark.core

OTHER_DTYPES = (tf.float16, tf.float64, tf.int32)


def convert_function(function, *specs):
    traced = tf.function(function, input_signature=specs, autograph=False)
    return convert(traced, specs, ["result"])


def run(content, **inputs):
    (result,) = make_cpu_session(content).run(None, inputs)
    return result


def get_kinds(content):
    return [node.op_type for node in onnx.load_from_string(content).graph.node]


def image(*shape, dtype=tf.float32):
    return tf.TensorSpec([None, *shape], dtype, name="image")


@pytest.mark.parametrize("strides", [1, 4])
def test_a_convolution_that_covers_its_image_is_a_product(strides):
    rng = np.random.default_rng(0)
    kernel = tf.constant(rng.normal(size=(3, 5, 2, 4)), tf.float32)
    content = convert_function(
        lambda x: tf.nn.relu(tf.nn.conv2d(x, kernel, strides, "VALID") + 0.5), image(3, 5, 2)
    )
    assert "Conv" not in get_kinds(content)
    assert "MatMul" in get_kinds(content)
    for rows in (1, 3):
        x = rng.normal(size=(rows, 3, 5, 2)).astype(np.float32)
        expected = np.maximum(np.einsum("bhwi,hwio->bo", x, kernel) + 0.5, 0)[:, None, None]
        np.testing.assert_allclose(run(content, image=x), expected, rtol=0, atol=1e-5)


def test_its_kernel_may_be_an_input():
    content = convert_function(
        lambda x, kernel: tf.nn.conv2d(x, kernel, 1, "VALID"),
        image(2, 2, 3),
        tf.TensorSpec([2, 2, 3, 4], name="kernel"),
    )
    x = np.arange(24, dtype=np.float32).reshape(2, 2, 2, 3)
    kernel = np.linspace(-1, 1, 48, dtype=np.float32).reshape(2, 2, 3, 4)
    expected = x.reshape(2, 12) @ kernel.reshape(12, 4)
    actual = run(content, image=x, kernel=kernel)[:, 0, 0]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert {"Conv", "Transpose"}.isdisjoint(get_kinds(content))  # the kernel is not transposed


@pytest.mark.parametrize(
    ("shape", "kernel", "padding", "image_shape"),
    [
        ((2, 2, 3, 4), (2, 2), "VALID", (4, 4, 3)),  # smaller than the image
        ((2, 2, 3, 4), (2, 2), "SAME", (2, 2, 3)),  # goes over its border
        ((1, 1, 3, 4), (1, 1), "VALID", (1, 1, 3)),  # a product already
        ((2, 2, 1, 4), (2, 2), "VALID", (2, 2, 2)),  # in two groups of channels
        ((2, 2, 3, 4), (2, 2), "VALID", (None, None, 3)),  # of images of any size
    ],
)
def test_other_convolutions_stay(shape, kernel, padding, image_shape):
    weights = tf.constant(np.linspace(-1, 1, np.prod(shape)).reshape(shape), tf.float32)

    def convolve(x):
        return tf.nn.conv2d(x, weights, 1, padding)

    content = convert_function(convolve, image(*image_shape))
    assert "Conv" in get_kinds(content)
    sizes = [size or side for size, side in zip(image_shape, (*kernel, 3), strict=True)]
    x = np.random.default_rng(1).normal(size=(2, *sizes)).astype(np.float32)
    if shape[2] == sizes[2]:  # TensorFlow has no groups on a CPU
        np.testing.assert_allclose(run(content, image=x), convolve(x), rtol=0, atol=1e-5)


def scale_as(dtype, scale):
    return lambda x: tf.cast(x, dtype) * tf.constant(scale, dtype)


@pytest.mark.parametrize("dtype", [tf.uint8, tf.int8])
def test_bytes_become_floats_and_are_scaled_by_one_operation_to_the_same_bits(dtype):
    function = scale_as(tf.float32, np.float32(1 / 255))
    content = convert_function(function, image(256, dtype=dtype))
    assert get_kinds(content) == ["DequantizeLinear"]
    x = np.arange(256, dtype=np.uint8).view(dtype.as_numpy_dtype)[None]
    np.testing.assert_array_equal(run(content, image=x), x * np.float32(1 / 255))


def add_half(x):
    floats = tf.cast(x, tf.float32)
    return floats * np.float32(0.5) + floats


def branch(x):
    floats = tf.cast(x, tf.float32)
    chosen = tf.cond(tf.reduce_sum(floats) > 2, lambda: floats + 1, lambda: floats - 1)
    return chosen + floats * np.float32(0.5)


@pytest.mark.parametrize(
    ("function", "row", "expected", "kinds"),
    [
        (add_half, [0, 1, 2, 255], [0, 1.5, 3, 382.5], None),  # another node reads the floats
        (branch, [2, 4], [4, 7], None),
        *((scale_as(x, 3), [0, 7, 255], [0, 21, 765], ["Cast", "Mul"]) for x in OTHER_DTYPES),
        (scale_as(tf.float32, [1.0, 2.0]), [3, 4], [3, 8], ["Cast", "Mul"]),
    ],
)
def test_bytes_that_are_also_used_otherwise_stay(function, row, expected, kinds):
    content = convert_function(function, image(len(row), dtype=tf.uint8))
    assert kinds is None or get_kinds(content) == kinds
    np.testing.assert_array_equal(run(content, image=np.array([row], np.uint8)), [expected])


def test_an_export_of_images_has_both(tmp_path):
    policy = make(**{"obs": OBS, "actions": TWO, **MATRIX["image"]})
    kinds = get_kinds(policy.export_model(tmp_path, onnx=True).path.read_bytes())
    assert "DequantizeLinear" in kinds
    assert kinds.count("Conv") == 2  # the first of actor and critic; the second covers its input
