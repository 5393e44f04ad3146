"""The reference of the command line, from its parsers."""

from __future__ import annotations

import argparse
import re

from tfpolicies.cli.arguments import _make_parsers, _Parser

_INTRODUCTION = """# Command line

`tfpolicies COMMAND --help` prints the same. `python -m tfpolicies` is the same program. Options
cannot be abbreviated, so a script keeps its meaning when options are added.
"""


def make_command_line_page() -> dict[str, str]:
    """Returns the page by its path in the site's source."""
    parser, commands = _make_parsers()
    parts = [_INTRODUCTION]
    for name, command in commands.items():
        parts.append(_make_section(name, command))
        for subname, subcommand in command.subparsers.items():
            parts.append(_make_section(f"{name} {subname}", subcommand))
    parts.append(f"\n## Exit status\n\n```text\n{(parser.epilog or '').strip()}\n```\n")
    return {"reference/command-line.md": "".join(parts)}


def _make_section(name: str, parser: _Parser) -> str:
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    actions = [
        action
        for action in actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]
    rows = "".join(f"| {_format_names(a)} | {_format_help(a, parser)} |\n" for a in actions)
    description = parser.description or ""
    return f"\n## tfpolicies {name}\n\n{description}\n\n| option | |\n|---|---|\n{rows}"


def _format_names(action: argparse.Action) -> str:
    metavar = action.metavar or action.dest.upper()
    metavar = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.option_strings:
        return f"`{metavar}`"
    value = "" if action.nargs == 0 else f" {metavar}"
    if action.choices is not None and action.metavar is None:
        value = " {" + ",".join(map(str, action.choices)) + "}"
    return "<br>".join(f"`{name}{value}`".replace("|", "\\|") for name in action.option_strings)


def _format_help(action: argparse.Action, parser: _Parser) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    text = text.replace("|", "\\|").replace("\n", " ")
    return re.sub(r"([{<])", r"\\\1", text)  # braces would be attributes of the cell
