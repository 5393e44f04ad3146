"""Measures the work of a Keras model from a file before anything of it is computed.

The work is that of one call with two rows, which is how a policy tries a model, and of the
regularizers of one update. It follows from shapes only: the output shape of each layer is inferred,
and its cost follows from shapes and settings. An inner model is measured once for each shape
of its inputs, however often it is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.errors import CheckpointError, ConfigError

Shape = tuple[int, ...]

TRIAL_ROWS = 2  # sequences or observations in a trial call
# Costs in multiplications of a matrix product, which are the fastest:
_ELEMENTWISE = 32  # an elementwise operation of a layer
_SLOW_PRODUCT = 128  # one product in pooling and depthwise convolutions


@dataclasses.dataclass(frozen=True)
class ModelWork:
    """The work of a model in one call with two rows.

    Attributes:
        calls: of layers, including those of inner models; a layer that iterates over time steps
            counts once per step.
        num_operations: multiplications with additions, or other operations weighed in these.
        numbers: elements of outputs and of intermediate results, such as attention scores.
    """

    calls: int = 0
    num_operations: int = 0
    numbers: int = 0

    def __add__(self, other: ModelWork) -> ModelWork:
        """Returns the sum of two amounts of work."""
        return ModelWork(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __mul__(self, times: int) -> ModelWork:
        return ModelWork(*(times * amount for amount in dataclasses.astuple(self)))


WORK_LIMITS = ModelWork(calls=256, num_operations=1 << 34, numbers=96 << 20)
"""The work that a file may ask for. `docs/decisions/003` says why honest models need less."""

_DESCRIPTIONS = {
    "calls": "calls of layers, or steps of them",
    "num_operations": "operations",
    "numbers": "numbers in outputs and intermediate results",
}

_limit_factor: ContextVar[float] = ContextVar("model_work_limit", default=1.0)


@contextlib.contextmanager
def limit_work(model_work_limit: float) -> Iterator[None]:
    """Sets the limit of work for models from files in this context.

    Args:
        model_work_limit: the factor of `WORK_LIMITS`; `math.inf` for no limit.
    """
    is_number = isinstance(model_work_limit, int | float) and model_work_limit > 0
    if not is_number or isinstance(model_work_limit, bool):
        raise ConfigError(
            "model_work_limit must be a number above 0, the factor of the usual work limit for "
            f"stored models (math.inf for no limit), got {model_work_limit!r:.200}."
        )
    token = _limit_factor.set(model_work_limit)
    try:
        yield
    finally:
        _limit_factor.reset(token)


def get_work_limit() -> float:
    """Returns the current factor of `WORK_LIMITS` for models from files."""
    return _limit_factor.get()


def check_work_limits(work: ModelWork, description: str) -> None:
    """Checks work against the limits.

    Args:
        work: the work of the whole model.
        description: the model's name in messages.
    """
    factor = _limit_factor.get()
    shares = {name: getattr(work, name) / getattr(WORK_LIMITS, name) for name in _DESCRIPTIONS}
    name = max(shares, key=lambda name: shares[name])
    if shares[name] <= factor:
        return
    raise CheckpointError(
        f"{description} takes {getattr(work, name):,} {_DESCRIPTIONS[name]}, but a file may ask "
        f"for {int(factor * getattr(WORK_LIMITS, name)):,} at most. If you trust it, pass "
        f"model_work_limit={math.ceil(shares[name])} to the call that loads it (--model-work-limit "
        "on the command line)."
    )


def check_work(parts: Iterable[tuple[Any, Any]], description: str) -> None:
    """Checks the work of models without computing anything.

    Args:
        parts: the models that are called, each with the structure of tensors or arrays of its
            inputs; or with None for inputs of the shapes that it declares.
        description: a name for them all in messages.

    Raises:
        CheckpointError: if it is more than `WORK_LIMITS` allow, times the factor of `limit_work`.
    """
    if math.isinf(_limit_factor.get()):
        return
    meter, work = _Meter(), ModelWork()
    for model, inputs in parts:
        if inputs is not None:
            inputs = keras.tree.map_structure(_to_symbolic, inputs)
            if not model.built:
                model(inputs)
        else:
            inputs = _get_declared_inputs(model)
        if inputs is not None:
            work += meter.measure(model, inputs)[0]
        work += _measure_weights(model)
    check_work_limits(work, description)


def _to_symbolic(tensor: tf.Tensor) -> keras.KerasTensor:
    return keras.KerasTensor(tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))


def _get_declared_inputs(model: keras.Model) -> list[keras.KerasTensor] | None:
    """Returns two rows of a model's declared inputs; None if a size is not declared."""
    try:
        tensors = list(model.inputs)
    except (AttributeError, ValueError, TypeError):
        return None
    shapes = [(TRIAL_ROWS, *tensor.shape[1:]) for tensor in tensors]
    if any(size is None for shape in shapes for size in shape):
        return None
    pairs = zip(shapes, tensors, strict=True)
    return [keras.KerasTensor(shape, tensor.dtype) for shape, tensor in pairs]


