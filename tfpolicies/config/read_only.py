"""Containers of a config, handed out so that writing to them cannot change it unnoticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from tfpolicies.config.policy_spec import PolicySpec
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


def is_same(value: Any, present: Any) -> bool:
    """Whether two values are the same object, or equal plain ones of one type."""
    return value is present or (
        type(value) is type(present) and type(value) in _PLAIN and value == present
    )


def is_equal(value: Any, present: Any) -> bool:
    """Whether two settings are equal; False where nobody can say, as of dicts with arrays."""
    try:
        return bool(value is present or value == present)
    except ValueError:
        return False


def copied(value: Any) -> Any:
    """Returns `value` with its dicts, lists and sets copied; what is in them stays the same."""
    if type(value) in _PLAIN:  # nearly all; asking for a Mapping takes ten times as long
        return value
    if isinstance(value, Mapping):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copied(part) for part in value]
    return set(value) if isinstance(value, set) else value


def in_dict(value: Any) -> Any:
    """Returns a copy of `value` as `to_dict` has it: the specs of policies as 4-tuples."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {key: in_dict(part) for key, part in value.items()}
    if isinstance(value, PolicySpec):
        spaces = value.observation_space, value.action_space
        return value.policy_class, *spaces, copied(value.config)
    return copied(value)


def handed_out(value: Any, way: str) -> Any:
    """Returns `value` as a reader gets it: dicts read-only, lists and specs as copies."""
    if isinstance(value, Mapping):
        return ReadOnlyDict({key: handed_out(part, way) for key, part in value.items()}, way)
    if isinstance(value, PolicySpec):
        return dataclasses.replace(value, config=copied(value.config))
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
