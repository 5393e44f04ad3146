"""Names for environments of one's own, one agent's or several's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.vector import VectorEnv

from tfpolicies.errors import EnvError
from tfpolicies.registers import Register

Source: TypeAlias = str | type | Callable[..., Any] | gym.Env | VectorEnv
"""The source of environments: a name, a class, a function or an environment itself."""

ENVIRONMENTS = Register("An environment", EnvError)


def env_name(source: Source) -> str:
    """Returns the name of what environments are made of: a text, a class or a function."""
    return source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)


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
    if not callable(creator):
        raise EnvError(
            f"The creator of {name!r} must be an environment class or f(env_context), got "
            f"{creator!r}. Write `lambda env_config: MyEnv(env_config)`."
        )
    ENVIRONMENTS.add(name, creator)
