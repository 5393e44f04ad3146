"""Statistics of a loss that are kept in attributes, as ported code spells it.

A loss calls `self.record(kl=...)`. What stands for other spellings is a module that registers here.
"""

from __future__ import annotations

import importlib
from typing import Any

from tfpolicies.errors import ConfigError

_MODULES: list[str] = []


def register_spelling(module: str) -> None:
    """Lets a module say what attributes of a traced view mean; it is imported on first use.

    Args:
        module: its name. It has `statistics(view, train_batch)`, which returns statistics by name
            as far as a loss kept them in attributes, and `attribute(view, name)`, which returns
            what was recorded under another name, or None.
    """
    _MODULES.append(module)


def spelled_statistics(view: Any, train_batch: Any) -> dict[str, Any]:
    """Returns the statistics that a loss kept in attributes.

    Raises:
        ConfigError: if it kept some as RLlib's do, and nothing that reads them was imported.
    """
    found: dict[str, Any] = {}
    unread = [name for name in vars(view) if name.startswith("_mean_") and not _MODULES]
    if unread:
        raise ConfigError(
            f"{type(view).__name__}.loss keeps {', '.join(unread)} on self, where nothing reads "
            "them. Call self.record(kl=...) for statistics; or import the names for ported code, "
            f"which read RLlib's: import {__name__.partition('.')[0]}.compat."
        )
    for module in map(importlib.import_module, _MODULES):
        found |= module.statistics(view, train_batch)
    return found


def spelled_attribute(view: Any, name: str) -> Any:
    """Returns what an attribute stands for that a view lacks; None if it is nothing."""
    found = (importlib.import_module(module).attribute(view, name) for module in _MODULES)
    return next((value for value in found if value is not None), None)
