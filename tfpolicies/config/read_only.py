"""Dicts of a config whose changes are validated and written back to the config."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from tfpolicies.config.policy_spec import PolicySpec
from tfpolicies.type_aliases import Setting

Write = Callable[[dict[str, Any]], None]


class ConfigDict(dict[str, Any]):
    """A dict of a config: changes are written back to the setting, if they are valid.

    Nested dicts are also of this class; copies are plain dicts.

    Args:
        values: its content.
        write: called with the complete new content; raises if it is invalid.

    >>> found = []
    >>> ConfigDict({"a": {"b": 1}}, found.append)["a"]["b"] = 2
    >>> found
    [{'a': {'b': 2}}]
    """

    def __init__(self, values: Mapping[str, Any], write: Write) -> None:
        self._write = write
        super().__init__()
        self._hold(values)

    def _hold(self, values: Mapping[str, Any]) -> None:
        super().clear()
        for key, part in values.items():
            super().__setitem__(key, handed_out(part, functools.partial(self.__setitem__, key)))

    def _change(self, name: str, *args: Setting, **kwargs: Setting) -> Any:
        """Calls a method of a plain copy and writes the result back to the config."""
        values = dict(self)
        result = getattr(values, name)(*args, **kwargs)
        self._write(values)
        self._hold(values)
        return result

    def __setitem__(self, key: str, value: Setting) -> None:
        self._change("__setitem__", key, value)

    def __delitem__(self, key: str) -> None:
        self._change("__delitem__", key)

    def __ior__(self, other: Mapping[str, Any]) -> ConfigDict:  # type: ignore[override, misc]
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


PLAIN = frozenset((type(None), bool, int, float, str, type))
"""Types of values that need no copy; most settings have them."""


def is_same(value: Setting, present: Setting) -> bool:
    """Returns whether two values are identical, or equal and plain, also within containers."""
    if value is present or type(value) is not type(present):
        return value is present
    if isinstance(value, dict) and isinstance(present, dict) and type(value) in _DICTS:
        same_keys = list(value) == list(present)
        return same_keys and is_same([*value.values()], [*present.values()])
    if isinstance(value, list | tuple) and isinstance(present, list | tuple):
        same = [x is y or is_same(x, y) for x, y in zip(value, present, strict=False)]
        return len(value) == len(present) and all(same)
    return type(value) in PLAIN and bool(value == present)


def is_equal(value: object, present: object) -> bool:
    """Returns whether two settings are equal; False if undecidable, as for dicts with arrays."""
    try:
        return bool(value is present or value == present)
    except ValueError:
        return False


_DICTS = frozenset((dict, ConfigDict))


def is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    """Returns whether a value is a plain dict, not another mapping such as `gym.spaces.Dict`."""
    return type(value) in _DICTS


def copied(value: Setting | PolicySpec) -> Any:
    """Copies plain dicts, lists and sets, but not the objects in them."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict) and type(value) in _DICTS:
        return {key: x if type(x) in PLAIN else copied(x) for key, x in value.items()}
    if isinstance(value, list):
        return [x if type(x) in PLAIN else copied(x) for x in value]
    return set(value) if isinstance(value, set) else value


def in_dict(value: Setting | PolicySpec) -> Any:
    """Returns a copy of `value` for `to_dict`, with policy specs as 4-tuples."""
    if isinstance(value, dict) and type(value) in _DICTS:
        return {key: x if type(x) in PLAIN else in_dict(x) for key, x in value.items()}
    if isinstance(value, PolicySpec):
        spaces = value.observation_space, value.action_space
        return value.policy_class, *spaces, copied(value.config)
    return copied(value)


def handed_out(value: Setting | PolicySpec, write: Write) -> Any:
    """Returns `value` for a reader: dicts as `ConfigDict`, lists and specs as copies."""
    if is_dict(value):
        return ConfigDict(value, write)
    if isinstance(value, PolicySpec):
        return dataclasses.replace(value, config=copied(value.config))
    return copied(value)


def merged(present: Mapping[str, Any], changes: Mapping[str, Any], *, deep: bool) -> dict[str, Any]:
    """Merges `changes` into a copy of `current`.

    >>> merged({"a": {"x": 1}}, {"a": {"y": 2}}, deep=True)
    {'a': {'x': 1, 'y': 2}}
    """
    result = dict(present)
    for key, value in changes.items():
        both = is_dict(value) and is_dict(result.get(key))
        result[key] = merged(result[key], value, deep=True) if deep and both else value
    return result