def _count_elements(shape: Iterable[Any]) -> int:
    return math.prod(1 if size is None else int(size) for size in shape)


# Calls --------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call of a layer or operation, by the shapes of its tensors."""

    layer: Any
    inputs: list[Shape]
    outputs: list[Shape]


class _Meter:
    """Measures calls of layers and models on symbolic tensors."""

    def __init__(self) -> None:
        self._measured: dict[
            tuple[Any, ...], tuple[Any, ModelWork, Any]
        ] = {}  # also keeps the model

    def measure(
        self, operation: keras.Operation, *args: TensorStructure, **kwargs: TensorStructure
    ) -> tuple[ModelWork, Any]:
        """Returns the work of one call, and its symbolic output tensors."""
        tensors = _get_tensors((args, kwargs))
        key = (id(operation), *((tuple(x.shape), str(x.dtype)) for x in tensors))
        is_model = isinstance(operation, keras.Function | keras.Sequential)
        if is_model and key in self._measured:
            _, work, outputs = self._measured[key]
            return work, outputs
        if isinstance(operation, keras.Sequential):
            work, outputs = self._measure_sequential(operation, args[0])
        elif isinstance(operation, keras.Function):
            work, outputs = self._measure_graph(operation, args[0])
        elif isinstance(operation, keras.layers.TimeDistributed):
            work, outputs = self._measure_time_distributed(operation, args[0])
        else:
            outputs = operation.compute_output_spec(*args, **kwargs)
            shapes = (
                [tuple(x.shape) for x in structure]
                for structure in (tensors, _get_tensors(outputs))
            )
            work = self._measure_layer(_Call(operation, *shapes))
        work += ModelWork(calls=1)
        if is_model:
            self._measured[key] = (operation, work, outputs)
        return work, outputs

    def _measure_sequential(
        self, model: keras.Sequential, x: keras.KerasTensor
    ) -> tuple[ModelWork, Any]:
        work, x = ModelWork(), _unpack(x)
        for layer in model.layers:
            layer_work, x = self.measure(layer, x)
            work += layer_work
        return work, x

    def _measure_graph(self, model: keras.Model, inputs: TensorStructure) -> tuple[ModelWork, Any]:
        work = ModelWork()

        def make_measured_call(operation: keras.Operation) -> Callable[..., Any]:
            def call(*args: TensorStructure, **kwargs: TensorStructure) -> Any:
                nonlocal work
                call_work, outputs = self.measure(operation, *args, **kwargs)
                work += call_work
                return outputs

            return call

        tensors = _fit_to_inputs(model, inputs)
        outputs = _unpack(model._run_through_graph(tensors, operation_fn=make_measured_call))
        return work, outputs

    def _measure_time_distributed(
        self, wrapper: keras.layers.TimeDistributed, x: keras.KerasTensor
    ) -> tuple[ModelWork, Any]:
        rows, steps, *shape = x.shape
        step_work, output = self.measure(wrapper.layer, keras.KerasTensor((rows, *shape), x.dtype))
        outputs = keras.KerasTensor((rows, steps, *output.shape[1:]), output.dtype)
        return step_work * steps + ModelWork(
            numbers=_count_elements(x.shape) + _count_elements(outputs.shape)
        ), outputs

    def _measure_layer(self, call: _Call) -> ModelWork:
        numbers = sum(map(_count_elements, call.outputs))
        work = ModelWork(
            0, _ELEMENTWISE * (sum(map(_count_elements, call.inputs)) + numbers), numbers
        )
        rules = (rule for classes, rule in _RULES if isinstance(call.layer, classes))
        work += next(rules, self._measure_unknown_layer)(call)
        return work + _measure_activation(call.layer, numbers) + _measure_activity_regularizer(call)

    def _measure_unknown_layer(self, call: _Call) -> ModelWork:
        shapes = [*call.inputs[:1], *call.outputs]
        positions = max((_count_elements(shape[:-1]) for shape in shapes), default=1)
        work = ModelWork(num_operations=positions * _count_weights(call.layer))
        return work + self._measure_inner_models(call.layer)

    def _measure_inner_models(self, layer: keras.layers.Layer) -> ModelWork:
        """Measures the models inside a custom layer, with the inputs that they declare."""
        work = ModelWork()
        for part in getattr(layer, "layers", []):
            if isinstance(part, keras.Model) and (inputs := _get_declared_inputs(part)) is not None:
                work += self.measure(part, inputs)[0]
        return work


