"""Checks of the size of a model before its weights are allocated."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpolicies.errors import CheckpointError, ModelError
from tfpolicies.models.work import get_work_limit
from tfpolicies.system.memory import available_memory, readable_size

Shape = tuple[int, ...]

_COPIES = 6  # of each weight while a policy is built: model, optimizer slots, policy state
_ROWS = 2  # of a trial call
_LARGEST_OUTPUT = 1 << 24  # numbers per row that a layer described by a file may output


class Extent(NamedTuple):
    """Shapes of a model's weights and outputs."""

    weights: list[Shape]  # of its variables without seeds, since unused ones are not stored
    outputs: list[Shape]  # of the tensors between its layers, without the batch axis


class Stored(NamedTuple):
    """The weights in a file, to which a described model is compared."""

    source: str  # the file, for messages
    numbers: int  # the number of weights in all
    shapes: Counter[Shape] | None  # of its arrays; None if only `numbers` is known


_stored: ContextVar[Stored | None] = ContextVar("stored", default=None)


@contextlib.contextmanager
def built_from(source: str, weights: Iterable[Shape] | int) -> Iterator[None]:
    """Limits the weights of models built in this context to those that a file holds.

    Args:
        source: where the file is, for messages.
        weights: the shapes of its arrays; or an upper bound of the number of weights.
    """
    if isinstance(weights, int):
        stored = Stored(source, weights, None)
    else:
        shapes = Counter(map(tuple, weights))
        stored = Stored(source, sum(math.prod(x) * n for x, n in shapes.items()), shapes)
    token = _stored.set(stored)
    try:
        yield
    finally:
        _stored.reset(token)


def is_built_from_file() -> bool:
    """Returns whether models are currently built from a file (see `built_from`)."""
    return _stored.get() is not None


def require_room(make: Callable[[], Any], what: str, *, may_fail: bool = False) -> None:
    """Checks a model's size without allocating it.

    Args:
        make: builds the model; it is called in a separate graph and thread, and its result is
            discarded.
        description: the model's name in messages.
        allow_failure: whether to skip the check for a user's model that only runs eagerly.

    Raises:
        CheckpointError: if a file describes the model (`built_from`) and holds other weights.
        ModelError: if it needs more memory than there is.
    """
    try:
        extent = extent_of(make)
    except Exception:
        if may_fail and not is_built_from_file():
            return
        raise
    _require_size(extent, what)


def require_room_for_rows(shapes: Sequence[Shape], what: str) -> None:
    """Checks that rows of these shapes can be allocated to try a model.

    Raises:
        CheckpointError: if a file describes them, and they are implausibly large.
        ModelError: if they need more memory than there is.
    """
    _require_size(Extent([], list(shapes)), what)


def _require_size(extent: Extent, what: str) -> None:
    stored, room = _stored.get(), available_memory()
    if stored is not None:
        _compare(extent, stored)
    numbers = sum(map(math.prod, extent.weights))
    weight, output = (max(x, key=math.prod, default=()) for x in extent)
    needed = 4 * max(_COPIES * numbers, _ROWS * math.prod(output))
    if needed > room:
        raise ModelError(
            f"{what} would have {numbers:,} weights, the largest array of them of shape {weight}, "
            f"and a layer with outputs of shape {output} for each row. That needs about "
            f"{readable_size(needed)} with optimizer and copies, but {readable_size(room)} of "
            "memory are available. Make layers smaller, or encode observations and actions in "
            "fewer numbers."
        )


def extent_of(make: Callable[[], Any]) -> Extent:
    """Returns the shapes of a model's variables and tensors without allocating them.

    In a stateless scope Keras defers the initial values of variables, and in a separate graph
    nothing is computed. A new thread keeps both, and Keras's counters of names, to itself.
    """

    def made() -> Extent:
        with tf.Graph().as_default(), _Unfilled(initialize_variables=False):
            model = make()
            numbers = [x for x in getattr(model, "variables", []) if "float" in x.dtype]
            return Extent([_known(x.shape) for x in numbers], list(_outputs(model)))

    with ThreadPoolExecutor(1) as scratch:
        return scratch.submit(copy_context().run, made).result()


class _Unfilled(keras.StatelessScope):
    """A scope whose variables read as zeros of a graph, whatever their initial values."""

    def get_current_value(self, variable: keras.Variable) -> Any:
        return tf.zeros(variable.shape, variable.dtype)


def _known(shape: Sequence[int | None]) -> Shape:
    return tuple(int(n) for n in shape if n is not None)


def _outputs(model: keras.layers.Layer) -> Iterator[Shape]:
    """Yields the output shapes of the layers of a model, including inner models."""
    layers = [*getattr(model, "operations", []), *getattr(model, "layers", [])]
    for layer in {id(layer): layer for layer in layers}.values():  # most are in both
        with contextlib.suppress(AttributeError, ValueError):  # the layer has not been called
            yield from (_known(tensor.shape) for tensor in keras.tree.flatten(layer.output))
        if layer is not model:
            yield from _outputs(layer)


def _compare(extent: Extent, stored: Stored) -> None:
    declared = Counter(extent.weights)
    lacking = declared - stored.shapes if stored.shapes is not None else Counter()
    if lacking or sum(map(math.prod, extent.weights)) > stored.numbers:
        shape = max(lacking or declared, key=math.prod)
        raise CheckpointError(
            f"{stored.source} describes a model with a weight of shape {shape}, but no array "
            f"stored for it fits: it holds {stored.numbers} weights in all. Load it with the "
            "class, spaces and model it was saved with."
        )
    output = max(extent.outputs, key=math.prod, default=())
    if math.prod(output) > _LARGEST_OUTPUT * get_work_limit():
        raise CheckpointError(
            f"{stored.source} describes a model with a layer with outputs of shape {output} for "
            f"each row; a file may ask for {_LARGEST_OUTPUT} numbers at most. If you trust it, "
            "pass model_work_limit=..., the factor of that limit, to the call that loads it."
        )
