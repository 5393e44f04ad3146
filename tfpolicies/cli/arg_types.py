"""Types of command-line values, for argparse's `type`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection
from typing import Any

from tfpolicies.base.acting_runtimes import ONNX_OPSETS
from tfpolicies.errors import suggest_similar_names
from tfpolicies.system.paths import resolve_path
from tfpolicies.system.regular_files import read_regular

_LAST_PORT = 65_535
_MAX_SEEDS = 1000
_MAX_FILE_BYTES = 1 << 20


def _parse_integer(text: str) -> int:
    """Parses an integer, also if it is written as 100_000 or 1e5.

    >>> _parse_integer("1e5"), _parse_integer("100_000")
    (100000, 100000)
    """
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def describe_invalid_choice(value: object, choices: Collection[str]) -> str:
    """Describes an invalid choice, for messages.

    >>> describe_invalid_choice("onxx", ["onnx", "tf"])
    "there is no 'onxx'. Did you mean 'onnx'? Choose one of onnx, tf."
    """
    hint = suggest_similar_names(str(value), choices)
    return f"there is no {value!r}.{hint} Choose one of {', '.join(choices)}."


def _make_integer_type(low: int, high: float, rule: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = _parse_integer(text)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")
        return number

    parse.__name__ = "integer"  # argparse shows it in its messages
    return parse


non_negative_int = _make_integer_type(0, math.inf, "0 or more")
positive_int = _make_integer_type(1, math.inf, "1 or more")
onnx_opset = _make_integer_type(
    ONNX_OPSETS[0], ONNX_OPSETS[-1], f"from {ONNX_OPSETS[0]} to {ONNX_OPSETS[-1]}"
)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parses `--seeds`: a number of seeds, which are 0, 1, ..., or a list with commas.

    >>> parse_seeds("3"), parse_seeds("3,7,11"), parse_seeds("3,")
    ((0, 1, 2), (3, 7, 11), (3,))
    """
    if "," not in text:
        number = positive_int(text)
        if number > _MAX_SEEDS:
            raise argparse.ArgumentTypeError(f"must be {_MAX_SEEDS:,} seeds or fewer, got {text}")
        return tuple(range(number))
    seeds = tuple(non_negative_int(word) for word in text.split(",") if word.strip())
    if not seeds or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"must be different seeds with commas, got {text!r:.200}")
    return seeds


def port_number(text: str) -> int:
    """Parses a port number; 0 is any free one."""
    number = non_negative_int(text)
    if number > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_LAST_PORT}, got {text}")
    return number


def positive_float(text: str) -> float:
    """Parses a finite number > 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def parse_columns(text: str) -> dict[str, Any]:
    """Parses `--columns`: a JSON object, or the path of a file with one.

    >>> parse_columns('{"obs": ["temperature", "load"], "actions": "setpoint"}')["actions"]
    'setpoint'
    """
    if text.lstrip().startswith("{"):
        return json_object(text)
    try:
        content = read_regular(resolve_path(text), _MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"must be a JSON object or the path of a file with one, but {text!r} cannot be read: "
            f"{error}"
        ) from error
    return json_object(content)


def column_names(text: str) -> list[str]:
    """Splits column names at commas; an empty text gives no names.

    >>> column_names("x, y"), column_names("")
    (['x', 'y'], [])
    """
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    if "" in names or len({*names}) < len(names):
        raise argparse.ArgumentTypeError(f"must be different names with commas, got {text!r:.200}")
    return names


positive_float.__name__, port_number.__name__, parse_seeds.__name__ = (
    "number",
    "integer",
    "list of seeds",
)  # argparse shows them in its messages
