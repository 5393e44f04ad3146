"""TensorFlow functions in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from tfpolicies.program.runtimes.onnx import convert


def load_in_onnx_runtime(
    function: Any, signature: Sequence[Any], names: Sequence[str]
) -> Callable[[Mapping[str, Any]], list[np.ndarray]]:
    """Converts a TensorFlow function; returns one of its inputs by name that runs the graph.

    Inputs that the graph does not read are left out.
    """
    session = onnxruntime.InferenceSession(
        convert(function, signature, names), providers=["CPUExecutionProvider"]
    )
    read = {node.name for node in session.get_inputs()}

    def run(inputs: Mapping[str, Any]) -> list[np.ndarray]:
        fed = {name: np.asarray(x) for name, x in inputs.items() if name in read}
        return session.run(list(names), fed)

    return run
