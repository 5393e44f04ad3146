"""Names that a process or an installed package gives to objects of its own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfpolicies.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Register(dict[str, Any]):
    """The objects of one kind by name.

    It belongs to the process: workers are told of it (`distributed/names.py`), and whoever loads a
    checkpoint elsewhere registers there.

    Args:
        what: what has these names, for messages.
        error: raised for a name that is none.
        known: what it holds from the beginning.

    >>> pets = Register("A pet", ValueError)
    >>> pets.add("rex", "dog")
    >>> pets.find("rex"), pets.find(["rex"])
    ('dog', None)
    """

    def __init__(self, what: str, error: type[Exception], **known: object) -> None:
        super().__init__(known)
        self._what = what
        self._error = error

    def add(self, name: str, found: object) -> None:
        """Gives an object a name, which it takes from another one.

        Raises:
            Exception: the register's error, if the name is no text or empty.
        """
        if not isinstance(name, str) or not name:
            raise self._error(f"{self._what}'s name must be a non-empty str, got {name!r}.")
        self[name] = found

    def find(self, name: object) -> Any:
        """Returns the object that has a name; None if there is none, or it is no name."""
        return self.get(name) if isinstance(name, str) else None


def installed(group: str) -> dict[str, EntryPoint]:
    """Returns what installed packages name in a group of entry points; of one name, the first."""
    from importlib.metadata import entry_points  # an eighth of the start of an environment process

    found: dict[str, EntryPoint] = {}
    for entry_point in entry_points(group=group):
        found.setdefault(entry_point.name, entry_point)
    return found


def told(kind: str, entry_point: EntryPoint) -> str:
    """Returns how messages call what a package names, given what kind of thing it is."""
    dist = entry_point.dist
    package = "a package" if dist is None else f"the package {dist.name} {dist.version}"
    return f"The {kind} {entry_point.name!r} of {package}"


def import_installed(kind: str, entry_point: EntryPoint, attribute: str = "") -> Any:
    """Returns what a package names.

    Args:
        kind: of thing, for messages.
        entry_point: of the package.
        attribute: what is meant of a module where the entry point does not say; "" for the module.

    Raises:
        ConfigError: if it cannot be imported; the message names the package.
    """
    try:
        module = importlib.import_module(entry_point.module)
        name = entry_point.attr or attribute
        return getattr(module, name) if name else module
    except Exception as error:
        raise ConfigError(
            f"{told(kind, entry_point)} cannot be imported from {entry_point.value!r}: "
            f"{type(error).__name__}: {error}. Mend that package, or uninstall it."
        ) from error
