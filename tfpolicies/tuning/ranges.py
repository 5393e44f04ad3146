"""Ranges of settings: `choice`, `uniform`, `log_uniform`, `int_uniform`, `share_of_steps`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfpolicies.base.type_aliases import Setting
from tfpolicies.base.validators import is_number
from tfpolicies.errors import ConfigError, show_value


@dataclass(frozen=True)
class Choice:
    """One of several values, without an order; see `choice`."""

    values: tuple[Any, ...]

    def to_json(self) -> dict[str, Any]:
        return {"choice": list(self.values)}

    @property
    def labels(self) -> list[str]:
        """The values as texts, by which a study knows them."""
        return [make_label(value) for value in self.values]

    @property
    def examples(self) -> tuple[Any, ...]:
        """Values that a config must accept if it accepts the range."""
        return self.values

    def __str__(self) -> str:
        return f"one of {', '.join(self.labels)}"


@dataclass(frozen=True)
class NumberRange:
    """A number from `low` to `high`, both included; see `uniform`.

    Attributes:
        low: the lowest number.
        high: the highest number.
        kind: the name of the function that makes it.
    """

    low: float
    high: float
    kind: str

    def to_json(self) -> dict[str, Any]:
        return {self.kind: [self.low, self.high]}

    @property
    def is_log(self) -> bool:
        return self.kind == "log_uniform"

    @property
    def is_integer(self) -> bool:
        return self.kind == "int_uniform"

    @property
    def is_share_of_steps(self) -> bool:
        return self.kind == "share_of_steps"

    @property
    def examples(self) -> tuple[float, ...]:
        """Values that a config must accept if it accepts the range."""
        return (1,) if self.is_share_of_steps else (self.low, self.high)

    def __str__(self) -> str:
        unit = " of the steps" if self.is_share_of_steps else ""
        scale = ", logarithmic" if self.is_log else ""
        return f"{self.low:g} to {self.high:g}{unit}{scale}"


Range = Choice | NumberRange


def choice(values: Sequence[Setting]) -> Choice:
    """Returns a range of single values; they may be lists, such as `[64, 64]`.

    Raises:
        ConfigError: unless there are two different JSON values or more.

    >>> choice([[64, 64], [256, 256]]).labels
    ['[64, 64]', '[256, 256]']
    """
    valid = isinstance(values, list | tuple)
    try:
        labels = [make_label(value) for value in values] if valid else []
    except (TypeError, ValueError):
        labels = []
    if len(set(labels)) < max(2, len(labels)):
        raise ConfigError(
            "choice takes a list of two different values or more, which are numbers, texts, True, "
            f"False, None, or lists and dicts of them, got {show_value(values)}. Give a setting "
            "that is to have one value to the config."
        )
    return Choice(tuple(values))


def uniform(low: float, high: float) -> NumberRange:
    """Returns a range of numbers, all as likely.

    Raises:
        ConfigError: unless `low` and `high` are finite and low < high.

    >>> str(uniform(0.3, 2.0))
    '0.3 to 2'
    """
    return _make_number_range("uniform", low, high)


def log_uniform(low: float, high: float) -> NumberRange:
    """Returns a range of numbers whose logarithms are all as likely; both are above 0.

    >>> str(log_uniform(1e-5, 1e-2))
    '1e-05 to 0.01, logarithmic'
    """
    if is_number(low) and low <= 0:
        raise ConfigError(f"log_uniform takes numbers above 0, got {low!r}. Use uniform.")
    return _make_number_range("log_uniform", low, high)


def int_uniform(low: int, high: int) -> NumberRange:
    """Returns a range of whole numbers, both ends included.

    >>> str(int_uniform(1, 20))
    '1 to 20'
    """
    if not all(isinstance(x, int) and not isinstance(x, bool) for x in (low, high)):
        raise ConfigError(f"int_uniform takes whole numbers, got {low!r} and {high!r}.")
    return _make_number_range("int_uniform", low, high)


def share_of_steps(low: float, high: float) -> NumberRange:
    """Returns a range of whole numbers that are shares, in [0, 1], of the steps of a trial.

    >>> str(share_of_steps(0.05, 0.5))
    '0.05 to 0.5 of the steps'
    """
    if is_number(low) and is_number(high) and not 0 <= low < high <= 1:
        raise ConfigError(f"share_of_steps takes two shares in [0, 1], got {low!r} and {high!r}.")
    return _make_number_range("share_of_steps", low, high)


def _make_number_range(kind: str, low: float, high: float) -> NumberRange:
    numbers = all(is_number(x) and math.isfinite(x) for x in (low, high))
    if not numbers or low >= high:
        raise ConfigError(
            f"{kind} takes two finite numbers, the lower one first, got {show_value(low)} and "
            f"{show_value(high)}."
        )
    return NumberRange(low, high, kind)


_KINDS = {
    "choice": choice,
    "uniform": uniform,
    "log_uniform": log_uniform,
    "int_uniform": int_uniform,
    "share_of_steps": share_of_steps,
}


def parse_range(name: str, value: Setting) -> Range | None:
    """Returns the range that a value of a space describes; None for a plain value.

    Args:
        name: of the setting, for messages.
        value: a range; or as in a JSON file, such as `{"log_uniform": [1e-5, 1e-2]}`.

    Raises:
        ConfigError: if it describes a range of an unknown kind, or an invalid one.

    >>> str(parse_range("lr", {"log_uniform": [1e-5, 1e-2]})), parse_range("lr", 1e-3)
    ('1e-05 to 0.01, logarithmic', None)
    """
    if isinstance(value, Choice | NumberRange):
        return value
    if not isinstance(value, Mapping) or len(value) != 1 or not isinstance(value, dict):
        return None
    ((kind, arguments),) = value.items()
    if kind not in _KINDS:
        return None
    try:
        if kind == "choice":
            return choice(arguments)
        low, high = arguments
        return _KINDS[kind](low, high)  # type: ignore[operator]
    except (TypeError, ValueError) as error:
        reason = error if isinstance(error, ConfigError) else f"{kind} takes [low, high]"
        raise ConfigError(f"The range of {name}: {reason}") from error


def make_label(value: Setting) -> str:
    """Returns a value as text: JSON, with numbers and lists as Python writes them.

    >>> make_label([64, 64]), make_label(0.99), make_label("relu")
    ('[64, 64]', '0.99', 'relu')
    """
    return value if isinstance(value, str) else json.dumps(value)
