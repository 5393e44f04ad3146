"""Containers of a config, handed out so that writing to them cannot change it unnoticed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from tfpolicies.errors import FrozenConfigError


class ReadOnlyDict(dict[str, Any]):
    """A dict that a config hands out: it reads like any other, and copies of it are plain dicts.

    Args:
        values: what it holds.
        way: the call that changes the setting instead, for the error.

    >>> ReadOnlyDict({"a": 1}, "environment(env_config={...})")["a"] = 2
    Traceback (most recent call last):
    ...
    tfpolicies.errors.FrozenConfigError: A dict read from a config cannot be written; ...
    """

    def __init__(self, values: Mapping[str, Any], way: str) -> None:
        super().__init__(values)
        self._way = way

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FrozenConfigError(
            f"A dict read from a config cannot be written; change the setting by {self._way}, or "
            "work on a copy: dict(...)."
        )

    __setitem__ = __delitem__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
    __ior__ = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


_PLAIN = frozenset((type(None), bool, int, float, str, type))


def copied(value: Any) -> Any:
    """Returns `value` with its dicts and lists copied; what is in them stays the same object."""
    if type(value) in _PLAIN:  # nearly all; asking for a Mapping takes ten times as long
        return value
    if isinstance(value, Mapping):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copied(part) for part in value]
    return value


def handed_out(value: Any, way: str) -> Any:
    """Returns `value` as a reader gets it: lists as copies, dicts as read-only ones."""
    if isinstance(value, Mapping):
        return ReadOnlyDict({key: handed_out(part, way) for key, part in value.items()}, way)
    return copied(value)


def merged(present: Mapping[str, Any], changes: Mapping[str, Any], *, deep: bool) -> dict[str, Any]:
    """Returns `present` with `changes` laid over it.

    >>> merged({"a": {"x": 1}}, {"a": {"y": 2}}, deep=True)
    {'a': {'x': 1, 'y': 2}}
    """
    result = dict(present)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value, deep=True) if deep and both else value
    return result
