"""Warnings that are logged once for the same values."""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable


@functools.cache
def warn_once(text: str, *values: Hashable) -> None:
    """Logs a warning, unless the same text and values were logged before."""
    logging.getLogger("tfpolicies").warning(text, *values)
