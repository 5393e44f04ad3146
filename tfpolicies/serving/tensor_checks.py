"""Tensors of the Open Inference Protocol: metadata of a model, and checks of requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.base.finite_checks import is_finite
from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import RequestError, suggest_similar_names
from tfpolicies.serving.request_texts import quote, require_short

MAX_AXES = 32
_INTEGERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_DATATYPES = {np.dtype(name): name.upper() for name in (*_INTEGERS, "bool")} | {
    np.dtype(f"float{bits}"): f"FP{bits}" for bits in (16, 32, 64)
}
_DTYPES = {datatype: dtype for dtype, datatype in _DATATYPES.items()}
_JSON_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""The NumPy kinds of JSON values that are accepted for a kind of dtype."""


class TensorMetadata(NamedTuple):
    """Name, dtype and shape of an input or output; sizes that are free have names."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]
    is_optional: bool = False

    @classmethod
    def from_spec(cls, record: Mapping[str, Any]) -> TensorMetadata:
        """Parses an entry of `policy_spec.json`."""
        return cls(record["name"], np.dtype(record["dtype"]), tuple(record["shape"]))

    @property
    def datatype(self) -> str:
        """The protocol's name of its dtype."""
        return _DATATYPES[self.dtype]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row: without free sizes."""
        return tuple(size for size in self.shape if not isinstance(size, str))

    @property
    def sizes(self) -> list[int]:
        """The shape in the protocol, where -1 is a free size."""
        return [-1 if isinstance(size, str) else size for size in self.shape]

    def without_axis(self, axis: str) -> TensorMetadata:
        """Removes a free axis."""
        return self._replace(shape=tuple(size for size in self.shape if size != axis))

    def to_protocol(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": self.sizes}

    def __str__(self) -> str:
        return f"{self.name} {self.datatype} {self.sizes}"


def get_datatype(array: np.ndarray) -> str:
    """Returns the protocol's name of an array's dtype.

    >>> get_datatype(np.zeros(1, np.float32)), get_datatype(np.zeros(1, bool))
    ('FP32', 'BOOL')
    """
    return _DATATYPES[array.dtype]


def parse_datatype(name: str, datatype: Json) -> np.dtype[Any]:
    dtype = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise RequestError(
            f"Input {quote(name)} has the datatype {quote(datatype)}. Use one of "
            f"{', '.join(sorted(_DTYPES))}."
        )
    return dtype


def parse_shape(name: str, shape: Any) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else [None]
    is_short = len(sizes) <= MAX_AXES
    if not (is_short and all(type(size) is int and 0 <= size < 2**31 for size in sizes)):
        raise RequestError(
            f"Input {quote(name)} must have a shape such as [1, 4], a list of at most {MAX_AXES} "
            f"sizes, got {quote(shape)}."
        )
    return tuple(sizes)


def decode_bytes(name: str, datatype: Json, shape: Sequence[int] | Json, data: bytes) -> np.ndarray:
    """Decodes an input in binary form: row-major, little-endian."""
    dtype, sizes = parse_datatype(name, datatype), parse_shape(name, shape)
    expected = math.prod(sizes) * dtype.itemsize
    if len(data) != expected:
        raise RequestError(
            f"Input {quote(name)} must have {expected} bytes, which is {datatype} "
            f"{quote(list(sizes))}, got {len(data)}."
        )
    return _reshape(name, np.frombuffer(data, dtype.newbyteorder("<")), sizes)


def _reshape(name: str, array: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    try:
        return array.reshape(sizes)
    except ValueError as error:  # an empty array with impossible sizes
        raise RequestError(
            f"Input {quote(name)} cannot have the shape {quote(list(sizes))}."
        ) from error


def decode_values(name: str, datatype: Json, shape: Sequence[int] | Json, data: Json) -> np.ndarray:
    """Decodes an input given as a flat or nested list of values."""
    dtype, sizes = parse_datatype(name, datatype), parse_shape(name, shape)
    for value in _sample_value_types(name, data):
        if type(value) not in (int, float, bool):
            raise RequestError(
                f"Input {quote(name)} must have values of {datatype}, got {quote(value)}."
            )
    try:
        array = np.array(data)
    except (ValueError, OverflowError) as error:
        raise RequestError(
            f"Input {quote(name)} must be a flat list of values, or lists nested as its shape "
            f"{quote(list(sizes))} says, got lists of different lengths."
        ) from error
    if array.size and array.dtype.kind not in _JSON_KINDS[dtype.kind]:
        raise RequestError(
            f"Input {quote(name)} must have values of {datatype}, got {quote(data)}."
        )
    if array.size != math.prod(sizes) or (array.ndim > 1 and array.shape != sizes):
        raise RequestError(
            f"Input {quote(name)} must have {math.prod(sizes)} values, which is its shape "
            f"{quote(list(sizes))}, got {array.size} in the shape {list(array.shape)}."
        )
    return _reshape(name, _cast(name, dtype, array), sizes)


def _sample_value_types(name: str, data: Any) -> Iterable[Any]:
    """Returns a value of each type in nested lists, before NumPy allocates memory for all."""
    level = data if isinstance(data, list) else [data]
    for _ in range(MAX_AXES):
        value_by_type = dict(zip(map(type, level), level, strict=True))
        if list not in value_by_type:
            return value_by_type.values()
        if len(value_by_type) > 1:
            break
        level = [*itertools.chain.from_iterable(level)]
    else:
        raise RequestError(f"Input {quote(name)} is nested deeper than {MAX_AXES} lists.")
    return ()  # NumPy raises an error for lists of different lengths


def _cast(name: str, dtype: np.dtype[Any], array: np.ndarray) -> np.ndarray:
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        low, high = array.min(), array.max()
        if low < limits.min or high > limits.max:
            raise RequestError(
                f"Input {quote(name)} must have values of {_DATATYPES[dtype]}, from {limits.min} "
                f"to {limits.max}, got {low if low < limits.min else high}."
            )
    with np.errstate(over="ignore"):  # infinite numbers are refused later
        return array.astype(dtype)


def match_inputs(
    tensors: Sequence[TensorMetadata], inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Checks the inputs of a request, and returns them in the order of the ports."""
    free_sizes: dict[str, int] = {}
    ordered: dict[str, np.ndarray] = {}
    for tensor in tensors:
        array = inputs.get(tensor.name)
        if array is not None:
            ordered[tensor.name] = _check_input(tensor, array, free_sizes)
        elif not tensor.is_optional:
            _refuse_unknown(tensors, inputs)
            raise RequestError(
                f"Input {tensor.name!r} is missing. The model takes {_format_tensors(tensors)}; "
                f"the request has {quote([*inputs]) if inputs else 'none'}."
            )
    if len(ordered) < len(inputs):
        _refuse_unknown(tensors, inputs)
    return ordered


