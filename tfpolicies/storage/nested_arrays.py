"""Extracts arrays from nested values for an array file, and restores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.errors import CheckpointError
from tfpolicies.storage.segment_files import Segment

_ARRAY_KEY, _SEGMENT_KEY = "array", "segment"


def extract_arrays(
    value: Any, arrays: dict[str, np.ndarray], segments: list[Segment] | None = None
) -> Any:
    """Returns `value` with a numbered reference instead of each array and segment in it.

    Args:
        value: anything; dicts, lists and tuples are searched for arrays.
        arrays: the arrays are added here, under the names of their references.
        segments: the segments are added here; None if there can be none.

    >>> arrays = {}
    >>> extract_arrays({"rows": (np.ones(2), 3)}, arrays), arrays
    ({'rows': ({'array': '0'}, 3)}, {'0': array([1., 1.])})
    """
    if isinstance(value, np.ndarray):
        name = str(len(arrays))
        arrays[name] = value
        return {_ARRAY_KEY: name}
    if segments is not None and isinstance(value, Segment):
        segments.append(value)
        return {_SEGMENT_KEY: len(segments) - 1}
    if isinstance(value, Mapping):
        if len(value) == 1 and (key := next(iter(value))) in (_ARRAY_KEY, _SEGMENT_KEY):
            raise CheckpointError(f"A dict whose only key is {key!r} cannot be stored here.")
        return {key: extract_arrays(part, arrays, segments) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(extract_arrays(part, arrays, segments) for part in value)
    return value


def restore_arrays(
    value: Any, arrays: Mapping[str, np.ndarray], segments: Sequence[Segment] = ()
) -> Any:
    """Inverse of `extract_arrays`.

    Raises:
        CheckpointError: if an array or a segment is missing.

    >>> restore_arrays({"rows": ({"array": "0"}, 3)}, {"0": np.ones(2)})
    {'rows': (array([1., 1.]), 3)}
    """
    if isinstance(value, Mapping):
        if set(value) == {_ARRAY_KEY}:
            return _look_up(value[_ARRAY_KEY], arrays)
        if set(value) == {_SEGMENT_KEY}:
            return _look_up(value[_SEGMENT_KEY], dict(enumerate(segments)))
        return {key: restore_arrays(part, arrays, segments) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(restore_arrays(part, arrays, segments) for part in value)
    return value


def _look_up(name: Any, parts: Mapping[Any, Any]) -> Any:
    if name not in parts:
        raise CheckpointError(f"The checkpoint lacks the array {name!r}.")
    return parts[name]
