"""The reference of settings, from the sections of configs: defaults, values, and algorithms."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import re
import tokenize
from io import StringIO
from typing import Any

from tfpolicies.algorithms.algorithm_registry import get_registered_names
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.setting import get_metadata

_INTRODUCTION = """# Settings

Each setting belongs to a method of the config, such as `config.training(lr=1e-3)`. `config["lr"]`
and `tfpolicies train --set lr=1e-3` take the same names. A value that a setting does not allow
raises a `ConfigError`, which names the setting, its rule and the value.

The settings of `training` are those of your algorithm: the common ones below, and those in the
algorithm's section. "Default" is that of the config class, which is RLlib 2.10's.
[Tuned settings](../tables/tuned.md) are better starting points for known environments.
"""
_MODEL_LINK = "[Models](../howto/models.md) describes the keys of `model`.\n"


def make_settings_page() -> dict[str, str]:
    """Returns the page by its path in the site's source."""
    config = AlgorithmConfig()
    parts = [_INTRODUCTION]
    for method, section in config._sections.items():
        parts.append(f"\n## {method}\n\n")
        parts.append(_MODEL_LINK + "\n" if method == "training" else "")
        parts.append(_make_table(type(section), config))
    for name in get_registered_names():
        parts.append(_make_algorithm_section(name, config))
    return {"reference/settings.md": "".join(parts)}


def _make_algorithm_section(name: str, common: AlgorithmConfig) -> str:
    """Returns the settings that only one algorithm has, or for which it has another default."""
    module = importlib.import_module(f"tfpolicies.algorithms.{name.lower()}")
    config = getattr(module, f"{name}Config")()
    own, changed = [], []
    for section in config._sections.values():
        for setting in dataclasses.fields(section):
            value = config[setting.name]
            if setting.name not in common:
                own.append(_make_row(type(section), setting.name, value))
            elif _format(value) != _format(common[setting.name]):
                default = common[setting.name]
                changed.append(f"| `{setting.name}` | {_format(value)} | {_format(default)} |\n")
    text = f"\n## {name}\n\n"
    if own:
        text += _HEADER + "".join(own)
    if changed:
        text += "\nDefaults that differ from the common ones:\n\n"
        text += "| setting | default | common default |\n|---|---|---|\n" + "".join(changed)
    return text


_HEADER = "| setting | default | values | |\n|---|---|---|---|\n"


def _make_table(section: type, config: AlgorithmConfig) -> str:
    names = [setting.name for setting in dataclasses.fields(section)]
    return _HEADER + "".join(_make_row(section, name, config[name]) for name in names)


def _make_row(section: type, name: str, default: Any) -> str:
    rule = get_metadata(section)[name].get("rule")
    values = "" if rule is None else _escape(rule.description)
    comment = next(
        (get_comments(base)[name] for base in section.__mro__ if name in get_comments(base)), ""
    )
    return f"| `{name}` | {_format(default)} | {values} | {_escape(comment)} |\n"


@functools.cache
def get_comments(section: type) -> dict[str, str]:
    """Returns the comments on the fields of a class, by field, from its source.

    A comment is on the line of its field or, in lines of their own, directly before it.
    """
    if not dataclasses.is_dataclass(section):
        return {}
    source = inspect.cleandoc(f"\n{inspect.getsource(section)}")
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    comments = {}
    [definition] = ast.parse(source).body
    for node in definition.body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above, line = [], node.lineno - 1
        while line in by_line and lines[line - 1].lstrip().startswith("#"):
            above.insert(0, by_line[line])
            line -= 1
        inside = [
            by_line[i] for i in range(node.lineno, (node.end_lineno or 0) + 1) if i in by_line
        ]
        if above or inside:
            comments[node.target.id] = " ".join(above + inside)
    return comments


def _format(value: Any) -> str:
    if isinstance(value, type) or inspect.isroutine(value):
        return f"`{value.__name__}`"
    if isinstance(value, dict) and len(json.dumps(value, default=str)) > 60:
        return "a dict, see below" if not value else "a dict"
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return f"`{_escape(text)}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
