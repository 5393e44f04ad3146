"""Operators of TensorFlow that tf2onnx lacks, composed of operators of ONNX.

The operators used are in every supported opset. A difference is as exact as a float32 near 1, as in
ONNX's own Elu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tf2onnx


def _convert_erfc(
    context: tf2onnx.graph.Graph, node: tf2onnx.graph.Node, name: str, args: Sequence[str]
) -> None:
    """Converts erfc(x), by which Keras computes `gelu`, to 1 - erf(x)."""
    one, erf = _make_one(context, node), _make_node(context, node, "Erf", node.input)
    _replace(context, node, "Sub", [one, erf])


def _convert_expm1(
    context: tf2onnx.graph.Graph, node: tf2onnx.graph.Node, name: str, args: Sequence[str]
) -> None:
    """Converts expm1(x), by which Keras computes `celu`, to exp(x) - 1."""
    one, exp = _make_one(context, node), _make_node(context, node, "Exp", node.input)
    _replace(context, node, "Sub", [exp, one])


HANDLERS: dict[str, tuple[Any, list[Any]]] = {
    "Erfc": (_convert_erfc, []),
    "Expm1": (_convert_expm1, []),
}
"""The `custom_op_handlers` of tf2onnx, by operator: each replaces a node of its graph."""


def _make_one(context: tf2onnx.graph.Graph, node: tf2onnx.graph.Node) -> str:
    """Adds the constant 1 to the graph of a node, with its dtype; returns the name."""
    from tf2onnx.utils import make_name, map_onnx_to_numpy_type

    one = np.ones((), map_onnx_to_numpy_type(node.output_dtypes[0]))
    return str(context.make_const(make_name("one"), one).output[0])


def _make_node(
    context: tf2onnx.graph.Graph, node: tf2onnx.graph.Node, operator: str, inputs: list[str]
) -> str:
    """Adds a node with the shape and dtype of another node's output; returns its output."""
    shapes, dtypes = node.output_shapes, node.output_dtypes
    node = context.make_node(operator, inputs, shapes=shapes, dtypes=dtypes)
    return str(node.output[0])


def _replace(
    context: tf2onnx.graph.Graph, node: tf2onnx.graph.Node, operator: str, inputs: list[str]
) -> None:
    """Replaces a node by one with the same name and output."""
    options = {"name": node.name, "outputs": node.output}
    shapes, dtypes = node.output_shapes, node.output_dtypes
    context.remove_node(node.name)
    context.make_node(operator, inputs, shapes=shapes, dtypes=dtypes, **options)
