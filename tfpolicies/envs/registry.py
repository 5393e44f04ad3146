"""Names for environments of one's own, one agent's or several's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpolicies.errors import EnvError

_CREATORS: dict[str, Callable[[Any], Any]] = {}


def register_environment(name: str, creator: Callable[[Any], Any]) -> None:
    """Gives a creator of environments a name, which `config.environment(name)` then takes.

    A name that Gymnasium knows, too, means this one. Registering it again replaces the creator. The
    register belongs to the process: whoever loads a checkpoint in another one registers there.

    Args:
        name: a non-empty text.
        creator: `f(env_context)` or a class; what it may give is told by `make_any_environments`.

    Raises:
        EnvError: if the name is no text or the creator cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise EnvError(f"An environment's name must be a non-empty str, got {name!r}.")
    if not callable(creator):
        raise EnvError(
            f"The creator of {name!r} must be an environment class or f(env_context), got "
            f"{creator!r}. Write `lambda env_config: MyEnv(env_config)`."
        )
    _CREATORS[name] = creator


def registered_creator(name: Any) -> Callable[[Any], Any] | None:
    """Returns the creator registered under a name, or None."""
    return _CREATORS.get(name) if isinstance(name, str) else None


def registered_names() -> list[str]:
    """Returns all names, sorted."""
    return sorted(_CREATORS)
