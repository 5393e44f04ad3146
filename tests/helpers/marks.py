"""Which values of a test's parameter belong to the core tests."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def telling(values: Iterable[Any], *chosen: Any, soak: Container[Any] = ()) -> list[Any]:
    """Returns values of one parameter, or tuples of several; those chosen are marked as core.

    Args:
        values: the values.
        chosen: those that also run with other versions.
        soak: those that take long, and run apart.
    """
    results = []
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        marks = [pytest.mark.core] * (value in chosen) + [pytest.mark.soak] * (value in soak)
        results.append(pytest.param(*parts, marks=marks))
    return results
