"""Encodes config values as JSON and decodes them, exactly.

JSON values stay as they are. Everything else becomes an object with one key that starts with `$`:

=================  =================================================================
`$float`           "inf", "-inf" or "nan"
`$tuple`, `$set`,  a list of the elements
`$frozenset`
`$dict`            a list of pairs: a dict with a key that is not a string or starts with `$`
`$scalar`          a NumPy scalar: dtype and value
`$array`           a small NumPy array: dtype, shape and elements
`$space`           a Gymnasium space
`$import`          a class or function, by its import path "package.module:qualname"
`$unavailable`     the name of an object that has no import path, such as a lambda
=================  =================================================================
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.base.type_aliases import Json, Setting
from tfpolicies.errors import CheckpointError, ConfigError
from tfpolicies.storage.arrays_json import (
    decode_array,
    decode_dtype,
    decode_elements,
    decode_number,
    encode_array,
    encode_number,
    is_plain_dtype,
)
from tfpolicies.storage.import_paths import UnresolvedObject, get_declared_path, get_import_path
from tfpolicies.storage.spaces_json import decode_space, encode_space

_COLLECTIONS: dict[str, type[Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_TAGS = {kind: tag for tag, kind in _COLLECTIONS.items()}


def encode_value(value: object) -> Any:
    """Returns `value` as JSON values.

    Objects without an import path are stored only by name: lambdas, functions defined in functions,
    instances. `decode_value` replaces them by a `UnresolvedObject`, and `warn_unavailable_objects`
    lists them. An `OrderedDict` becomes a dict.

    Raises:
        ConfigError: if `value` contains itself or is nested too deeply.
        UnsupportedSpaceError: if it holds a space that is not one of Gymnasium's.

    >>> encode_value({"lr": 1e-3, "hiddens": (64, 64), 3: float("inf")})
    {'$dict': [['lr', 0.001], ['hiddens', {'$tuple': [64, 64]}], [3, {'$float': 'inf'}]]}
    """
    try:
        return _encode(value)
    except RecursionError:
        raise ConfigError(
            "A value that contains itself, or is nested hundreds of levels deep, cannot be stored."
        ) from None


def warn_unavailable_objects(record: Json) -> None:
    """Warns once about all objects in a record that have no import path.

    Args:
        record: JSON values that contain results of `encode_value`.
    """
    parts = iterate_parts(record, "")
    names = dict.fromkeys(x for path, x in parts if path.endswith("['$unavailable']"))
    if names:
        warnings.warn(
            f"These have no import path and are stored by name only: {', '.join(names)}. Loading "
            "requires the necessary ones as arguments, as it does all classes and functions of "
            "other packages than tfpolicies.",
            UserWarning,
            stacklevel=3,
        )


def decode_value(record: Json) -> Any:
    """Inverse of `encode_value`, but without objects: nothing that a record names is imported.

    Each class and function becomes a `UnresolvedObject`. `places.resolve_allowed` replaces those
    that are allowed; without it all stay unresolved, so a location without a rule never gets an
    object.

    Args:
        record: Result of `encode_value`, perhaps read from a JSON file.

    >>> decode_value(encode_value({"shape": (84, 84), "low": np.float32(0.5)}))
    {'shape': (84, 84), 'low': np.float32(0.5)}
    >>> decode_value({"$import": "my.module:f"})
    UnresolvedObject(name='my.module:f', importable=True)
    """
    try:
        return _decode(record)
    except RecursionError:
        raise CheckpointError("The record of a value is nested too deeply.") from None


def find_unresolved(value: Setting) -> dict[str, UnresolvedObject]:
    """Returns each `UnresolvedObject` in a decoded value by its path; empty if there is none.

    >>> find_unresolved({"multi_agent": {"mapping": UnresolvedObject("train:<lambda>")}, "lr": 0.1})
    {"['multi_agent']['mapping']": UnresolvedObject(name='train:<lambda>', importable=False)}
    """
    return {
        path: part for path, part in iterate_parts(value, "") if isinstance(part, UnresolvedObject)
    }


def iterate_parts(value: Setting, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the elements of nested dicts, lists, tuples and sets, each with its path.

    Args:
        value: anything.
        path: path of the value.
    """
    if isinstance(value, dict):
        for key, element in value.items():
            yield from iterate_parts(key, f"{path}.keys()")
            yield from iterate_parts(element, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple | set | frozenset):
        for index, element in enumerate(value):
            yield from iterate_parts(element, f"{path}[{index}]")
    else:
        yield path, value


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return encode_number(value) if kind is float else value
    if kind is list:
        return [_encode(element) for element in value]
    if kind is tuple:
        return {"$tuple": [_encode(element) for element in value]}
    if kind in (set, frozenset):
        elements = sorted(value, key=lambda x: (type(x).__name__, repr(x)))  # same in all processes
        return {_TAGS[kind]: [_encode(element) for element in elements]}
    if kind in (dict, OrderedDict):
        return _encode_dict(value)
    if isinstance(value, np.generic) and is_plain_dtype(value.dtype):
        number = encode_number(value.item())
        return {"$scalar": {"dtype": value.dtype.name, "value": number}}
    if kind is np.ndarray and is_plain_dtype(value.dtype):
        return {"$array": encode_array(value)}
    if isinstance(value, spaces.Space):
        return {"$space": encode_space(value)}
    return _encode_object(value)


def _encode_dict(value: dict[Any, Any]) -> dict[str, Any]:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(element) for key, element in value.items()}
    return {"$dict": [[_encode(key), _encode(x)] for key, x in value.items()]}


def _encode_object(value: Setting) -> dict[str, str]:
    if isinstance(value, UnresolvedObject):
        return {"$import" if value.importable else "$unavailable": value.name}
    path = get_import_path(value)
    return {"$unavailable": get_declared_path(value)} if path is None else {"$import": path}


def _decode(record: Json) -> Any:
    if record is None or type(record) in (bool, int, float, str):
        return record
    if isinstance(record, list):
        return [_decode(element) for element in record]
    if not isinstance(record, dict):
        raise CheckpointError(f"The record {record!r} is not made of JSON values.")
    tags = [key for key in record if isinstance(key, str) and key.startswith("$")]
    if not tags:
        return {key: _decode(element) for key, element in record.items()}
    if len(record) != 1:
        raise CheckpointError(f"The record with the keys {list(record)} is malformed.")
    return _decode_tagged(tags[0], record[tags[0]])


def _decode_tagged(tag: str, content: Any) -> Any:
    if tag in _COLLECTIONS and isinstance(content, list):
        elements = [_decode(element) for element in content]
        return _build_hashable(tag, lambda: _COLLECTIONS[tag](elements))
    if tag == "$dict" and isinstance(content, list):
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in content):
            raise CheckpointError("A $dict record needs a list of pairs.")
        pairs = [[_decode(part) for part in pair] for pair in content]
        return _build_hashable(tag, lambda: dict(pairs))
    if tag in ("$import", "$unavailable") and isinstance(content, str):
        return UnresolvedObject(content, importable=tag == "$import")
    if tag == "$float":
        return decode_number({tag: content})
    if tag == "$array":
        return decode_array(content)
    if tag == "$space":
        return decode_space(content)
    if tag == "$scalar" and isinstance(content, dict) and set(content) == {"dtype", "value"}:
        return decode_elements([content["value"]], decode_dtype(content["dtype"]), ())[()]
    raise CheckpointError(f"A record tagged {tag!r} is unknown or malformed.")


def _build_hashable(tag: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except TypeError as error:
        raise CheckpointError(f"A {tag} record has an invalid key: {error}.") from error
