"""The values that words of the command line stand for; what is wrong with them, argparse says."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection
from typing import Any

from tfpolicies.errors import near_matches
from tfpolicies.ways import OPSETS

_LAST_PORT = 65_535


def _whole(text: str) -> int:
    """Returns the integer that is written as 100000, 100_000 or 1e5."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def not_among(value: Any, choices: Collection[str]) -> str:
    """Returns what a message says of a value that is not among the choices.

    >>> not_among("onxx", ["onnx", "tf"])
    "there is no 'onxx'. Did you mean 'onnx'? Choose one of onnx, tf."
    """
    near = near_matches(str(value), choices)
    return f"there is no {value!r}.{near} Choose one of {', '.join(choices)}."


def count(text: str) -> int:
    """Returns an integer >= 0.

    >>> count("1e5"), count("100_000")
    (100000, 100000)
    """
    number = _whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return number


def positive(text: str) -> int:
    """Returns an integer >= 1."""
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def opset(text: str) -> int:
    """Returns a version of ONNX's operators."""
    number = _whole(text)
    if number not in OPSETS:
        raise argparse.ArgumentTypeError(f"must be from {OPSETS[0]} to {OPSETS[-1]}, got {text}")
    return number


def port(text: str) -> int:
    """Returns the number of a port; 0 is any that is free."""
    number = count(text)
    if number > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_LAST_PORT}, got {text}")
    return number


def above_zero(text: str) -> float:
    """Returns a finite number > 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def json_object(text: str) -> dict[str, Any]:
    """Returns what a JSON object holds."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def column_names(text: str) -> list[str]:
    """Returns the names of columns that commas separate; none for an empty text.

    >>> column_names("x, y"), column_names("")
    (['x', 'y'], [])
    """
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    if "" in names or len({*names}) < len(names):
        raise argparse.ArgumentTypeError(f"must be different names with commas, got {text!r:.200}")
    return names


above_zero.__name__ = "number"  # argparse shows it in its messages
for _integer in (count, opset, port, positive):
    _integer.__name__ = "integer"
