"""Names of the columns of recorded steps, and of the parts of nested ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

OBS, NEW_OBS, ACTIONS, REWARDS = "obs", "new_obs", "actions", "rewards"
TERMINATEDS, TRUNCATEDS, EPS_ID, T = "terminateds", "truncateds", "eps_id", "t"
AGENT_INDEX = "agent_index"
EPISODE_COLUMNS = (EPS_ID, AGENT_INDEX, TERMINATEDS, TRUNCATEDS, T)
SEPARATOR = "."
"""Joins the names of nested columns: `obs.camera`."""


def name_part(name: str, part: str) -> str:
    """Returns the name of a part of a column; the part "" is the whole column.

    >>> name_part("obs", "camera"), name_part("obs", "")
    ('obs.camera', 'obs')
    """
    return f"{name}{SEPARATOR}{part}" if part else name


def iter_parts(name: str, column: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nested column, each with its name.

    >>> dict(iter_parts("obs", {"camera": 1, "arms": (2, 3)}))
    {'obs.camera': 1, 'obs.arms.0': 2, 'obs.arms.1': 3}
    """
    if isinstance(column, Mapping | tuple):
        parts = column.items() if isinstance(column, Mapping) else enumerate(column)
        for key, part in parts:
            yield from iter_parts(f"{name}{SEPARATOR}{key}", part)
    else:
        yield name, column
