"""Parses the Python expressions in files of RL Baselines3 Zoo, without evaluating them."""

from __future__ import annotations

import ast
from typing import Any

from tfpolicies.errors import ConfigError, show_value

_MAX_LENGTH = 10_000  # characters


def parse_expression(name: str, text: str) -> Any:
    """Returns the value of an expression of literals and `dict(...)`.

    A dotted name becomes its last part: `nn.ReLU` is `"ReLU"`.

    Args:
        name: of the setting, for messages.
        text: the expression.

    Raises:
        ConfigError: for anything else.

    >>> parse_expression("policy_kwargs", "dict(net_arch=[64, 64], activation_fn=nn.ReLU)")
    {'net_arch': [64, 64], 'activation_fn': 'ReLU'}
    """
    try:
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"it has more than {_MAX_LENGTH:,} characters")
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{name} must be an expression such as dict(net_arch=[64, 64], activation_fn=nn.ReLU), "
            f"got {show_value(text)}: {error}."
        ) from error


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _evaluate(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys must be texts")
        return dict(zip(keys, map(_evaluate, node.values), strict=True))
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
        if not is_dict or node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError(f"{ast.unparse(node):.80} is not dict(name=value)")
        return {str(keyword.arg): _evaluate(keyword.value) for keyword in node.keywords}
    return ast.literal_eval(node)