def _refuse_unknown(tensors: Sequence[TensorMetadata], input_names: Iterable[str]) -> None:
    """Raises an error for the first unknown input, if there is one."""
    names = [port.name for port in tensors]
    for name in input_names:
        if name not in names:
            require_short("an input", name)
            raise RequestError(
                f"There is no input {quote(name)}.{suggest_similar_names(name, names)} The model "
                f"takes {_format_tensors(tensors)}."
            )


def require_outputs(tensors: Iterable[TensorMetadata], names: Iterable[str] | None) -> None:
    """Refuses a request for unknown outputs; None requests all."""
    output_names = [port.name for port in tensors]
    for name in names or ():
        if name not in output_names:
            require_short("an output", name)
            raise RequestError(
                f"There is no output {quote(name)}.{suggest_similar_names(name, output_names)} The "
                f"model gives {', '.join(output_names)}."
            )


def _check_input(
    tensor: TensorMetadata, array: np.ndarray, free_sizes: dict[str, int]
) -> np.ndarray:
    """Checks an input; `free_sizes` has the sizes of free axes in earlier inputs."""
    if array.dtype != tensor.dtype or not _shape_matches(tensor.shape, array.shape):
        raise RequestError(
            f"Input {tensor.name!r} must be {tensor.datatype} {tensor.sizes}, got "
            f"{get_datatype(array)} {list(array.shape)}."
        )
    for axis, size in zip(tensor.shape, array.shape, strict=True):
        if type(axis) is str and free_sizes.setdefault(axis, size) != size:
            raise RequestError(
                f"Input {tensor.name!r} must have the size {free_sizes[axis]} of the inputs before "
                f"it along its axis of {axis}, got {list(array.shape)}."
            )
    if not is_finite(array):
        index = tuple(int(i[0]) for i in np.nonzero(~np.isfinite(array)))
        raise RequestError(
            f"Input {tensor.name!r} must have finite numbers, got {array[index]} at {list(index)}."
        )
    return array


def _shape_matches(shape: tuple[int | str, ...], array_shape: tuple[int, ...]) -> bool:
    if len(shape) != len(array_shape):
        return False
    for axis, size in zip(shape, array_shape, strict=True):
        is_free = type(axis) is str
        if (is_free and not size) or (not is_free and size != axis):
            return False
    return True


def _format_tensors(tensors: Iterable[TensorMetadata]) -> str:
    return ", ".join(f"{port}{' (optional)' * port.is_optional}" for port in tensors)
