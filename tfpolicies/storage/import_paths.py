"""Classes and functions by the path they are imported from, without trusting a stranger's file.

Why paths are resolved so sparingly is told in `docs/decisions/003-import-paths-in-checkpoints.md`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

TRUSTED = ("tfpolicies",)


@dataclass(frozen=True)
class Missing:
    """Stands in a decoded value for an object that could not, or must not, be looked up.

    Attributes:
        name: Its import path, or what is known of its name if it had none.
        importable: Whether `name` is an import path, so that it can be handed over as
            `known={name: object}` or its package be trusted.
    """

    name: str
    importable: bool = False


def describe(value: object) -> str:
    """Returns the path `module:qualname` under which `value` says it can be imported.

    >>> describe(Missing)
    'tfpolicies.storage.import_paths:Missing'
    """
    named = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
    return f"{getattr(named, '__module__', None)}:{named.__qualname__}"  # type: ignore[attr-defined]


def import_path(value: object) -> str | None:
    """Returns `describe(value)` if looking it up gives `value` itself, else None.

    >>> import_path(describe)
    'tfpolicies.storage.import_paths:describe'
    >>> print(import_path(lambda: 0))
    None
    """
    path = describe(value)
    module, _, qualname = path.partition(":")
    return path if _walk(sys.modules.get(module), qualname) is value else None


def resolve(
    path: str, *, known: Mapping[str, Any] | None = None, trusted: Collection[str] = TRUSTED
) -> Any:
    """Returns the object at `path`, or a `Missing`.

    It is taken from `known`, or else from a module of a `trusted` top-level package, which is
    imported if need be; there it must be defined under just that path, so that what a trusted
    module merely imports (`os`, say) cannot be reached.

    >>> resolve("os:system")
    Missing(name='os:system', importable=True)
    """
    if known and path in known:
        return known[path]
    module, _, qualname = path.partition(":")
    parts = module.split(".")
    if parts[0] in trusted and all(part.isidentifier() and part != "__main__" for part in parts):
        try:
            found = _walk(importlib.import_module(module), qualname)
        except ImportError:
            found = None
        if found is not None and import_path(found) == path:
            return found
    return Missing(path, importable=True)


def class_of_name(name: str, kinds: tuple[type, ...]) -> str | Missing:
    """Returns a name that a file gives for a class to import, if it may be; else a `Missing`.

    Args:
        name: "package.module:Class" or "package.module.Class".
        kinds: the class must be a subclass of one of them, and one that `resolve` finds.
    """
    module, _, qualname = name.replace(":", ".").rpartition(".")
    found = resolve(f"{module}:{qualname}")
    fits = isinstance(found, type) and issubclass(found, kinds)
    return name if fits else Missing(name, importable=True)


def _walk(module: Any, qualname: str) -> Any:
    found = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found
