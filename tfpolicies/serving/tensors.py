"""Tensors of the Open Inference Protocol: metadata of a model, and checks of requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import RequestError, near_matches
from tfpolicies.finite import is_finite
from tfpolicies.serving.texts import quote, require_short
from tfpolicies.type_aliases import Json

MOST_AXES = 32
_INTEGERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_DATATYPES = {np.dtype(name): name.upper() for name in (*_INTEGERS, "bool")} | {
    np.dtype(f"float{bits}"): f"FP{bits}" for bits in (16, 32, 64)
}
_DTYPES = {datatype: dtype for dtype, datatype in _DATATYPES.items()}
_TAKEN = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""The NumPy kinds of JSON values that are accepted for a kind of dtype."""


class Port(NamedTuple):
    """Name, dtype and shape of an input or output; sizes that are free have names."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]
    is_optional: bool = False

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Port:
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

    def without(self, axis: str) -> Port:
        """Removes a free axis."""
        return self._replace(shape=tuple(size for size in self.shape if size != axis))

    def metadata(self) -> dict[str, Any]:
        """Returns the protocol's metadata of the tensor."""
        return {"name": self.name, "datatype": self.datatype, "shape": self.sizes}

    def __str__(self) -> str:
        return f"{self.name} {self.datatype} {self.sizes}"


def datatype_of(array: np.ndarray) -> str:
    """Returns the protocol's name of an array's dtype.

    >>> datatype_of(np.zeros(1, np.float32)), datatype_of(np.zeros(1, bool))
    ('FP32', 'BOOL')
    """
    return _DATATYPES[array.dtype]


def dtype_of(name: str, datatype: Json) -> np.dtype[Any]:
    """Returns the dtype for the datatype of an input.

    Raises:
        RequestError: if the datatype is unknown.
    """
    found = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if found is None:
        raise RequestError(
            f"Input {quote(name)} has the datatype {quote(datatype)}. Use one of "
            f"{', '.join(sorted(_DTYPES))}."
        )
    return found


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Checks and returns the shape of an input.

    Raises:
        RequestError: if it is not a list of sizes.
    """
    sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else [None]
    is_one = len(sizes) <= MOST_AXES
    if not (is_one and all(type(size) is int and 0 <= size < 2**31 for size in sizes)):
        raise RequestError(
            f"Input {quote(name)} must have a shape such as [1, 4], a list of at most {MOST_AXES} "
            f"sizes, got {quote(shape)}."
        )
    return tuple(sizes)


def from_bytes(name: str, datatype: Json, shape: Sequence[int] | Json, data: bytes) -> np.ndarray:
    """Decodes an input in binary form: row-major, little-endian.

    Raises:
        RequestError: if the number of bytes does not match datatype and shape.
    """
    dtype, sizes = dtype_of(name, datatype), checked_shape(name, shape)
    expected = math.prod(sizes) * dtype.itemsize
    if len(data) != expected:
        raise RequestError(
            f"Input {quote(name)} must have {expected} bytes, which is {datatype} "
            f"{quote(list(sizes))}, got {len(data)}."
        )
    return _reshaped(name, np.frombuffer(data, dtype.newbyteorder("<")), sizes)


def _reshaped(name: str, array: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    try:
        return array.reshape(sizes)
    except ValueError as error:  # an empty array with impossible sizes
        raise RequestError(
            f"Input {quote(name)} cannot have the shape {quote(list(sizes))}."
        ) from error


def from_values(name: str, datatype: Json, shape: Sequence[int] | Json, data: Json) -> np.ndarray:
    """Decodes an input given as a flat or nested list of values.

    Raises:
        RequestError: if they do not match datatype and shape.
    """
    dtype, sizes = dtype_of(name, datatype), checked_shape(name, shape)
    for value in _one_of_each_kind(name, data):
        if type(value) not in (int, float, bool):
            raise RequestError(
                f"Input {quote(name)} must have values of {datatype}, got {quote(value)}."
            )
    try:
        found = np.array(data)
    except (ValueError, OverflowError) as error:
        raise RequestError(
            f"Input {quote(name)} must be a flat list of values, or lists nested as its shape "
            f"{quote(list(sizes))} says, got lists of different lengths."
        ) from error
    if found.size and found.dtype.kind not in _TAKEN[dtype.kind]:
        raise RequestError(
            f"Input {quote(name)} must have values of {datatype}, got {quote(data)}."
        )
    if found.size != math.prod(sizes) or (found.ndim > 1 and found.shape != sizes):
        raise RequestError(
            f"Input {quote(name)} must have {math.prod(sizes)} values, which is its shape "
            f"{quote(list(sizes))}, got {found.size} in the shape {list(found.shape)}."
        )
    return _reshaped(name, _cast(name, dtype, found), sizes)


def _one_of_each_kind(name: str, data: Any) -> Iterable[Any]:
    """Returns a value of each type in nested lists, before NumPy allocates memory for all of them.

    Raises:
        RequestError: if they are nested too deep.
    """
    level = data if isinstance(data, list) else [data]
    for _ in range(MOST_AXES):
        kinds = dict(zip(map(type, level), level, strict=True))
        if list not in kinds:
            return kinds.values()
        if len(kinds) > 1:
            break
        level = [*itertools.chain.from_iterable(level)]
    else:
        raise RequestError(f"Input {quote(name)} is nested deeper than {MOST_AXES} lists.")
    return ()  # NumPy raises an error for lists of different lengths


def _cast(name: str, dtype: np.dtype[Any], found: np.ndarray) -> np.ndarray:
    if dtype.kind in "iu" and found.size:
        limits = np.iinfo(dtype)
        low, high = found.min(), found.max()
        if low < limits.min or high > limits.max:
            raise RequestError(
                f"Input {quote(name)} must have values of {_DATATYPES[dtype]}, from {limits.min} "
                f"to {limits.max}, got {low if low < limits.min else high}."
            )
    with np.errstate(over="ignore"):  # infinite numbers are refused later
        return found.astype(dtype)


def fitted(ports: Sequence[Port], given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Checks the inputs of a request, and returns them in the order of the ports.

    Raises:
        RequestError: if one is missing, unknown, not finite, or has a wrong shape or datatype.
    """
    free: dict[str, int] = {}
    found: dict[str, np.ndarray] = {}
    for port in ports:
        array = given.get(port.name)
        if array is not None:
            found[port.name] = _fitted(port, array, free)
        elif not port.is_optional:
            _refuse_unknown(ports, given)
            raise RequestError(
                f"Input {port.name!r} is missing. The model takes {_listed(ports)}; the request "
                f"has {quote([*given]) if given else 'none'}."
            )
    if len(found) < len(given):
        _refuse_unknown(ports, given)
    return found


