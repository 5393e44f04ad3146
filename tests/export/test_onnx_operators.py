"""Activations for which TensorFlow has operators of its own run in every form of an export."""

import math

import keras
import numpy as np
import onnxruntime
import pytest
import tensorflow as tf

from helpers import factories
from tfpolicies.base.acting_runtimes import ONNX_OPSETS
from tfpolicies.program.runtimes.onnx import convert, make_cpu_session

pytestmark = pytest.mark.usefixtures("kept_programs")


def gelu_by_tanh(x):
    return keras.activations.gelu(x, approximate=True)


def right_gelu(x):
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def right_gelu_by_tanh(x):
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def right_celu(x):
    return max(x, 0) + math.expm1(min(x, 0))


ACTIVATIONS = {
    "gelu": (keras.activations.gelu, right_gelu),
    "gelu_by_tanh": (gelu_by_tanh, right_gelu_by_tanh),
    "celu": (keras.activations.celu, right_celu),
}


def run(function, x, opset):
    spec = tf.TensorSpec([None], tf.float32, name="x")
    traced = tf.function(function, input_signature=[spec], autograph=False)
    return make_cpu_session(convert(traced, [spec], ["y"], opset)).run(["y"], {"x": x})[0]


@pytest.mark.core
@pytest.mark.parametrize("opset", ONNX_OPSETS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_exact_in_every_opset(name, opset):
    activation, right = ACTIVATIONS[name]
    x = np.linspace(-8, 8, 321, dtype=np.float32)

    y = run(activation, x, opset)

    np.testing.assert_allclose(y, [right(float(each)) for each in x], rtol=1e-6, atol=6e-7)


def test_an_activation_in_a_loop_is_exact():
    def looping(x):
        return tf.while_loop(
            lambda i, _: i < tf.cast(tf.math.ceil(x[0]), tf.int32),
            lambda i, y: (i + 1, keras.activations.gelu(y)),
            (0, x),
        )[1]

    y = run(looping, np.float32([2, -1]), ONNX_OPSETS[-1])

    expected = [right_gelu(right_gelu(x)) for x in (2.0, -1.0)]
    np.testing.assert_allclose(y, expected, atol=6e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_policy_with_such_an_activation_acts_and_is_exported(name, tmp_path):
    def network(obs_space, num_outputs):
        hidden = keras.layers.Dense(8, activation=ACTIVATIONS[name][0])
        return keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(2)])

    acting = factories.make(model={"custom_model": network}, inference="onnx")
    policy = factories.varied(factories.make(model={"custom_model": network}))
    acting.set_weights(policy.get_weights())
    obs = 3 * factories.rows_of(factories.OBS, 50)

    logits = policy.compute_actions(obs, explore=False).extras["action_dist_inputs"]
    by_onnx = acting.compute_actions(obs, explore=False).extras["action_dist_inputs"]

    np.testing.assert_allclose(by_onnx, logits, rtol=1e-5, atol=2e-6)
    for opset in (ONNX_OPSETS[0], ONNX_OPSETS[-1]):
        result = policy.export_model(tmp_path / str(opset), onnx=opset)
        session = onnxruntime.InferenceSession(result.path, providers=["CPUExecutionProvider"])
        (exported,) = session.run(["action_dist_inputs"], {"obs": obs})
        np.testing.assert_allclose(exported, logits, rtol=1e-5, atol=2e-6)
    assert policy.export_model(tmp_path / "saved").parity.largest_difference <= 1e-5
    assert policy.export_model(tmp_path / "lite", litert=True).parity.largest_difference <= 1e-5
