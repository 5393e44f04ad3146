"""Classes and functions by the path they are imported from, without trusting a stranger's file.

Why paths are resolved so sparingly is told in `docs/decisions/003-import-paths-in-checkpoints.md`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tfpolicies.errors import CheckpointError
from tfpolicies.marks import fits

OWN = "tfpolicies"
TRUSTED = (OWN,)


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

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Raises an error, for who comes to need what loading could do without.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"{self.name} is needed now, but the checkpoint was loaded without it, since no file "
            "chooses what is imported. Give it again: from_checkpoint(path, config={...})."
        )


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
    path: str, place: str, *, functions: bool = False, trusted: Collection[str] = TRUSTED
) -> Any:
    """Returns the object at `path` if it belongs in a place, or a `Missing`.

    It is taken from a module of a `trusted` top-level package, which is imported if need be; there
    it must be defined under just that path, so that what a trusted module merely imports (`os`,
    say) cannot be reached. And it must bear the mark of the place (`tfpolicies.marks`), a class by
    its base. A function has no base; one of another package than this one has the caller's word.

    Args:
        path: "package.module:qualname".
        place: the mark of what belongs there.
        functions: whether functions may stand there, or classes as such.
        trusted: the packages.

    >>> resolve("os:system", "callbacks")
    Missing(name='os:system', importable=True)
    """
    found = _defined(path, trusted)
    by_word = functions and callable(found) and path.partition(":")[0].partition(".")[0] != OWN
    return found if by_word or fits(found, place) else Missing(path, importable=True)


def class_of_name(name: str, place: str) -> str | Missing:
    """Returns a name that a file gives for a class to import, if it may be; else a `Missing`.

    Args:
        name: "package.module:Class" or "package.module.Class".
        place: the mark that the class must bear.
    """
    module, _, qualname = name.replace(":", ".").rpartition(".")
    found = resolve(f"{module}:{qualname}", place)
    return name if isinstance(found, type) else Missing(name, importable=True)


def _defined(path: str, trusted: Collection[str]) -> Any:
    """Returns what a module of a trusted package defines under a path; None if nothing."""
    module, _, qualname = path.partition(":")
    parts = module.split(".")
    if parts[0] not in trusted or not all(x.isidentifier() and x != "__main__" for x in parts):
        return None
    try:
        found = _walk(importlib.import_module(module), qualname)
    except ImportError:
        return None
    return found if found is not None and import_path(found) == path else None


def _walk(module: ModuleType | None, qualname: str) -> Any:
    found = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found
