"""Limits on texts of requests, and how error messages quote them."""

from __future__ import annotations

import reprlib
from collections.abc import Sized
from typing import Any

from tfpolicies.errors import RequestError

MAX_NAME_LENGTH = 256
"""Most characters of a name in a request."""

_MAX_TENSORS = 1000  # most inputs, or outputs, of a request
_MAX_QUOTE_LENGTH = 200  # most characters of a request that an error quotes


class _ShortRepr(reprlib.Repr):
    """`repr` whose cost does not depend on the size of the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MAX_QUOTE_LENGTH
        self.maxlist = self.maxtuple = 32
        self.maxlevel = 3

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        return f"an object of {len(value)} entries"


_short_repr = _ShortRepr()


def quote(value: Any) -> str:
    """Returns `repr` of a request's value, cut to 200 characters.

    >>> quote("obs"), len(quote("o" * 1000))
    ("'obs'", 200)
    """
    text = "null" if value is None else _short_repr.repr(value)
    return text if len(text) <= _MAX_QUOTE_LENGTH else f"{text[: _MAX_QUOTE_LENGTH - 3]}..."


def require_few(description: str, tensors: Sized) -> None:
    """Refuses more than 1000 inputs or outputs."""
    if len(tensors) > _MAX_TENSORS:
        raise RequestError(
            f"A request may have at most {_MAX_TENSORS} {description}, got {len(tensors)}."
        )


def require_short(description: str, name: str) -> None:
    """Refuses a long name before it is compared with others."""
    if len(name) > MAX_NAME_LENGTH:
        raise RequestError(
            f"The name of {description} may have at most {MAX_NAME_LENGTH} characters, got "
            f"{len(name)}: {quote(name)}. Give a name of the model's metadata."
        )
