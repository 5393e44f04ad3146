"""Encodes Gymnasium spaces as JSON, exactly, but without the state of their random generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import CheckpointError, UnsupportedSpaceError
from tfpolicies.storage.arrays_json import (
    DTYPES,
    decode_dtype,
    decode_elements,
    decode_number,
    decode_shape,
    encode_elements,
    encode_number,
    is_plain_dtype,
)

Space = spaces.Space[Any]
Record = dict[str, Any]

_ORIGINAL_SPACE_KEY = "original_space"  # RLlib's attribute of a flattened space
_MAX_BOUND_BYTES = 1 << 26  # bytes of one bound, summed over all spaces of a file
_MAX_DEPTH = 32  # levels of nested spaces
_DEPTH_COSTS = {"Dict": 1, "Tuple": 1, "OneOf": 1, "Graph": 1, "Sequence": 8}
"""Levels that each counts: Gymnasium takes 2.3 times as long per Sequence around a Sequence."""


def encode_space(space: Space) -> Record:
    """Returns `space` as JSON values, with the `original_space` of a flattened space.

    >>> encode_space(spaces.Box(-1.0, float("inf"), (2,)))
    {'type': 'Box', 'dtype': 'float32', 'shape': [2], 'low': -1.0, 'high': {'$float': 'inf'}}
    >>> decode_space(encode_space(spaces.Discrete(3, start=-1)))
    Discrete(3, start=-1)
    """
    codec = _CODECS.get(type(space).__name__)
    if codec is None or type(space) is not codec[0]:
        raise UnsupportedSpaceError(
            f"A space of class {type(space).__module__}.{type(space).__qualname__} cannot be "
            f"stored; supported are Gymnasium's {sorted(_CODECS)}. Rebuild it from these."
        )
    record = {"type": type(space).__name__, **codec[1](space)}
    original = getattr(space, _ORIGINAL_SPACE_KEY, None)
    return record if original is None else {**record, _ORIGINAL_SPACE_KEY: encode_space(original)}


def decode_space(record: Json) -> Space:
    """Inverse of `encode_space`; the space is unseeded."""
    kind = record.get("type") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(kind, str) or kind not in _CODECS:
        raise CheckpointError(f"A space record needs a type of {sorted(_CODECS)}, got {kind!r}.")
    try:
        space = _CODECS[kind][2](record)
        if _ORIGINAL_SPACE_KEY in record:
            setattr(space, _ORIGINAL_SPACE_KEY, decode_space(record[_ORIGINAL_SPACE_KEY]))
        return space
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError("The record of a space is nested too deeply.") from None
    except (LookupError, TypeError, ValueError, AssertionError, ArithmeticError, MemoryError) as e:
        raise CheckpointError(f"The record of a {kind} space is malformed: {e!r}.") from e


def check_space_sizes(record: Any) -> None:
    """Checks that the spaces in a manifest are not implausibly large.

    Bounds that are the same everywhere are stored as one number, so that a few bytes can ask for
    any amount of memory.

    Args:
        record: JSON values that contain results of `encode_space` at any depth.
    """
    size, pending = 0, [(record, 0)]
    while pending:
        part, depth = pending.pop()
        inner = part
        if isinstance(part, dict):
            inner = part.values()
            size += _get_bound_bytes(part)
            kind = part.get("type")
            depth += _DEPTH_COSTS.get(kind, 0) if isinstance(kind, str) else 0
        if depth > _MAX_DEPTH:
            raise CheckpointError(
                "Spaces that are nested more than 32 deep, or Sequences more than 4 deep, cannot "
                "be stored."
            )
        pending += [(x, depth) for x in inner if isinstance(x, dict | list)]
    if size > _MAX_BOUND_BYTES:
        raise CheckpointError(
            f"Spaces whose bounds take {size} bytes cannot be stored: the limit is "
            f"{_MAX_BOUND_BYTES}."
        )


def _get_bound_bytes(record: Record) -> int:
    """Returns the bytes of one bound of a space; 0 for other records."""
    kind = record.get("type")
    shape = record.get("n" if kind == "MultiBinary" else "shape")
    shape = [shape] if type(shape) is int else shape
    if kind not in ("Box", "MultiDiscrete", "MultiBinary") or not isinstance(shape, list):
        return 0
    if any(type(n) is not int or n < 0 for n in shape):
        return 0
    name = record.get("dtype", "int8")
    is_known = isinstance(name, str) and name in DTYPES
    return math.prod(shape) * (DTYPES[name].itemsize if is_known else 1)


def _encode_box(space: spaces.Box) -> Record:
    record = {
        "dtype": _dtype_name(space),
        "shape": list(space.shape),
        "low": _compress(space.low),
        "high": _compress(space.high),
    }
    if space.dtype.kind == "i":  # infinite bounds of integers are stored separately
        for name in ("bounded_below", "bounded_above"):
            if not getattr(space, name).all():
                record[name] = _compress(getattr(space, name))
    return record


def _decode_box(record: Record) -> spaces.Box:
    dtype, shape = decode_dtype(record["dtype"]), decode_shape(record["shape"])
    low, high = (_expand(record[name], dtype, shape) for name in ("low", "high"))
    space = spaces.Box(low, high, shape, dtype.type)
    for name in ("bounded_below", "bounded_above"):
        if name in record:
            setattr(space, name, _expand(record[name], np.dtype(bool), shape))
    return space


def _encode_discrete(space: spaces.Discrete) -> Record:
    return {"dtype": _dtype_name(space), "n": int(space.n), "start": int(space.start)}


def _decode_discrete(record: Record) -> spaces.Discrete:
    dtype = decode_dtype(record["dtype"])
    n, start = (decode_elements([record[name]], dtype, ())[()] for name in ("n", "start"))
    if dtype == np.int64:  # the only dtype before Gymnasium 1.2, which has no such argument
        return spaces.Discrete(int(n), start=int(start))
    return spaces.Discrete(int(n), start=int(start), dtype=dtype.type)


def _encode_multi_discrete(space: spaces.MultiDiscrete) -> Record:
    return {
        "dtype": _dtype_name(space),
        "shape": list(space.nvec.shape),
        "nvec": encode_elements(space.nvec),
        "start": _compress(space.start),
    }


def _decode_multi_discrete(record: Record) -> spaces.MultiDiscrete:
    dtype, shape = decode_dtype(record["dtype"]), decode_shape(record["shape"])
    nvec = decode_elements(record["nvec"], dtype, shape)
    return spaces.MultiDiscrete(nvec, dtype.type, start=_expand(record["start"], dtype, shape))


def _encode_multi_binary(space: spaces.MultiBinary) -> Record:
    return {"n": space.n if isinstance(space.n, int) else [int(n) for n in space.n]}


def _decode_multi_binary(record: Record) -> spaces.MultiBinary:
    n = record["n"]
    return spaces.MultiBinary(n if type(n) is int else decode_shape(n))


def _encode_dict(space: spaces.Dict) -> Record:
    for key in space.spaces:
        if type(key) not in (str, int):
            raise UnsupportedSpaceError(
                f"A Dict space with the key {key!r} cannot be stored: use strings or integers."
            )
    entries = [[key, encode_space(inner)] for key, inner in space.spaces.items()]
    return {"spaces": entries, "sort_keys": bool(getattr(space, "sort_keys", True))}


def _decode_dict(record: Record) -> spaces.Dict:
    entries = [(key, decode_space(inner)) for key, inner in record["spaces"]]
    if any(type(key) not in (str, int) for key, _ in entries):
        raise CheckpointError("A Dict space has strings or integers as keys.")
    if record["sort_keys"] is True:  # the default; the argument is new in Gymnasium 1.3
        return spaces.Dict(entries)
    return spaces.Dict(entries, sort_keys=False)


def _encode_parts(space: spaces.Tuple | spaces.OneOf) -> Record:
    return {"spaces": [encode_space(inner) for inner in space.spaces]}


def _make_parts_decoder(kind: type[spaces.Tuple | spaces.OneOf]) -> Callable[[Record], Space]:
    return lambda record: kind([decode_space(inner) for inner in record["spaces"]])


def _encode_text(space: spaces.Text) -> Record:
    return {
        "min_length": space.min_length,
        "max_length": space.max_length,
        "characters": "".join(space.character_list),
    }


def _decode_text(record: Record) -> spaces.Text:
    characters = record["characters"]
    if not isinstance(characters, str):
        raise CheckpointError("The characters of a Text space must be one string.")
    return spaces.Text(record["max_length"], min_length=record["min_length"], charset=characters)


def _encode_sequence(space: spaces.Sequence) -> Record:
    return {"feature_space": encode_space(space.feature_space), "stack": bool(space.stack)}


def _decode_sequence(record: Record) -> spaces.Sequence:
    return spaces.Sequence(decode_space(record["feature_space"]), stack=record["stack"] is True)


def _encode_graph(space: spaces.Graph) -> Record:
    edges = None if space.edge_space is None else encode_space(space.edge_space)
    return {"node_space": encode_space(space.node_space), "edge_space": edges}


def _decode_graph(record: Record) -> spaces.Graph:
    edges = record["edge_space"]
    return spaces.Graph(
        decode_space(record["node_space"]), None if edges is None else decode_space(edges)
    )


def _dtype_name(space: Space) -> str:
    dtype = np.dtype(space.dtype)
    if not is_plain_dtype(dtype):
        raise UnsupportedSpaceError(
            f"{space} has dtype {dtype}, which cannot be stored. Use native bools, integers or "
            "floats of up to 64 bits."
        )
    return dtype.name


def _compress(array: np.ndarray) -> Any:
    """Returns one number if all elements are bitwise equal, else the flat list."""
    first = array.ravel()[:1]
    if array.size and np.full_like(array, first[0]).tobytes() == array.tobytes():
        return encode_number(first.tolist()[0])
    return encode_elements(array)


def _expand(record: Json, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if isinstance(record, list):
        return decode_elements(record, dtype, shape)
    element = decode_elements([decode_number(record)], dtype, (1,))
    return np.full(shape, element[0], dtype)


_Codec = tuple[type[Any], Callable[[Any], Record], Callable[[Record], Space]]
_CODECS: dict[str, _Codec] = {
    "Box": (spaces.Box, _encode_box, _decode_box),
    "Discrete": (spaces.Discrete, _encode_discrete, _decode_discrete),
    "MultiDiscrete": (spaces.MultiDiscrete, _encode_multi_discrete, _decode_multi_discrete),
    "MultiBinary": (spaces.MultiBinary, _encode_multi_binary, _decode_multi_binary),
    "Dict": (spaces.Dict, _encode_dict, _decode_dict),
    "Tuple": (spaces.Tuple, _encode_parts, _make_parts_decoder(spaces.Tuple)),
    "OneOf": (spaces.OneOf, _encode_parts, _make_parts_decoder(spaces.OneOf)),
    "Text": (spaces.Text, _encode_text, _decode_text),
    "Sequence": (spaces.Sequence, _encode_sequence, _decode_sequence),
    "Graph": (spaces.Graph, _encode_graph, _decode_graph),
}
