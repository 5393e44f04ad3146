"""Dicts of a config whose changes are validated and written back to the config."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from tfpolicies.base.type_aliases import Setting
from tfpolicies.config.policy_spec import PolicySpec

Write = Callable[[dict[str, Any]], None]


class LiveDict(dict[str, Any]):
    """A dict of a config: changes are written back to the setting, if they are valid.

    Nested dicts are also of this class; copies are plain dicts.

    Args:
        values: its content.
        write: called with the complete new content; raises if it is invalid.

    >>> found = []
    >>> LiveDict({"a": {"b": 1}}, found.append)["a"]["b"] = 2
    >>> found
    [{'a': {'b': 2}}]
    """

    def __init__(self, values: Mapping[str, Any], write: Write) -> None:
        self._write = write
        super().__init__()
        self._set_values(values)

    def _set_values(self, values: Mapping[str, Any]) -> None:
        super().clear()
        for key, part in values.items():
            super().__setitem__(key, wrap_mutable(part, functools.partial(self.__setitem__, key)))

    def _change(self, name: str, *args: Setting, **kwargs: Setting) -> Any:
        """Calls a method of a plain copy and writes the result back to the config."""
        values = dict(self)
        result = getattr(values, name)(*args, **kwargs)
        self._write(values)
        self._set_values(values)
        return result

    def __setitem__(self, key: str, value: Setting) -> None:
        self._change("__setitem__", key, value)

    def __delitem__(self, key: str) -> None:
        self._change("__delitem__", key)

    def __ior__(self, other: Mapping[str, Any]) -> LiveDict:  # type: ignore[override, misc]
        self._change("update", other)
        return self

    def clear(self) -> None:
        self._change("clear")

    def pop(self, *args: Any) -> Any:
        return self._change("pop", *args)

    def popitem(self) -> tuple[str, Any]:
        key, value = self._change("popitem")
        return key, value

    def setdefault(self, *args: Any) -> Any:
        return self._change("setdefault", *args)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._change("update", *args, **kwargs)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


PLAIN_TYPES = frozenset((type(None), bool, int, float, str, type))
"""Types of values that need no copy; most settings have them."""


def is_same(value: Setting, current: Setting) -> bool:
    """Returns whether two values are identical, or equal and plain, also within containers."""
    if value is current or type(value) is not type(current):
        return value is current
    if isinstance(value, dict) and isinstance(current, dict) and type(value) in _DICT_TYPES:
        same_keys = list(value) == list(current)
        return same_keys and is_same([*value.values()], [*current.values()])
    if isinstance(value, list | tuple) and isinstance(current, list | tuple):
        parts_equal = [x is y or is_same(x, y) for x, y in zip(value, current, strict=False)]
        return len(value) == len(current) and all(parts_equal)
    return type(value) in PLAIN_TYPES and bool(value == current)


def is_equal(value: object, current: object) -> bool:
    """Returns whether two settings are equal; False if undecidable, as for dicts with arrays."""
    try:
        return bool(value is current or value == current)
    except ValueError:
        return False


_DICT_TYPES = frozenset((dict, LiveDict))


def is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    """Returns whether a value is a plain dict, not another mapping such as `gym.spaces.Dict`."""
    return type(value) in _DICT_TYPES


def copy_containers(value: Setting | PolicySpec) -> Any:
    """Copies plain dicts, lists and sets, but not the objects in them."""
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, dict) and type(value) in _DICT_TYPES:
        return {
            key: x if type(x) in PLAIN_TYPES else copy_containers(x) for key, x in value.items()
        }
    if isinstance(value, list):
        return [x if type(x) in PLAIN_TYPES else copy_containers(x) for x in value]
    return set(value) if isinstance(value, set) else value


def to_dict_value(value: Setting | PolicySpec) -> Any:
    """Returns a copy of `value` for `to_dict`, with policy specs as 4-tuples."""
    if isinstance(value, dict) and type(value) in _DICT_TYPES:
        return {key: x if type(x) in PLAIN_TYPES else to_dict_value(x) for key, x in value.items()}
    if isinstance(value, PolicySpec):
        spaces = value.observation_space, value.action_space
        return value.policy_class, *spaces, copy_containers(value.config)
    return copy_containers(value)


def wrap_mutable(value: Setting | PolicySpec, write: Write) -> Any:
    """Returns `value` for a reader: dicts as `LiveDict`, lists and specs as copies."""
    if is_dict(value):
        return LiveDict(value, write)
    if isinstance(value, PolicySpec):
        return dataclasses.replace(value, config=copy_containers(value.config))
    return copy_containers(value)


def merge_dicts(
    current: Mapping[str, Any], changes: Mapping[str, Any], *, deep: bool
) -> dict[str, Any]:
    """Merges `changes` into a copy of `current`.

    >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}}, deep=True)
    {'a': {'x': 1, 'y': 2}}
    """
    result = dict(current)
    for key, value in changes.items():
        both_dicts = is_dict(value) and is_dict(result.get(key))
        result[key] = merge_dicts(result[key], value, deep=True) if deep and both_dicts else value
    return result
