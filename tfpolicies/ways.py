"""What is known without TensorFlow of the runtimes: ways of acting, and versions of ONNX.

Each way that the setting `inference` names is a `Way` of `program/runtimes/runtime.py`, by where it
is. A new one is a file that makes its `Way`, and a line here; "auto" takes the first that fits and
can be built.
"""

OPSETS = range(11, 19)
"""Versions of ONNX's operators that exports may have; old ones lack what some networks do."""

WAYS = {
    "onnx": "tfpolicies.program.inference:ONNX",
    "tf": "tfpolicies.program.inference:TENSORFLOW",
}
