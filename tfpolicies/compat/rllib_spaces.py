"""Converts spaces in RLlib's checkpoints: `space_to_dict` records, and pickled Gymnasium spaces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.compat.pickle_process import ObjectRecord
from tfpolicies.errors import CheckpointError, UnsupportedSpaceError

_SPACE_CLASS_NAME = re.compile(r"gym(?:nasium)?\.spaces\.\w+:(\w+)")
_MAX_DEPTH = 16
_CLASS_NAMES = {
    "box": "Box",
    "discrete": "Discrete",
    "multi-discrete": "MultiDiscrete",
    "multi-binary": "MultiBinary",
    "tuple": "Tuple",
    "dict": "Dict",
}
"""RLlib's name of a space -> its class."""


def convert_space(record: Any, space_name: str) -> spaces.Space:
    """Returns the space of a record, with the `original_space` that it was made from.

    Args:
        record: a result of RLlib's `space_to_dict`, or a pickled space as it was read.
        space_name: the name of the space, for messages.

    Raises:
        CheckpointError: if it is missing or malformed.
        UnsupportedSpaceError: if its class is not supported.
    """
    original = None
    if isinstance(record, Mapping) and isinstance(record.get("space"), Mapping | ObjectRecord):
        record, original = record["space"], record.get("original_space")
    elif isinstance(record, ObjectRecord) and isinstance(record.state, Mapping):
        original = record.state.get("original_space")
    try:
        space = _make_space(record, 0)
        if original is not None:
            vars(space)["original_space"] = convert_space(original, space_name)
    except (LookupError, TypeError, ValueError, AssertionError, ArithmeticError) as error:
        if isinstance(error, CheckpointError | UnsupportedSpaceError):
            raise
        raise CheckpointError(
            f"The {space_name} of the checkpoint is malformed: {error!r:.200}. Give an unchanged "
            "checkpoint of RLlib."
        ) from error
    return space


def _make_space(record: Any, depth: int) -> spaces.Space:
    kind, fields = _read_fields(record)
    if kind not in _MAKERS or depth > _MAX_DEPTH:
        raise UnsupportedSpaceError(
            f"A space of the class {kind!r:.80} cannot be imported; supported are "
            f"{', '.join(_MAKERS)}, nested at most {_MAX_DEPTH} deep. Rebuild it from these."
        )
    return _MAKERS[kind](fields, depth)


def _read_fields(record: Any) -> tuple[str, Mapping[str, Any]]:
    """Returns the class name of a space, and its fields."""
    if isinstance(record, ObjectRecord):
        match = _SPACE_CLASS_NAME.fullmatch(record.name)
        state = record.state if isinstance(record.state, Mapping) else {}
        return (match[1] if match else record.name), {**state, "shape": state.get("_shape")}
    if isinstance(record, Mapping):
        kind = record.get("space")
        return _CLASS_NAMES.get(kind, str(kind)) if isinstance(kind, str) else str(kind), record
    raise TypeError(f"a {type(record).__name__} is not a space")


def _read_dtype(fields: Mapping[str, Any]) -> np.dtype:
    stored = fields["dtype"]
    is_record = isinstance(stored, ObjectRecord) and stored.name == "numpy:dtype"
    dtype = np.dtype(str(stored.args if is_record else stored))
    if dtype.kind not in "biuf":
        raise ValueError(f"the dtype {dtype} is not supported by spaces")
    return dtype


def _make_box(fields: Mapping[str, Any], depth: int) -> spaces.Box:
    dtype, shape = _read_dtype(fields), tuple(map(int, fields["shape"]))
    low, high = (np.asarray(fields[name], dtype) for name in ("low", "high"))
    if low.shape != shape or high.shape != shape:
        raise ValueError(f"its bounds have the shapes {low.shape} and {high.shape}, not {shape}")
    return spaces.Box(low, high, shape, dtype.type)


def _make_multi_discrete(fields: Mapping[str, Any], depth: int) -> spaces.MultiDiscrete:
    if np.any(fields.get("start", 0)):
        return spaces.MultiDiscrete(fields["nvec"], start=fields["start"])
    return spaces.MultiDiscrete(np.asarray(fields["nvec"]))


def _make_multi_binary(fields: Mapping[str, Any], depth: int) -> spaces.MultiBinary:
    n = fields["n"]
    return spaces.MultiBinary(int(n) if np.ndim(n) == 0 else tuple(map(int, n)))


def _make_dict(fields: Mapping[str, Any], depth: int) -> spaces.Dict:
    inner = fields["spaces"]
    entries = [(str(key), _make_space(subspace, depth + 1)) for key, subspace in inner.items()]
    result = spaces.Dict(entries)
    if [*result.spaces] != [key for key, _ in entries]:  # RLlib flattens them in this order
        result = spaces.Dict(entries, sort_keys=False)
    return result


_MAKERS: dict[str, Callable[[Mapping[str, Any], int], spaces.Space]] = {
    "Box": _make_box,
    "Discrete": lambda fields, _: spaces.Discrete(
        int(fields["n"]), start=int(fields.get("start", 0))
    ),
    "MultiDiscrete": _make_multi_discrete,
    "MultiBinary": _make_multi_binary,
    "Tuple": lambda fields, depth: spaces.Tuple(
        [_make_space(each, depth + 1) for each in fields["spaces"]]
    ),
    "Dict": _make_dict,
}
