"""Reads the tables of `docs/migrate`: names of other libraries, and the names to use here.

They are in one file, `porting_tables.md`. The pages have copies of them. The command
`tfpolicies port`, config aliases and error messages use its rows.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import NamedTuple

RLLIB = "| RLlib | here | what differs |"
LATER_SETTINGS = "| later name | here |"
SB3_SETTINGS = (
    "| `stable_baselines3.PPO` | here | relation |",
    "| `stable_baselines3.DQN` | here | relation |",
    "| `stable_baselines3.SAC`, `TD3`, `DDPG` | here | relation |",
)
SB3 = "| SB3 | here |"
KERAS = "| Keras | here |"

_TABLE = re.compile(r"^(\|.*)\n(?:\|.*\n)*", re.MULTILINE)

_IMPORT = re.compile(r"with `(import ([\w.]+))`")

_OBJECT_NAMES = {
    "Algorithm": "algorithm",
    "AlgorithmConfig": "config",
    "Episode": "episode",
    "ModelView": "model",
    "Policy": "policy",
    "RolloutWorker": "worker",
    "RunningFilter": "filter",
    "SampleBatch": "batch",
    "ViewRequirement": "view_requirement",
    "WorkerSet": "workers",
}
"""The names of objects of each class in the table of RLlib's names."""


class TableRow(NamedTuple):
    """A row of a table."""

    names: list[str]  # each code of its first cell
    replacement: str  # its second cell
    differs: str  # its last cell, equal to `here` if there are two cells


@functools.cache
def _load_tables() -> dict[str, str]:
    """Returns the text of each table, by its first line."""
    from importlib import resources  # it takes long to import

    text = resources.files(__package__).joinpath("porting_tables.md").read_text("utf-8")
    return {match[1]: match[0] for match in _TABLE.finditer(text)}


@functools.cache
def read_table(header: str) -> list[TableRow]:
    """Returns the rows of a table, without the titles of its parts.

    Args:
        header: the first line of the table.

    >>> read_table(LATER_SETTINGS)[0].names
    ['num_env_runners']
    """
    lines = [
        line for line in _load_tables()[header].splitlines()[2:] if not line.startswith("| **")
    ]
    rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
    return [TableRow(extract_code(row[0]), row[1], row[-1]) for row in rows]


@functools.cache
def _read_imports() -> dict[tuple[str, str], tuple[str, str]]:
    """Returns the import that an attribute needs, `(statement, module)` by owner and name."""
    result = {}
    for row in read_table(RLLIB):
        statement = _IMPORT.search(row.replacement)
        owner = re.match(r"\w+", row.names[0])
        if statement and owner:
            for code in row.names:
                name = re.match(r"(?:\w+\.)?(\w+)", code)
                if name:
                    result[owner[0], name[1]] = statement[1], statement[2]
    return result


def find_required_import(owner: type, name: str) -> str:
    """Returns the import statement that makes an attribute of a class's objects available.

    Args:
        owner: the class.
        name: the attribute.

    Returns:
        "" if no import is needed, or if it has run.
    """
    for base in owner.__mro__:
        statement, module = _read_imports().get(
            (_OBJECT_NAMES.get(base.__name__, ""), name), ("", "")
        )
        if statement and module not in sys.modules:
            return statement
    return ""


def update_tables(page: str) -> str:
    """Replaces each table of a page by the table of the file that has the same first line."""
    return _TABLE.sub(lambda match: _load_tables().get(match[1], match[0]), page)


def extract_code(cell: str) -> list[str]:
    """Returns the code spans of a cell.

    >>> extract_code("`tau` or `lr=x`")
    ['tau', 'lr=x']
    """
    return re.findall(r"`([^`]*)`", cell)


def as_plain_text(cell: str) -> str:
    """Returns a cell without Markdown markup.

    >>> as_plain_text("Set `lr`: [Schedules](#schedules).")
    'Set lr: "Schedules".'
    """
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r'"\1"', cell).replace("`", "")