def _unpack(structure: TensorStructure) -> Any:
    """Returns the only element of a list, or else the structure."""
    if isinstance(structure, list | tuple) and len(structure) == 1:
        return structure[0]
    return structure


def _get_tensors(structure: TensorStructure) -> list[Any]:
    return [x for x in keras.tree.flatten(structure) if isinstance(x, keras.KerasTensor)]


def _fit_to_inputs(model: keras.Model, inputs: TensorStructure) -> list[Any]:
    """Returns tensors in the order, and of the rank, in which a functional model takes them."""
    structure = model._inputs_struct
    if isinstance(structure, Mapping) and isinstance(inputs, Mapping):
        inputs = {name: inputs[name] for name in structure}
    tensors = []
    for x, declared in zip(keras.tree.flatten(inputs), model.inputs, strict=True):
        shape, rank = tuple(x.shape), len(declared.shape)
        if len(shape) == rank + 1 and shape[-1] == 1:
            shape = shape[:-1]
        elif len(shape) == rank - 1 and declared.shape[-1] == 1:
            shape = (*shape, 1)
        tensors.append(keras.KerasTensor(shape, declared.dtype))
    return tensors


# Layers -------------------------------------------------------------------------------------------


def _count_weights(layer: keras.layers.Layer) -> int:
    return sum(_count_elements(weight.shape) for weight in getattr(layer, "weights", []))


# Cost per number in units of `_ELEMENTWISE`, and intermediate results per number.
_ACTIVATIONS = {
    "sparsemax": (60, 5),  # it sorts
    **dict.fromkeys(("sparse_plus", "sparse_sigmoid"), (30, 3)),
    **dict.fromkeys(("celu", "gelu", "log_softmax", "mish", "soft_shrink", "squareplus"), (15, 1)),
    **dict.fromkeys(("hard_shrink", "log_sigmoid", "softmax"), (6, 0)),
}


def _measure_activation(layer: keras.layers.Layer, numbers: int) -> ModelWork:
    """Measures the work of a layer's activation in addition to that of a simple one."""
    name = getattr(getattr(layer, "activation", None), "__name__", "")
    elements, held = _ACTIVATIONS.get(name, (0, 0))
    return ModelWork(num_operations=_ELEMENTWISE * elements * numbers, numbers=held * numbers)


def _measure_dense(call: _Call) -> ModelWork:
    return ModelWork(
        num_operations=_count_elements(call.outputs[0][:-1]) * _count_weights(call.layer)
    )


