"""Numbers and small NumPy arrays as JSON, exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import CheckpointError

_SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}


def is_plain_dtype(dtype: np.dtype) -> bool:
    """Returns True if arrays of `dtype` can be encoded: native bools, integers and floats."""
    return DTYPES.get(dtype.name) == dtype


def encode_number(value: bool | int | float) -> Any:
    """Returns `value` itself if JSON can represent it, else its name in a tagged object.

    >>> encode_number(-0.5), encode_number(float("-inf"))
    (-0.5, {'$float': '-inf'})
    """
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return {"$float": str(value)}


def decode_number(record: Any) -> bool | int | float:
    if type(record) in (bool, int, float):
        return record
    if isinstance(record, dict) and list(record) == ["$float"]:
        name = record["$float"]
        if isinstance(name, str) and name in _SPECIAL:
            return _SPECIAL[name]
    raise CheckpointError(f"The record {record!r} is not a number.")


def decode_dtype(name: Json) -> np.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"The dtype {name!r} is unknown; supported are {sorted(DTYPES)}.")
    return DTYPES[name]


def encode_elements(array: np.ndarray) -> list[Any]:
    """Returns the elements of `array` as a flat list, in C order."""
    return [encode_number(value) for value in array.ravel().tolist()]


def decode_elements(record: Json, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Inverse of `encode_elements`; every element must be a value of `dtype`."""
    if not isinstance(record, list) or len(record) != math.prod(shape):
        raise CheckpointError(f"Expected a list of {math.prod(shape)} numbers for shape {shape}.")
    numbers = [decode_number(element) for element in record]
    allowed = {"b": bool, "i": int, "u": int, "f": float}[dtype.kind]
    if any(type(number) is not allowed for number in numbers):
        raise CheckpointError(f"Not every element of the list is a value of {dtype}.")
    try:
        return np.array(numbers, dtype=dtype).reshape(shape)
    except (OverflowError, ValueError) as error:
        raise CheckpointError(f"The elements do not fit {dtype} and {shape}: {error}.") from error


def decode_shape(record: Any) -> tuple[int, ...]:
    """Returns a shape from a list of non-negative integers."""
    if not isinstance(record, list) or any(type(n) is not int or n < 0 for n in record):
        raise CheckpointError(f"The shape {record!r} is not a list of non-negative integers.")
    return tuple(record)


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """Returns dtype, shape and elements of `array`; `is_plain_dtype` must hold.

    >>> encode_array(np.array([[1, 2]], np.uint8))
    {'dtype': 'uint8', 'shape': [1, 2], 'elements': [1, 2]}
    """
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "elements": encode_elements(array),
    }


def decode_array(record: Json) -> np.ndarray:
    if not isinstance(record, dict) or set(record) != {"dtype", "shape", "elements"}:
        raise CheckpointError("An array record needs exactly dtype, shape and elements.")
    dtype, shape = decode_dtype(record["dtype"]), decode_shape(record["shape"])
    return decode_elements(record["elements"], dtype, shape)