def _refuse_unknown(ports: Sequence[Port], given: Iterable[str]) -> None:
    """Raises an error for the first unknown input, if there is one."""
    names = [port.name for port in ports]
    for name in given:
        if name not in names:
            require_short("an input", name)
            raise RequestError(
                f"There is no input {quote(name)}.{near_matches(name, names)} The model takes "
                f"{_listed(ports)}."
            )


def require_outputs(ports: Iterable[Port], names: Iterable[str] | None) -> None:
    """Refuses a request for unknown outputs; None requests all.

    Raises:
        RequestError: if one is unknown.
    """
    given = [port.name for port in ports]
    for name in names or ():
        if name not in given:
            require_short("an output", name)
            raise RequestError(
                f"There is no output {quote(name)}.{near_matches(name, given)} The model gives "
                f"{', '.join(given)}."
            )


def _fitted(port: Port, array: np.ndarray, free: dict[str, int]) -> np.ndarray:
    """Checks an input; `free_sizes` has the sizes of free axes in earlier inputs."""
    if array.dtype != port.dtype or not _has_shape(port.shape, array.shape):
        raise RequestError(
            f"Input {port.name!r} must be {port.datatype} {port.sizes}, got {datatype_of(array)} "
            f"{list(array.shape)}."
        )
    for axis, size in zip(port.shape, array.shape, strict=True):
        if type(axis) is str and free.setdefault(axis, size) != size:
            raise RequestError(
                f"Input {port.name!r} must have the size {free[axis]} of the inputs before it "
                f"along its axis of {axis}, got {list(array.shape)}."
            )
    if not is_finite(array):
        at = tuple(int(i[0]) for i in np.nonzero(~np.isfinite(array)))
        raise RequestError(
            f"Input {port.name!r} must have finite numbers, got {array[at]} at {list(at)}."
        )
    return array


def _has_shape(shape: tuple[int | str, ...], given: tuple[int, ...]) -> bool:
    if len(shape) != len(given):
        return False
    for axis, size in zip(shape, given, strict=True):
        is_free = type(axis) is str
        if (is_free and not size) or (not is_free and size != axis):
            return False
    return True


def _listed(ports: Iterable[Port]) -> str:
    return ", ".join(f"{port}{' (optional)' * port.is_optional}" for port in ports)
