"""Allow-list of the classes and functions of this package that a file may name.

Each is marked at its definition, for one role in files. A mark on a class also covers its
subclasses; each function is marked separately. See
`docs/decisions/003-import-paths-in-checkpoints.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_AllowedT = TypeVar("_AllowedT")

_ALLOWED: dict[str, list[Any]] = {}


def allow_in_checkpoint(role: str) -> Callable[[_AllowedT], _AllowedT]:
    """Returns a decorator that allows a class with its subclasses, or a function, in one role.

    >>> @allow_in_checkpoint("greeting of an example")
    ... def hello(): ...
    >>> is_allowed(hello, "greeting of an example"), is_allowed(hello, "callbacks")
    (True, False)
    """

    def mark(value: _AllowedT) -> _AllowedT:
        _ALLOWED.setdefault(role, []).append(value)
        return value

    return mark


def is_allowed(value: object, role: str) -> bool:
    """Returns True if a concrete class, or a function, is allowed in a role."""
    allowed = _ALLOWED.get(role, [])
    if isinstance(value, type):
        bases = tuple(entry for entry in allowed if isinstance(entry, type))
        return issubclass(value, bases) and not inspect.isabstract(value)
    return any(value is entry for entry in allowed)
