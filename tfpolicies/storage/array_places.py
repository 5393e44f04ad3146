"""Extracts arrays from nested values for an array file, and restores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.errors import CheckpointError
from tfpolicies.storage.segments import Segment

_PLACE, _SEGMENT = "array", "segment"


def take_arrays(
    value: Any, arrays: dict[str, np.ndarray], segments: list[Segment] | None = None
) -> Any:
    """Returns `value` with a numbered reference instead of each array and segment in it.

    Args:
        value: anything; dicts, lists and tuples are searched for arrays.
        arrays: the arrays are added here, under the names of their references.
        segments: the segments are added here; None if there can be none.

    >>> arrays = {}
    >>> take_arrays({"rows": (np.ones(2), 3)}, arrays), arrays
    ({'rows': ({'array': '0'}, 3)}, {'0': array([1., 1.])})
    """
    if isinstance(value, np.ndarray):
        name = str(len(arrays))
        arrays[name] = value
        return {_PLACE: name}
    if segments is not None and isinstance(value, Segment):
        segments.append(value)
        return {_SEGMENT: len(segments) - 1}
    if isinstance(value, Mapping):
        if len(value) == 1 and (key := next(iter(value))) in (_PLACE, _SEGMENT):
            raise CheckpointError(f"A dict whose only key is {key!r} cannot be stored here.")
        return {key: take_arrays(part, arrays, segments) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(take_arrays(part, arrays, segments) for part in value)
    return value


def put_arrays(
    value: Any, arrays: Mapping[str, np.ndarray], segments: Sequence[Segment] = ()
) -> Any:
    """Inverse of `take_arrays`.

    Raises:
        CheckpointError: if an array or a segment is missing.

    >>> put_arrays({"rows": ({"array": "0"}, 3)}, {"0": np.ones(2)})
    {'rows': (array([1., 1.]), 3)}
    """
    if isinstance(value, Mapping):
        if set(value) == {_PLACE}:
            return _found(value[_PLACE], arrays)
        if set(value) == {_SEGMENT}:
            return _found(value[_SEGMENT], dict(enumerate(segments)))
        return {key: put_arrays(part, arrays, segments) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(put_arrays(part, arrays, segments) for part in value)
    return value


def _found(name: Any, known: Mapping[Any, Any]) -> Any:
    if name not in known:
        raise CheckpointError(f"The checkpoint lacks the array {name!r}.")
    return known[name]
