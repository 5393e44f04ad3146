"""Resolves import paths of classes and functions from untrusted files.

`docs/decisions/003-import-paths-in-checkpoints.md` explains the restrictions.
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
    """Placeholder in a decoded value for an object that could not, or must not, be imported.

    Attributes:
        name: Its import path, or the stored name if it had none.
        importable: Whether `name` is an import path, so that the caller can provide the object by
            `known={name: object}` or trust its package.
    """

    name: str
    importable: bool = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Raises an error, because the object that was optional for loading is needed now.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"{self.name} is needed now, but the checkpoint was loaded without it, since a file "
            "may not choose imports. Pass it again: from_checkpoint(path, config={...})."
        )


def describe(value: object) -> str:
    """Returns the path `module:qualname` under which `value` claims to be importable.

    >>> describe(Missing)
    'tfpolicies.storage.import_paths:Missing'
    """
    named = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
    return f"{getattr(named, '__module__', None)}:{named.__qualname__}"  # type: ignore[attr-defined]


def import_path(value: object) -> str | None:
    """Returns `describe(value)` if that path leads to `value` itself, else None.

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
    """Returns the object at `path` if it is allowed in the role `role`, or a `Missing`.

    The object must be defined, under exactly that path, in a module of a `trusted` top-level
    package (imported if necessary), so that objects which a trusted module merely imports (`os`,
    for example) cannot be reached. It must also be allowed for the role (`tfpolicies.marks`), a
    class by its base. A function of a trusted package other than this one needs no mark.

    Args:
        path: "package.module:qualname".
        role: the role in the file, such as "callbacks".
        functions: whether functions, or classes used as functions, are allowed.
        trusted: the packages.

    >>> resolve("os:system", "callbacks")
    Missing(name='os:system', importable=True)
    """
    found = _defined(path, trusted)
    by_word = functions and callable(found) and path.partition(":")[0].partition(".")[0] != OWN
    return found if by_word or fits(found, place) else Missing(path, importable=True)


def class_of_name(name: str, place: str) -> str | Missing:
    """Returns the name of a class to import if a file may name it; else a `Missing`.

    Args:
        name: "package.module:Class" or "package.module.Class".
        role: the role for which the class must be allowed.
    """
    module, _, qualname = name.replace(":", ".").rpartition(".")
    found = resolve(f"{module}:{qualname}", place)
    return name if isinstance(found, type) else Missing(name, importable=True)


def _defined(path: str, trusted: Collection[str]) -> Any:
    """Returns the object that a module of a trusted package defines under a path, or None."""
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
