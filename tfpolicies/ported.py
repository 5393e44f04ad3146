"""Names that only code written for RLlib asks for: one hook, which `tfpolicies.compat` fills."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

NAMES = frozenset(
    {
        "_counters",
        "_create_exploration",
        "batch_builder",
        "from_batch",
        "last_extra_action_outs_for",
        "loss_initialized",
        "maybe_initialize_optimizer_and_loss",
        "prev_action_for",
        "prev_reward_for",
        "rnn_state_for",
    }
)
"""The names there are."""

_lookups: list[Callable[[Any, str], Any]] = []


def register(lookup: Callable[[Any, str], Any]) -> None:
    """Has `lookup(obj, name)` asked what an object has under a name of ported code.

    It raises a `LookupError` if objects of this class have nothing there.
    """
    if lookup not in _lookups:
        _lookups.append(lookup)


def lookups() -> tuple[Callable[[Any, str], Any], ...]:
    """Returns what is asked, so that other processes may ask it, too."""
    return tuple(_lookups)


def missing(obj: Any, name: str, message: str) -> Any:
    """Returns what ported code finds under a name that an object does not have.

    Args:
        obj: the object.
        name: of the attribute.
        message: of the error where nobody knows the name.

    Raises:
        AttributeError: if nobody knows the name. It says to import `tfpolicies.compat` if that
            has not been done and would help.
    """
    if name in NAMES:
        for lookup in _lookups:
            with contextlib.suppress(LookupError):
                return lookup(obj, name)
        if not _lookups:
            message = f"{message}. Code written for RLlib finds it after `import tfpolicies.compat`"
    raise AttributeError(message)
