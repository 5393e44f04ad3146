"""Validators of values, with descriptions for messages."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple


class Validator(NamedTuple):
    """Validator of a value, with a description for messages.

    Attributes:
        is_valid: returns True for a valid value.
        description: completes "must be ..." in messages.
        hint: returns an addition to the message about an invalid value, or "".
    """

    is_valid: Callable[[Any], bool]
    description: str
    hint: Callable[[Any], str] = lambda value: ""

    def or_none(self) -> Validator:
        """Returns a validator that also allows None."""
        return Validator(
            lambda x: x is None or self.is_valid(x), f"None or {self.description}", self.hint
        )


def is_number(value: object) -> bool:
    """Returns True if `value` is a real number that a float can hold (and not a bool or NaN)."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and not math.isnan(_as_float(value))


def is_finite(value: object) -> bool:
    """Returns True if `value` is a finite real number, Python's or NumPy's (and not a bool)."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and math.isfinite(_as_float(value))


def is_one_of(value: object, *choices: object) -> bool:
    """Returns True if `value` equals one of the choices; arrays never do."""
    return isinstance(value, Hashable) and value in choices


def is_unicode(text: str) -> bool:
    """Returns True if UTF-8 can hold a text: it has no lone surrogates."""
    return text.encode(errors="ignore").decode() == text


def _as_float(number: Any) -> float:
    """Returns a real number as a float; NaN for an integer that is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.nan


def is_schedule(value: object, is_element: Callable[[Any], bool] = is_number) -> bool:
    """Returns True if a value is `[[timestep, number], ...]` with increasing timesteps.

    Args:
        value: anything.
        is_element: checks one number.
    """
    if not isinstance(value, list | tuple) or not value:
        return False
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return False
    times = [pair[0] for pair in value]
    return all(is_element(x) for pair in value for x in pair) and times == sorted(set(times))


def is_int_at_least(value: object, minimum: int = 1) -> bool:
    """Returns True if `value` is an integer of at least `minimum` (and not a bool)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def int_at_least(minimum: int) -> Validator:
    """Returns a validator of integers >= `minimum`."""
    return Validator(lambda x: is_int_at_least(x, minimum), f"an integer >= {minimum}")


def one_of(*allowed: object) -> Validator:
    """Returns a validator that allows only some values."""
    return Validator(lambda x: is_one_of(x, *allowed), f"one of {allowed}")


def function(description: str) -> Validator:
    """Returns a validator of callables with the given description."""
    return Validator(callable, description)


BOOL = Validator(lambda x: isinstance(x, bool), "True or False")
POSITIVE_INT = int_at_least(1)
NON_NEGATIVE = Validator(lambda x: is_number(x) and x >= 0, "a number >= 0")
POSITIVE = Validator(lambda x: is_number(x) and x > 0, "a number > 0")
FRACTION = Validator(lambda x: is_number(x) and 0 <= x <= 1, "a number in [0, 1]")
DICT = Validator(lambda x: isinstance(x, Mapping), "a dict")
FINITE = Validator(lambda x: is_number(x) and math.isfinite(x), "a finite number")
POSITIVE_INT_OR_AUTO = Validator(
    lambda x: is_one_of(x, "auto") or POSITIVE_INT.is_valid(x), "an integer >= 1 or 'auto'"
)
