"""Inference backends by name, and the supported ONNX opsets. Does not import TensorFlow.

Each value of the setting `inference` refers to a `RuntimeSpec` (`program/runtimes/runtime.py`) by
import path. To add a backend, define its `RuntimeSpec` and add a line here; "auto" takes the first
backend that fits and can be built.
"""

ONNX_OPSETS = range(11, 19)
"""The supported ONNX opsets; old ones lack operators that some networks need."""

ACTING_RUNTIMES = {
    "onnx": "tfpolicies.program.inference:ONNX",
    "tf": "tfpolicies.program.inference:TENSORFLOW",
}
