"""The leaves of nested columns, each by its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves_of(columns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each leaf with a path that tells dicts (`obs/a`) from tuples (`obs/[0]`).

    >>> dict(leaves_of({"obs": {"a": 1}, "actions": (2, 3)}))
    {'obs/a': 1, 'actions/[0]': 2, 'actions/[1]': 3}
    """
    for name, column in columns.items():
        if isinstance(column, dict):
            yield from leaves_of({f"{name}/{key}": part for key, part in column.items()})
        elif isinstance(column, tuple):
            yield from leaves_of({f"{name}/[{i}]": part for i, part in enumerate(column)})
        else:
            yield name, column
