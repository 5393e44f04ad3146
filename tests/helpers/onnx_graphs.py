"""Parts of ONNX models, and a model in the disguise of another format."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def value(name: str, kind: int = TensorProto.FLOAT, shape: Any = None) -> onnx.ValueInfoProto:
    """Returns an input or output of a graph."""
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name: str, array: Any) -> onnx.TensorProto:
    """Returns a weight."""
    return numpy_helper.from_array(np.asarray(array), name)


def graph_before(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    constants: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    """Returns a copy of a model that reads `harm` in place of its observation.

    Args:
        model: with an input `obs`.
        nodes: compute `harm` from `obs`.
        constants: that they read.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        node.input[:] = ["harm" if name == "obs" else name for name in node.input]
    for node in reversed(nodes):
        result.graph.node.insert(0, node)
    result.graph.initializer.extend(constants)
    return result


def disguise(content: bytes) -> bytes:
    """Returns a model in ONNX Runtime's own format that is legal ONNX without a node, too.

    The format begins with the offset of its first table, and `08 00 09 00` is a field of ONNX, as
    is what follows. So the table is copied to the place that these bytes name.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.save_model_format", "ORT")
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = f"{folder}/model.ort"
        onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        saved = Path(options.optimized_model_filepath).read_bytes()
    (root,) = struct.unpack_from("<I", saved)
    fields = root - struct.unpack_from("<i", saved, root)[0]
    fields_size, table_size = struct.unpack_from("<HH", saved, fields)
    place = struct.unpack("<I", b"\x08\x00\x09\x00")[0]
    base = -(-(place + table_size) // 16) * 16
    table = bytearray(saved[root : root + table_size])
    struct.pack_into("<i", table, 0, place - (base + fields))
    for at in struct.unpack_from(f"<{fields_size // 2 - 2}H", saved, fields + 4):
        if at:
            target = base + root + at + struct.unpack_from("<I", saved, root + at)[0]
            struct.pack_into("<I", table, at, target - (place + at))
    result = bytearray(base) + saved
    result[place : place + table_size] = table
    result[:8] = b"\x08\x00\x09\x00ORTM"
    rest = len(result) - 17  # all of it is one field that ONNX does not know
    size = (rest & 127 | 128, rest >> 7 & 127 | 128, rest >> 14 & 127 | 128, rest >> 21)
    result[11:17] = b"\xa2\x06" + bytes(size)
    return bytes(result)