def _get_channels(layer: keras.layers.Layer, shape: Shape) -> tuple[int, Shape]:
    if layer.data_format == "channels_first":
        return shape[1], shape[2:]
    return shape[-1], shape[1:-1]


def _count_padded(call: _Call) -> int:
    """Returns the size of an input padded for a dilated kernel; 0 without dilation."""
    layer, shape = call.layer, call.inputs[0]
    if max(layer.dilation_rate) == 1:
        return 0
    channels, sizes = _get_channels(layer, shape)
    windows = zip(sizes, layer.kernel_size, layer.dilation_rate, strict=True)
    return shape[0] * channels * _count_elements(n + (kernel - 1) * d for n, kernel, d in windows)


def _measure_convolution(call: _Call) -> ModelWork:
    positions = _count_elements(call.outputs[0]) // call.layer.filters
    return ModelWork(
        num_operations=positions * _count_elements(call.layer.kernel.shape),
        numbers=_count_padded(call),
    )


def _measure_transposed(call: _Call) -> ModelWork:
    channels, _ = _get_channels(call.layer, call.inputs[0])
    return ModelWork(
        num_operations=_count_elements(call.inputs[0])
        // max(1, channels)
        * _count_elements(call.layer.kernel.shape),
        numbers=_count_padded(call),
    )


def _measure_depthwise(call: _Call) -> ModelWork:
    depthwise_outputs, numbers, pointwise = _count_elements(call.outputs[0]), 0, 0
    if hasattr(call.layer, "pointwise_kernel"):
        positions = depthwise_outputs // call.layer.filters
        depthwise_outputs = numbers = positions * int(call.layer.pointwise_kernel.shape[-2])
        pointwise = positions * _count_elements(call.layer.pointwise_kernel.shape)
    return ModelWork(
        num_operations=_SLOW_PRODUCT * depthwise_outputs * _count_elements(call.layer.kernel_size)
        + pointwise,
        numbers=numbers + _count_padded(call),
    )


def _measure_pooling(call: _Call) -> ModelWork:
    return ModelWork(
        num_operations=_SLOW_PRODUCT
        * _count_elements(call.outputs[0])
        * _count_elements(call.layer.pool_size)
    )


def _measure_dot_attention(call: _Call) -> ModelWork:
    """Measures scores of queries and keys; added or concatenated ones have a query's width."""
    query, value = call.inputs[0], call.inputs[1]
    key = call.inputs[2] if len(call.inputs) > 2 else value
    scores = _count_elements(query[:-1]) * int(key[-2])
    is_wide = getattr(call.layer, "score_mode", "concat") == "concat"
    if isinstance(call.layer, keras.layers.AdditiveAttention) or is_wide:
        products = scores * int(query[-1])
        return ModelWork(
            num_operations=2 * _ELEMENTWISE * products, numbers=2 * products + 4 * scores
        )
    width = int(query[-1]) + int(value[-1]) + 4 * _ELEMENTWISE
    return ModelWork(num_operations=scores * width, numbers=4 * scores)


def _measure_attention_heads(call: _Call) -> ModelWork:
    query, value = call.inputs[0], call.inputs[1]
    config = call.layer.get_config()
    heads = config.get("num_heads") or config.get("num_query_heads")
    width = (config.get("key_dim") or config.get("head_dim")) * 2 + (config.get("value_dim") or 0)
    axes = config.get("attention_axes") or range(1, len(query) - 1)
    axes = [axes] if isinstance(axes, int) else axes
    scores = heads * _count_elements(query[:-1]) * _count_elements(value[axis] for axis in axes)
    positions = max(_count_elements(shape[:-1]) for shape in [*call.inputs, *call.outputs])
    projected = positions * heads * width
    return ModelWork(
        num_operations=scores * (width + 4 * _ELEMENTWISE) + positions * _count_weights(call.layer),
        numbers=4 * scores + projected,
    )


