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


class Form(enum.Enum):
    """Ways to run the minibatches of an update; the value is shown to users."""

    PLAIN = "tf.function"
    STEP = "XLA, step by step"  # a plain loop around a compiled step
    LOOP = "XLA"

    @property
    def next(self) -> Form:
        """The replacement if XLA cannot compile it, or takes too long."""
        return Form.STEP if self is Form.LOOP else Form.PLAIN


class Work(NamedTuple):
    """The operations of a traced step."""

    convolves: bool
    remembers: bool  # recurrence or attention
    branches: bool  # loops or branches, which have to be traced differently for XLA
    operations: int
    weights: int  # trainable numbers


_CONVOLUTION = re.compile(r"Conv(?!ert)|Conv2d|Dilation2D")
_LOOP = re.compile(r"^(Stateless)?While$")
_BRANCH = re.compile(r"^(Stateless)?(If|Case)$")
_RECURRENCE = re.compile(r"^CudnnRNN|LSTMBlock|^BlockLSTM|^GRUBlock")
_PRODUCT = re.compile(r"^BatchMatMul|^Einsum$")

_WEIGHTS_OF_LOOP = 100_000  # of a recurrent network; with more, only its step is compiled
_WEIGHTS_OF_STEP = 1_000_000  # of a recurrent network; with more, nothing is compiled
_MOST_OPERATIONS = 10_000  # with more, as in unrolled recurrences, XLA takes too long to compile
"""The thresholds; `docs/decisions/012-how-updates-are-compiled.md` has the measurements."""


def work_of(graph: tf.Graph) -> Work:
    """Analyses the `FuncGraph` of a function, including the functions that it calls."""
    kinds = list(_operations(graph))

    def has(*patterns: re.Pattern[str]) -> bool:
        return any(pattern.search(kind) for kind in set(kinds) for pattern in patterns)

    return Work(
        convolves=has(_CONVOLUTION),
        remembers=has(_LOOP, _RECURRENCE) or ("Softmax" in kinds and has(_PRODUCT)),
        branches=has(_LOOP, _BRANCH),
        operations=len(kinds),
        weights=sum(variable.shape.num_elements() for variable in graph.trainable_variables),
    )


def form_of(work: Work, *, may_be_plain: bool, on_cpu: bool) -> Form:
    """Returns the best way to compile an update, from the operations of its step."""
    remembers_much = on_cpu and work.remembers and work.weights > _WEIGHTS_OF_STEP
    if work.convolves or remembers_much or work.operations > _MOST_OPERATIONS:
        return Form.PLAIN if may_be_plain else Form.STEP
    if on_cpu and work.remembers and work.weights > _WEIGHTS_OF_LOOP:
        return Form.STEP
    return Form.LOOP


def _operations(graph: tf.Graph) -> Iterator[str]:
    definition = graph.as_graph_def()
    yield from (node.op for node in definition.node)
    for function in definition.library.function:
        yield from (node.op for node in function.node_def)
