"""Limits on texts of requests, and how error messages quote them."""

from __future__ import annotations

import reprlib
from collections.abc import Sized
from typing import Any

from tfpolicies.errors import RequestError

LONGEST_NAME = 256
"""Most characters of a name in a request."""

_MOST_TENSORS = 1000  # most inputs, or outputs, of a request
_LONGEST_QUOTE = 200  # most characters of a request that an error quotes


class _ShortRepr(reprlib.Repr):
    """`repr` whose cost does not depend on the size of the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _LONGEST_QUOTE
        self.maxlist = self.maxtuple = 32
        self.maxlevel = 3

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        return f"an object of {len(value)} entries"


_short = _ShortRepr()


def quote(value: Any) -> str:
    """Returns `repr` of a request's value, cut to 200 characters.

    >>> quote("obs"), len(quote("o" * 1000))
    ("'obs'", 200)
    """
    text = "null" if value is None else _short.repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 3]}..."


def require_few(what: str, tensors: Sized) -> None:
    """Refuses more than 1000 inputs or outputs.

    Raises:
        RequestError: if there are more.
    """
    if len(tensors) > _MOST_TENSORS:
        raise RequestError(
            f"A request may have at most {_MOST_TENSORS} {what}, got {len(tensors)}."
        )


def require_short(what: str, name: str) -> None:
    """Refuses a long name before it is compared with others.

    Raises:
        RequestError: if it has more than 256 characters.
    """
    if len(name) > LONGEST_NAME:
        raise RequestError(
            f"The name of {what} may have at most {LONGEST_NAME} characters, got {len(name)}: "
            f"{quote(name)}. Give a name of the model's metadata."
        )
