"""What of this package a file may name: marked where it is defined, each for one place.

A class is marked once, at its base, for itself and all of its subclasses; a function has no base
that could be checked, so each one is marked itself. See
`docs/decisions/003-import-paths-in-checkpoints.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Marked = TypeVar("_Marked")

_MARKED: dict[str, list[Any]] = {}


def for_place(place: str) -> Callable[[_Marked], _Marked]:
    """Returns what marks a class with its subclasses, or a function, for one place in files.

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
    """Returns True if a class that can be made, or a function, bears the mark of a place."""
    marked = _MARKED.get(place, [])
    if isinstance(value, type):
        bases = tuple(each for each in marked if isinstance(each, type))
        return issubclass(value, bases) and not inspect.isabstract(value)
    return any(value is each for each in marked)