def _measure_recurrent(call: _Call) -> ModelWork:
    steps, cells = int(call.inputs[0][1]), getattr(call.layer.cell, "cells", [call.layer.cell])
    state = sum(_count_elements(shape) for shape in _get_state_shapes(call.layer, call.inputs[0]))
    positions = call.inputs[0][0]
    if isinstance(call.layer, _CONVOLUTIONAL_RNNS):
        positions = state // 2 // max(1, call.layer.filters)
    work_per_step = positions * sum(map(_count_weights, cells)) + 10 * _ELEMENTWISE * state
    numbers = _count_elements(call.inputs[0]) + 10 * steps * state
    return ModelWork(
        calls=steps * len(cells), num_operations=steps * work_per_step, numbers=numbers
    )


def _get_state_shapes(layer: keras.layers.Layer, shape: Shape) -> list[Shape]:
    if isinstance(layer, _CONVOLUTIONAL_RNNS):
        state = layer.cell.compute_output_shape((shape[0], *shape[2:]))
        return [tuple(state[0] if isinstance(state[0], tuple | list) else state)] * 2
    sizes = keras.tree.flatten(layer.state_size)
    return [(shape[0], int(size)) for size in sizes]


def _measure_bidirectional(call: _Call) -> ModelWork:
    layers = call.layer.forward_layer, call.layer.backward_layer
    return sum((_measure_recurrent(call._replace(layer=layer)) for layer in layers), ModelWork())


def _measure_category_encoding(call: _Call) -> ModelWork:
    numbers = _count_elements(call.inputs[0]) * int(call.layer.num_tokens)
    return ModelWork(num_operations=_ELEMENTWISE * numbers, numbers=numbers)


def _measure_noise(call: _Call) -> ModelWork:
    """Measures noise whose `noise_shape` may broadcast against the input."""
    sizes = getattr(call.layer, "noise_shape", None) or ()
    numbers = math.prod(
        max(int(noise_size or 1), int(size))
        for noise_size, size in zip(sizes, call.inputs[0], strict=False)
    )
    return ModelWork(num_operations=2 * _ELEMENTWISE * numbers, numbers=2 * numbers)


def _measure_resizing(call: _Call) -> ModelWork:
    numbers = _count_elements(map(max, zip(call.inputs[0], call.outputs[0], strict=False)))
    return ModelWork(num_operations=4 * _ELEMENTWISE * numbers, numbers=numbers)


def _measure_dot(call: _Call) -> ModelWork:
    axes = call.layer.axes if isinstance(call.layer.axes, int) else call.layer.axes[0]
    numbers = sum(map(_count_elements, call.inputs))
    return ModelWork(
        num_operations=_count_elements(call.outputs[0]) * int(call.inputs[0][axes]), numbers=numbers
    )


def _measure_matmul(call: _Call) -> ModelWork:
    first_shape = call.inputs[0]
    inner_sizes = (
        first_shape[-1:] if len(call.inputs) > 1 else first_shape[-2:]
    )  # a constant may be either factor
    return ModelWork(num_operations=_count_elements(call.outputs[0]) * max(inner_sizes, default=1))


def _measure_einsum(call: _Call) -> ModelWork:
    shapes = call.inputs
    if isinstance(call.layer, keras.layers.EinsumDense):
        shapes = [call.inputs[0], tuple(call.layer.kernel.shape)]
    equation = getattr(call.layer, "subscripts", None) or call.layer.equation
    products = _count_products(equation, shapes)
    search = 10_000 * len(shapes) ** 3  # for the order of products
    return ModelWork(num_operations=products + search, numbers=products if len(shapes) > 2 else 0)


