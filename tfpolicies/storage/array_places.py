"""Arrays inside nested values, taken out for an array file and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpolicies.errors import CheckpointError

_PLACE = "array"


def take_arrays(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Returns `value` with a numbered place instead of each array in it.

    Args:
        value: anything; arrays are looked for in dicts, lists and tuples.
        arrays: the arrays are added here, under the names of their places.

    >>> found = {}
    >>> take_arrays({"rows": (np.ones(2), 3)}, found), found
    ({'rows': ({'array': '0'}, 3)}, {'0': array([1., 1.])})
    """
    if isinstance(value, np.ndarray):
        name = str(len(arrays))
        arrays[name] = value
        return {_PLACE: name}
    if isinstance(value, Mapping):
        if set(value) == {_PLACE}:
            raise CheckpointError(f"A dict whose only key is {_PLACE!r} cannot be stored here.")
        return {key: take_arrays(part, arrays) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(take_arrays(part, arrays) for part in value)
    return value


def put_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Inverse of `take_arrays`.

    Raises:
        CheckpointError: if an array is missing.

    >>> put_arrays({"rows": ({"array": "0"}, 3)}, {"0": np.ones(2)})
    {'rows': (array([1., 1.]), 3)}
    """
    if isinstance(value, Mapping):
        if set(value) != {_PLACE}:
            return {key: put_arrays(part, arrays) for key, part in value.items()}
        if value[_PLACE] not in arrays:
            raise CheckpointError(f"The checkpoint lacks the array {value[_PLACE]!r}.")
        return arrays[value[_PLACE]]
    if isinstance(value, list | tuple):
        return type(value)(put_arrays(part, arrays) for part in value)
    return value
