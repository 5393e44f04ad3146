"""Registries of objects by name: registered in the process, or entry points of packages."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfpolicies.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class NameRegistry(dict[str, Any]):
    """Objects of one kind by name.

    It belongs to the process. Workers are sent its content (`distributed/registry_sync.py`); a
    process that loads a checkpoint registers its names itself.

    Args:
        description: description of the objects, for messages.
        error_class: raised for an invalid name.
        entries: the initial content.

    >>> pets = NameRegistry("A pet", ValueError)
    >>> pets.add("rex", "dog")
    >>> pets.find("rex"), pets.find(["rex"])
    ('dog', None)
    """

    def __init__(self, description: str, error_class: type[Exception], **entries: object) -> None:
        super().__init__(entries)
        self._description = description
        self._error_class = error_class

    def add(self, name: str, value: object) -> None:
        """Registers an object under a name, replacing another object of that name.

        Raises:
            Exception: the register's error, if the name is not a text or is empty.
        """
        if not isinstance(name, str) or not name:
            raise self._error_class(
                f"{self._description}'s name must be a non-empty str, got {name!r}."
            )
        self[name] = value

    def find(self, name: object) -> Any:
        """Returns the object of a name; None if there is none, or the name is invalid."""
        return self.get(name) if isinstance(name, str) else None


def get_entry_points(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of a group by name; of several with one name, the first."""
    from importlib.metadata import entry_points  # slow to import

    result: dict[str, EntryPoint] = {}
    for entry_point in entry_points(group=group):
        result.setdefault(entry_point.name, entry_point)
    return result


def describe_entry_point(kind: str, entry_point: EntryPoint) -> str:
    """Returns how messages describe an entry point of some kind."""
    dist = entry_point.dist
    package = "a package" if dist is None else f"the package {dist.name} {dist.version}"
    return f"The {kind} {entry_point.name!r} of {package}"


def load_entry_point(kind: str, entry_point: EntryPoint, attribute: str = "") -> Any:
    """Imports the object of an entry point.

    Args:
        kind: of the object, for messages.
        entry_point: of the package.
        attribute: default attribute if the entry point names only a module; "" for the module.
    """
    try:
        module = importlib.import_module(entry_point.module)
        name = entry_point.attr or attribute
        return getattr(module, name) if name else module
    except Exception as error:
        raise ConfigError(
            f"{describe_entry_point(kind, entry_point)} cannot be imported from "
            f"{entry_point.value!r}: {type(error).__name__}: {error}. Fix or uninstall that "
            "package."
        ) from error
