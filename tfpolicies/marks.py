"""Allow-list of the classes and functions of this package that a file may name.

Each is marked at its definition, for one role in files. A mark on a class also covers its
subclasses; each function is marked separately. See
`docs/decisions/003-import-paths-in-checkpoints.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Marked = TypeVar("_Marked")

_MARKED: dict[str, list[Any]] = {}


def for_place(place: str) -> Callable[[_Marked], _Marked]:
    """Returns a decorator that allows a class with its subclasses, or a function, in one role.

    >>> @for_place("greeting of an example")
    ... def hello(): ...
    >>> fits(hello, "greeting of an example"), fits(hello, "callbacks")
    (True, False)
    """

    def mark(value: _Marked) -> _Marked:
        _MARKED.setdefault(place, []).append(value)
        return value

    return mark


def fits(value: object, place: str) -> bool:
    """Returns True if a concrete class, or a function, is allowed in a role."""
    marked = _MARKED.get(place, [])
    if isinstance(value, type):
        bases = tuple(each for each in marked if isinstance(each, type))
        return issubclass(value, bases) and not inspect.isabstract(value)
    return any(value is each for each in marked)
