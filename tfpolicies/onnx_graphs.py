"""What stands in ONNX models, and models without what nobody needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import onnx


def with_inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields nodes, and behind each one those of its inner graphs: the bodies of Loop and If."""
    for node in nodes:
        yield node
        for graph in _inner_graphs(node):
            yield from with_inner(graph.node)


def _inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)


def without_outputs(content: bytes, names: Collection[str]) -> bytes:
    """Returns a model that lacks some outputs and whatever only they need.

    ONNX Runtime runs every node of a graph, whichever outputs it is asked for.

    Args:
        content: of an ONNX file.
        names: of the outputs; those that the model does not have are ignored.
    """
    model = onnx.load_from_string(content)
    _keep(model.graph.output, lambda output: output.name not in names)
    prune(model.graph)
    return model.SerializeToString()


def prune(graph: Any) -> None:
    """Deletes the nodes and weights that no output of a graph needs, in place."""
    needed = {output.name for output in graph.output}

    def is_needed(node: onnx.NodeProto) -> bool:
        found = not needed.isdisjoint(node.output)
        if found:
            needed.update(_read_by(node))
        return found

    _keep(graph.node, is_needed)  # from the last to the first: nodes come behind those they read
    _keep(graph.initializer, lambda tensor: tensor.name in needed)


def _keep(parts: Any, is_kept: Callable[[Any], bool]) -> None:
    """Deletes the parts of a graph that are not kept, looking at the last one first."""
    for i in reversed(range(len(parts))):
        if not is_kept(parts[i]):
            del parts[i]


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yields the names that a node reads, those that its inner graphs read included."""
    for each in with_inner([node]):
        yield from filter(None, each.input)  # an input that is left out has no name
        for graph in _inner_graphs(each):
            yield from (output.name for output in graph.output)
