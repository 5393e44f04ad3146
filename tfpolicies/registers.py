"""Names that a process gives to objects of its own, for settings that take names."""

from __future__ import annotations

from typing import Any


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

    def __init__(self, what: str, error: type[Exception], **known: Any) -> None:
        super().__init__(known)
        self._what = what
        self._error = error

    def add(self, name: str, found: Any) -> None:
        """Gives an object a name, which it takes from another one.

        Raises:
            Exception: the register's error, if the name is no text or empty.
        """
        if not isinstance(name, str) or not name:
            raise self._error(f"{self._what}'s name must be a non-empty str, got {name!r}.")
        self[name] = found

    def find(self, name: Any) -> Any:
        """Returns the object that has a name; None if there is none, or it is no name."""
        return self.get(name) if isinstance(name, str) else None
