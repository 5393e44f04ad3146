"""A hostile file, and what `fuzz_attacks` asks of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple


class Attempt(NamedTuple):
    """One hostile file, ready to be loaded."""

    what: str  # for the report
    load: Callable[[], Any]
    changed: Callable[[], str | None]  # what a refusal has changed; None if nothing
    arrays: Callable[[Any], Any]  # the arrays of what was loaded
    may_start: str = "nothing"  # the program that it may run in a process of its own


Victim = Callable[[random.Random], Attempt]