def _count_products(equation: str, shapes: Sequence[Shape]) -> int:
    """Returns the number of index combinations of an einsum."""
    sizes: dict[str, int] = {}
    broadcast = 1
    for operand, shape in zip(equation.partition("->")[0].split(","), shapes, strict=False):
        leading, ellipsis, trailing = operand.strip().partition("...")
        letter_sizes = [*zip(leading, shape, strict=False)]
        letter_sizes += [*zip(reversed(trailing), reversed(shape), strict=False)]
        for letter, size in letter_sizes:
            sizes[letter] = max(sizes.get(letter, 1), int(size))
        if ellipsis or "." in operand:
            broadcast = max(
                broadcast, _count_elements(shape[len(leading) : len(shape) - len(trailing)])
            )
    return _count_elements(sizes.values()) * broadcast


_DIMENSIONS = (1, 2, 3)


def _get_layers(*patterns: str) -> tuple[type, ...]:
    """Returns the Keras layers of these names, with {} replaced by one to three dimensions."""
    names = [
        pattern.format(n)
        for pattern in patterns
        for n in (_DIMENSIONS if "{}" in pattern else ("",))
    ]
    layers = (getattr(keras.layers, name, None) for name in names)
    return tuple(layer for layer in layers if layer is not None)


def _get_operations(*names: str) -> tuple[type, ...]:
    from tfpolicies.models.keras_allowlist import get_categories

    classes = get_categories()["layer"].keras_classes
    return tuple(
        classes[pair] for pair in classes if pair[0] == "keras.src.ops.numpy" and pair[1] in names
    )


_CONVOLUTIONAL_RNNS: Any = _get_layers("ConvLSTM{}D")

_Rule = Callable[[_Call], ModelWork]

_RULES: list[tuple[tuple[type, ...], _Rule]] = [
    (_get_layers("Dense"), _measure_dense),
    (_get_layers("EinsumDense") + _get_operations("Einsum"), _measure_einsum),
    (_get_layers("DepthwiseConv{}D", "SeparableConv{}D"), _measure_depthwise),
    (_get_layers("Conv{}DTranspose"), _measure_transposed),
    (_get_layers("Conv{}D"), _measure_convolution),
    (_get_layers("AveragePooling{}D", "MaxPooling{}D"), _measure_pooling),
    (_get_layers("MultiHeadAttention", "GroupQueryAttention"), _measure_attention_heads),
    (_get_layers("Attention", "AdditiveAttention"), _measure_dot_attention),
    (_get_layers("Bidirectional"), _measure_bidirectional),
    (_get_layers("RNN"), _measure_recurrent),
    (_get_layers("CategoryEncoding"), _measure_category_encoding),
    (_get_layers("Dropout", "GaussianDropout", "AlphaDropout"), _measure_noise),
    (_get_layers("Resizing"), _measure_resizing),
    (_get_layers("Dot"), _measure_dot),
    (_get_operations("Matmul", "Dot"), _measure_matmul),
]

# Weights ------------------------------------------------------------------------------------------


def _measure_weights(model: keras.Model) -> ModelWork:
    """Measures computations on weights: their initialization, and regularizers of an update."""
    work = ModelWork()
    for variable in model.variables:
        shape = tuple(int(size) for size in variable.shape)
        if isinstance(getattr(variable, "_initializer", None), keras.initializers.Orthogonal):
            size, width = _count_elements(shape), shape[-1] if shape else 1
            work += ModelWork(num_operations=size * min(width, size // max(1, width)) // 4)
        work += _measure_regularizer(getattr(variable, "regularizer", None), shape)
    return work


def _measure_activity_regularizer(call: _Call) -> ModelWork:
    regularizer = getattr(call.layer, "activity_regularizer", None)
    return sum((_measure_regularizer(regularizer, shape) for shape in call.outputs), ModelWork())


def _measure_regularizer(regularizer: keras.Regularizer | None, shape: Shape) -> ModelWork:
    """Measures a regularizer that multiplies all pairs of rows, or of columns."""
    if not isinstance(regularizer, keras.regularizers.OrthogonalRegularizer) or len(shape) != 2:
        return ModelWork()
    side, width = shape if regularizer.mode == "rows" else shape[::-1]
    products = side * side
    return ModelWork(num_operations=products * (width + 4 * _ELEMENTWISE), numbers=4 * products)
