"""How a function becomes a method of objects that do not have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def as_method(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Returns what gives an object a function, which takes the object first, as its method."""
    return partial(partial, function)
