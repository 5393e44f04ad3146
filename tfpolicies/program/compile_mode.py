"""Chooses how an update is compiled, from the operations of its trace.

It never depends on timings or on settings of a model, so that a seed gives the same numbers on
every machine.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tensorflow as tf


class CompileMode(enum.Enum):
    """Ways to run the minibatches of an update; the value is shown to users."""

    PLAIN = "tf.function"
    STEP = "XLA, step by step"  # a plain loop around a compiled step
    LOOP = "XLA"

    @property
    def fallback(self) -> CompileMode:
        """The replacement if XLA cannot compile it, or takes too long."""
        return CompileMode.STEP if self is CompileMode.LOOP else CompileMode.PLAIN


class GraphStats(NamedTuple):
    """The operations of a traced step."""

    has_convolutions: bool
    is_recurrent: bool  # recurrence or attention
    has_control_flow: bool  # loops or branches, which have to be traced differently for XLA
    calls_python: bool  # XLA cannot compile that
    num_operations: int
    num_weights: int  # trainable numbers


_CONVOLUTION = re.compile(r"Conv(?!ert)|Conv2d|Dilation2D")
_LOOP = re.compile(r"^(Stateless)?While$")
_BRANCH = re.compile(r"^(Stateless)?(If|Case)$")
_RECURRENCE = re.compile(r"^CudnnRNN|LSTMBlock|^BlockLSTM|^GRUBlock")
_PYTHON_CALL = re.compile(r"^(Eager)?PyFunc(Stateless)?$")
_PRODUCT = re.compile(r"^BatchMatMul|^Einsum$")

_MAX_LOOP_WEIGHTS = 100_000  # of a recurrent network; with more, only its step is compiled
_MAX_STEP_WEIGHTS = 1_000_000  # of a recurrent network; with more, nothing is compiled
_MAX_OPERATIONS = 10_000  # with more, as in unrolled recurrences, XLA takes too long to compile
"""The thresholds; `docs/decisions/012-how-updates-are-compiled.md` has the measurements."""


def analyze_graph(graph: tf.Graph) -> GraphStats:
    """Analyses the `FuncGraph` of a function, including the functions that it calls."""
    op_types = list(_iter_op_types(graph))

    def has_op(*patterns: re.Pattern[str]) -> bool:
        return any(pattern.search(op_type) for op_type in set(op_types) for pattern in patterns)

    return GraphStats(
        has_convolutions=has_op(_CONVOLUTION),
        is_recurrent=has_op(_LOOP, _RECURRENCE) or ("Softmax" in op_types and has_op(_PRODUCT)),
        has_control_flow=has_op(_LOOP, _BRANCH),
        calls_python=has_op(_PYTHON_CALL),
        num_operations=len(op_types),
        num_weights=sum(variable.shape.num_elements() for variable in graph.trainable_variables),
    )


def choose_compile_mode(stats: GraphStats, *, allow_plain: bool, on_cpu: bool) -> CompileMode:
    """Returns the best way to compile an update, from the operations of its step."""
    is_large_recurrent = on_cpu and stats.is_recurrent and stats.num_weights > _MAX_STEP_WEIGHTS
    if stats.has_convolutions or is_large_recurrent or stats.num_operations > _MAX_OPERATIONS:
        return CompileMode.PLAIN if allow_plain else CompileMode.STEP
    if stats.calls_python:
        return CompileMode.PLAIN
    if on_cpu and stats.is_recurrent and stats.num_weights > _MAX_LOOP_WEIGHTS:
        return CompileMode.STEP
    return CompileMode.LOOP


def _iter_op_types(graph: tf.Graph) -> Iterator[str]:
    definition = graph.as_graph_def()
    yield from (node.op for node in definition.node)
    for function in definition.library.function:
        yield from (node.op for node in function.node_def)
