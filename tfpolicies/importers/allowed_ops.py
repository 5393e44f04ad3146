"""Allow-list of TensorFlow operations for untrusted SavedModels.

A SavedModel is a program, and TensorFlow's operations can read and write files, open connections
and call Python. The operations in `allowed_ops.txt` only compute from their inputs and the
model's own variables. All other operations, also those of other libraries, are refused before
anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef

_LINES = resources.files(__package__).joinpath("allowed_ops.txt").read_text("utf-8").splitlines()
ALLOWED_OPERATIONS = frozenset(name for line in _LINES if line[:1] != "#" for name in line.split())
"""The names of operations that are allowed everywhere; `allowed_ops.txt` lists them."""

_SAVER_NAMES = "MergeV2Checkpoints RestoreV2 SaveV2 ShardedFilename StaticRegexFullMatch StringJoin"
SAVER_OPERATIONS = frozenset(_SAVER_NAMES.split())
"""Operations that are also allowed in a SavedModel's own saver, which is never run here."""


def find_disallowed_operations(graph: MetaGraphDef) -> list[str]:
    """Returns the names of operations that a model may not have, in order.

    Args:
        graph: a `MetaGraphDef`. None of its own nodes is run, but they show which functions save
            and restore.
    """
    functions = {each.signature.name: each for each in graph.graph_def.library.function}
    savers = {name for name, each in functions.items() if _get_operations(each) & SAVER_OPERATIONS}
    reachable = {name for name in savers if name not in _find_savers(graph)}
    reachable |= savers & {
        name for each in functions.values() for name in _iterate_references(each.node_def)
    }
    reachable |= savers & set(graph.object_graph_def.concrete_functions)
    disallowed: set[str] = set()
    for name, each in functions.items():
        allowed = ALLOWED_OPERATIONS | (frozenset() if name in reachable else SAVER_OPERATIONS)
        disallowed |= _get_operations(each) - allowed - functions.keys()
    return sorted(disallowed)


def find_mistyped_constants(graph: MetaGraphDef) -> list[str]:
    """Returns the names of constants whose value has another type than the constant, in order.

    TensorFlow 2.18 does not refuse them, and crashes the process when it reads such a value during
    shape inference.
    """
    return sorted(
        node.name
        for function in graph.graph_def.library.function
        for node in function.node_def
        if node.op == "Const" and node.attr["dtype"].type != node.attr["value"].tensor.dtype
    )


def _get_operations(function: FunctionDef) -> set[str]:
    return {node.op for node in function.node_def}


def _find_savers(graph: MetaGraphDef) -> set[str]:
    """Returns the functions that the nodes of a model's own saver call."""
    saver = graph.saver_def
    names = (saver.save_tensor_name, saver.restore_op_name)
    saver_nodes = {name.partition(":")[0] for name in names}
    return set(
        _iterate_references(node for node in graph.graph_def.node if node.name in saver_nodes)
    )


def _iterate_references(nodes: Iterable[Any]) -> Iterator[str]:
    """Yields the names of functions that nodes refer to; an operation can be a function itself."""
    for node in nodes:
        yield node.op
        for value in node.attr.values():
            yield value.func.name
            yield from (function.name for function in value.list.func)
