"""Resolves import paths of classes and functions from untrusted files.

`docs/decisions/003-import-paths-in-checkpoints.md` explains the restrictions.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tfpolicies.base.allowlist import is_allowed
from tfpolicies.errors import CheckpointError
from tfpolicies.storage.migrations import OBJECTS, migrate_path

OWN_PACKAGE = "tfpolicies"
TRUSTED_PACKAGES = (OWN_PACKAGE,)


@dataclass(frozen=True)
class UnresolvedObject:
    """Placeholder in a decoded value for an object that could not, or must not, be imported.

    Attributes:
        name: Its import path, or the stored name if it had none.
        importable: Whether `name` is an import path, so that the caller can provide the object by
            `objects={name: object}` or trust its package.
    """

    name: str
    importable: bool = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Raises an error, because the object that was optional for loading is needed now."""
        raise CheckpointError(
            f"{self.name} is needed now, but the checkpoint was loaded without it, since a file "
            "may not choose imports. Pass it again: from_checkpoint(path, config={...})."
        )


def get_declared_path(value: object) -> str:
    """Returns the path `module:qualname` under which `value` claims to be importable.

    >>> get_declared_path(UnresolvedObject)
    'tfpolicies.storage.import_paths:UnresolvedObject'
    """
    target = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
    return f"{getattr(target, '__module__', None)}:{target.__qualname__}"  # type: ignore[attr-defined]


def index_by_path(classes: Iterable[type]) -> dict[str, type]:
    """Returns the caller's classes by the paths under which a file may name them.

    A class of a script is stored as `__main__:Name` and later imported from its module.

    >>> index_by_path([UnresolvedObject]).keys()
    dict_keys(['tfpolicies.storage.import_paths:UnresolvedObject'])
    """
    own = f"{OWN_PACKAGE}."
    scripts = {f"__main__:{x.__qualname__}": x for x in classes if not x.__module__.startswith(own)}
    return {**scripts, **{get_declared_path(x): x for x in classes}}


def get_import_path(value: object) -> str | None:
    """Returns `get_declared_path(value)` if that path leads to `value` itself, else None.

    >>> get_import_path(get_declared_path)
    'tfpolicies.storage.import_paths:get_declared_path'
    >>> print(get_import_path(lambda: 0))
    None
    """
    path = get_declared_path(value)
    module, _, qualname = path.partition(":")
    return path if _get_nested_attribute(sys.modules.get(module), qualname) is value else None


def resolve_import_path(
    path: str, role: str, *, functions: bool = False, trusted: Collection[str] = TRUSTED_PACKAGES
) -> Any:
    """Returns the object at `path` if it is allowed in the role `role`, or an `UnresolvedObject`.

    The object must be defined, under exactly that path, in a module of a `trusted` top-level
    package (imported if necessary), so that objects which a trusted module merely imports (`os`,
    for example) cannot be reached. It must also be allowed for the role
    (`tfpolicies.base.allowlist`), a class by its base. A function of a trusted package other than
    this one needs no mark.

    Args:
        path: "package.module:qualname".
        role: the role in the file, such as "callbacks".
        functions: whether functions, or classes used as functions, are allowed.
        trusted: the packages.

    >>> resolve_import_path("os:system", "callbacks")
    UnresolvedObject(name='os:system', importable=True)
    """
    path = migrate_path(path)
    resolved = _import_definition(path, trusted)
    is_trusted_function = (
        functions and callable(resolved) and path.partition(":")[0].partition(".")[0] != OWN_PACKAGE
    )
    return (
        resolved
        if is_trusted_function or is_allowed(resolved, role)
        else UnresolvedObject(path, importable=True)
    )


def check_class_name(name: str, role: str) -> str | UnresolvedObject:
    """Returns the name of a class to import if a file may name it; else an `UnresolvedObject`.

    Args:
        name: "package.module:Class" or "package.module.Class".
        role: the role for which the class must be allowed.
    """
    module, _, qualname = name.replace(":", ".").rpartition(".")
    path = f"{module}:{qualname}"
    if not isinstance(resolve_import_path(path, role), type):
        return UnresolvedObject(name, importable=True)
    return migrate_path(path) if path in OBJECTS else name


def _import_definition(path: str, trusted: Collection[str]) -> Any:
    """Returns the object that a module of a trusted package defines under a path, or None."""
    module, _, qualname = path.partition(":")
    parts = module.split(".")
    if parts[0] not in trusted or not all(x.isidentifier() and x != "__main__" for x in parts):
        return None
    try:
        definition = _get_nested_attribute(importlib.import_module(module), qualname)
    except ImportError:
        return None
    return definition if definition is not None and get_import_path(definition) == path else None


def _get_nested_attribute(module: ModuleType | None, qualname: str) -> Any:
    value = module
    for name in qualname.split("."):
        value = getattr(value, name, None)
    return value
