"""Which values of a test's parameter belong to the core tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def telling(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Returns values of one parameter, or tuples of several; those chosen are marked as core."""
    found = []
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*parts, marks=[pytest.mark.core] if value in chosen else []))
    return found
