"""Iterates over the nodes of ONNX models, and removes the parts that no output needs.

Models are read and written by protobuf messages that declare only the required fields, so that
servers do not need the package `onnx`. Protobuf preserves all other fields of a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    import onnx

_FIELDS: dict[str, dict[str, tuple[int, str, bool]]] = {
    "Model": {"graph": (7, "Graph", False)},
    "Graph": {
        "node": (1, "Node", True),
        "initializer": (5, "Tensor", True),
        "output": (12, "Value", True),
    },
    "Node": {
        "input": (1, "", True),
        "output": (2, "", True),
        "attribute": (5, "Attribute", True),
    },
    "Attribute": {"g": (6, "Graph", False), "graphs": (11, "Graph", True)},
    "Tensor": {"name": (8, "", False)},
    "Value": {"name": (1, "", False)},
}
"""The fields of the messages in ONNX's `onnx.proto` that are read here, by name: the number, the
message in it ("" for a string), and whether it is repeated."""


def iter_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yields nodes, each followed by those of its inner graphs: the bodies of Loop and If."""
    for node in nodes:
        yield node
        for graph in _inner_graphs(node):
            yield from iter_nodes(graph.node)


def _inner_graphs(node: onnx.NodeProto) -> Iterator[Any]:
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)


def remove_outputs(content: bytes, names: Collection[str]) -> bytes:
    """Returns a model without some outputs and the nodes that only they need.

    ONNX Runtime runs every node of a graph, whichever outputs are requested.

    Args:
        content: the bytes of an ONNX file.
        names: names of the outputs; those that the model does not have are ignored.
    """
    model = _model_class().FromString(content)
    _remove_unless(model.graph.output, lambda output: output.name not in names)
    prune(model.graph)
    return bytes(model.SerializeToString())


@functools.cache
def _model_class() -> Any:
    """Returns the protobuf message class of ONNX models, with the fields of `_FIELDS`."""
    field_class = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="parts_of_onnx.proto", package="parts_of_onnx")
    for message, fields in _FIELDS.items():
        descriptor = file.message_type.add(name=message)
        for name, (number, inner, is_repeated) in fields.items():
            descriptor.field.add(
                name=name,
                number=number,
                label=field_class.LABEL_REPEATED if is_repeated else field_class.LABEL_OPTIONAL,
                type=field_class.TYPE_MESSAGE if inner else field_class.TYPE_STRING,
                type_name=f".{file.package}.{inner}" if inner else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    name = f"{file.package}.Model"
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def prune(graph: onnx.GraphProto) -> None:
    """Deletes the nodes and weights that no output of a graph needs, in place."""
    needed = {output.name for output in graph.output}

    def is_needed(node: onnx.NodeProto) -> bool:
        is_read = not needed.isdisjoint(node.output)
        if is_read:
            needed.update(_iter_inputs(node))
        return is_read

    _remove_unless(
        graph.node, is_needed
    )  # from the last to the first: nodes come after those they read
    _remove_unless(graph.initializer, lambda tensor: tensor.name in needed)


def _remove_unless(parts: list[Any], is_kept: Callable[[Any], bool]) -> None:
    """Deletes the parts of a graph that are not kept, from the last to the first."""
    for i in reversed(range(len(parts))):
        if not is_kept(parts[i]):
            del parts[i]


def _iter_inputs(node: onnx.NodeProto) -> Iterator[str]:
    """Yields the names that a node reads, including those that its inner graphs read."""
    for inner_node in iter_nodes([node]):
        yield from filter(None, inner_node.input)  # a missing optional input has no name
        for graph in _inner_graphs(inner_node):
            yield from (output.name for output in graph.output)
