"""Parses spaces on the command line: `Discrete(3, start=1)`, `Box(-1, 1, (2,))`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from tfpolicies.errors import ConfigError

if TYPE_CHECKING:
    from gymnasium import spaces

_KINDS = ("Box", "Discrete", "MultiBinary", "MultiDiscrete")
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}


def parse_space(name: str, text: str) -> spaces.Space[Any]:
    """Parses a space of Gymnasium, with numbers, `inf` and lists as arguments.

    Args:
        name: of the option or setting, for the message.
        text: the space.

    Raises:
        ConfigError: if it is something else.

    >>> parse_space("action_space", "Discrete(3, start=1)")
    Discrete(3, start=1)
    >>> parse_space("observation_space", "Box(-inf, inf, (2,))")
    Box(-inf, inf, (2,), float32)
    """
    from gymnasium import spaces

    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in _KINDS
        ):
            raise ValueError("it is not one of these spaces")
        arguments = [_parse_argument(node) for node in call.args]
        keywords = {str(keyword.arg): _parse_argument(keyword.value) for keyword in call.keywords}
        space: spaces.Space[Any] = getattr(spaces, call.func.id)(*arguments, **keywords)
        return space
    except (ValueError, SyntaxError, TypeError, AssertionError, OverflowError) as error:
        raise ConfigError(
            f"{name} takes one of {', '.join(_KINDS)} with numbers, such as "
            f"'Discrete(3, start=1)' or 'Box(-1, 1, (2,))', got {text!r:.100} ({error!s:.100}). "
            "For other spaces, write a script."
        ) from error


def _parse_argument(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NUMBERS:
        return _NUMBERS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_parse_argument(node.operand)
    if isinstance(node, ast.List | ast.Tuple):
        values = [_parse_argument(x) for x in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Constant):
        return node.value
    raise ValueError("arguments must be numbers, texts or lists")
