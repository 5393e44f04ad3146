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
from tfpolicies.system.system_memory import format_size, get_available_memory

Shape = tuple[int, ...]

_COPIES = 6  # of each weight while a policy is built: model, optimizer slots, policy state
_ROWS = 2  # of a trial call
_MAX_OUTPUT_SIZE = 1 << 24  # numbers per row that a layer described by a file may output


class ModelSize(NamedTuple):
    """Shapes of a model's weights and outputs."""

    weight_shapes: list[Shape]  # of its variables without seeds, since unused ones are not stored
    output_shapes: list[Shape]  # of the tensors between its layers, without the batch axis


class StoredWeights(NamedTuple):
    """The weights in a file, to which a described model is compared."""

    source: str  # the file, for messages
    num_weights: int  # the number of weights in all
    shapes: Counter[Shape] | None  # of its arrays; None if only `numbers` is known


_stored_weights: ContextVar[StoredWeights | None] = ContextVar("stored", default=None)


@contextlib.contextmanager
def limit_to_stored_weights(source: str, weights: Iterable[Shape] | int) -> Iterator[None]:
    """Limits the weights of models built in this context to those that a file holds.

    Args:
        source: where the file is, for messages.
        weights: the shapes of its arrays; or an upper bound of the number of weights.
    """
    if isinstance(weights, int):
        stored = StoredWeights(source, weights, None)
    else:
        shapes = Counter(map(tuple, weights))
        stored = StoredWeights(source, sum(math.prod(x) * n for x, n in shapes.items()), shapes)
    token = _stored_weights.set(stored)
    try:
        yield
    finally:
        _stored_weights.reset(token)


def is_built_from_file() -> bool:
    """Returns whether models are currently built from a file (see `limit_to_stored_weights`)."""
    return _stored_weights.get() is not None


def check_memory(make: Callable[[], Any], description: str, *, allow_failure: bool = False) -> None:
    """Checks a model's size without allocating it.

    Args:
        make: builds the model; it is called in a separate graph and thread, and its result is
            discarded.
        description: the model's name in messages.
        allow_failure: whether to skip the check for a user's model that only runs eagerly.

    Raises:
        CheckpointError: if a file describes the model (`limit_to_stored_weights`) and holds other
            weights.
        ModelError: if it needs more memory than there is.
    """
    try:
        size = measure_size(make)
    except Exception:
        if allow_failure and not is_built_from_file():
            return
        raise
    _check_size(size, description)


def check_memory_for_rows(shapes: Sequence[Shape], description: str) -> None:
    """Checks that rows of these shapes can be allocated to try a model.

    Raises:
        CheckpointError: if a file describes them, and they are implausibly large.
        ModelError: if they need more memory than there is.
    """
    _check_size(ModelSize([], list(shapes)), description)


def _check_size(size: ModelSize, description: str) -> None:
    stored, available = _stored_weights.get(), get_available_memory()
    if stored is not None:
        _compare_with_stored(size, stored)
    num_weights = sum(map(math.prod, size.weight_shapes))
    weight, output = (max(x, key=math.prod, default=()) for x in size)
    needed = 4 * max(_COPIES * num_weights, _ROWS * math.prod(output))
    if needed > available:
        raise ModelError(
            f"{description} would have {num_weights:,} weights, the largest array of them of shape "
            f"{weight}, and a layer with outputs of shape {output} for each row. That needs about "
            f"{format_size(needed)} with optimizer and copies, but {format_size(available)} of "
            "memory are available. Make layers smaller, or encode observations and actions in "
            "fewer numbers."
        )


def measure_size(make: Callable[[], Any]) -> ModelSize:
    """Returns the shapes of a model's variables and tensors without allocating them.

    In a stateless scope Keras defers the initial values of variables, and in a separate graph
    nothing is computed. A new thread keeps both, and Keras's counters of names, to itself.
    """

    def measure_in_graph() -> ModelSize:
        with tf.Graph().as_default(), _ZeroVariablesScope(initialize_variables=False):
            model = make()
            numbers = [x for x in getattr(model, "variables", []) if "float" in x.dtype]
            return ModelSize(
                [_get_known_sizes(x.shape) for x in numbers], list(_iter_output_shapes(model))
            )

    with ThreadPoolExecutor(1) as scratch:
        return scratch.submit(copy_context().run, measure_in_graph).result()


class _ZeroVariablesScope(keras.StatelessScope):
    """A scope whose variables read as zeros of a graph, whatever their initial values."""

    def get_current_value(self, variable: keras.Variable) -> Any:
        return tf.zeros(variable.shape, variable.dtype)


def _get_known_sizes(shape: Sequence[int | None]) -> Shape:
    return tuple(int(n) for n in shape if n is not None)


def _iter_output_shapes(model: keras.layers.Layer) -> Iterator[Shape]:
    """Yields the output shapes of the layers of a model, including inner models."""
    layers = [*getattr(model, "num_operations", []), *getattr(model, "layers", [])]
    for layer in {id(layer): layer for layer in layers}.values():  # most are in both
        with contextlib.suppress(AttributeError, ValueError):  # the layer has not been called
            yield from (
                _get_known_sizes(tensor.shape) for tensor in keras.tree.flatten(layer.output)
            )
        if layer is not model:
            yield from _iter_output_shapes(layer)


def _compare_with_stored(size: ModelSize, stored: StoredWeights) -> None:
    declared = Counter(size.weight_shapes)
    missing = declared - stored.shapes if stored.shapes is not None else Counter()
    if missing or sum(map(math.prod, size.weight_shapes)) > stored.num_weights:
        shape = max(missing or declared, key=math.prod)
        raise CheckpointError(
            f"{stored.source} describes a model with a weight of shape {shape}, but no array "
            f"stored for it fits: it holds {stored.num_weights} weights in all. Load it with the "
            "class, spaces and model it was saved with."
        )
    output = max(size.output_shapes, key=math.prod, default=())
    if math.prod(output) > _MAX_OUTPUT_SIZE * get_work_limit():
        raise CheckpointError(
            f"{stored.source} describes a model with a layer with outputs of shape {output} for "
            f"each row; a file may ask for {_MAX_OUTPUT_SIZE} numbers at most. If you trust it, "
            "pass model_work_limit=..., the factor of that limit, to the call that loads it."
        )
