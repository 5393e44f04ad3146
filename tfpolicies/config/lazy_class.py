"""Lazy references to classes defined later in the same module."""

from __future__ import annotations

import sys
from typing import Any

from tfpolicies.errors import UsageError


class _LazyClass:
    """A class attribute that is resolved in the module of its owner when it is read."""

    _pickled_class: Any = None  # the class, after unpickling in a process without its module

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._module = owner.__module__

    def __get__(self, instance: object, owner: type) -> Any:
        resolved = self._resolve()
        if resolved is None:  # an AttributeError would be read as a missing attribute
            raise UsageError(
                f"{owner.__name__} refers to a class {self._name!r}, but the module "
                f"{self._module!r} has none. Define it there, or set the attribute to the class "
                "itself below its definition."
            )
        return resolved

    def _resolve(self) -> Any:
        return getattr(sys.modules.get(self._module), self._name, self._pickled_class)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pickled_class": self._resolve()}


def lazy_class(name: str) -> Any:
    """Returns a class attribute that resolves to a class of the owner's module.

    Use it where the loss and policies of an algorithm are defined before its config::

        class PPOTFPolicy(TFPolicy):
            config_class = lazy_class("PPOConfig")

    Args:
        name: of a class that the same module defines.

    Raises:
        UsageError: when it is read, if the module has no such class.
    """
    return _LazyClass(name)
