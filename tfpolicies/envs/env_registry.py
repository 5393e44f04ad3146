"""Registry of custom environments by name, with one agent or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.vector import VectorEnv

from tfpolicies.base.name_registry import NameRegistry
from tfpolicies.errors import EnvError

EnvSource: TypeAlias = str | type | Callable[..., Any] | gym.Env | VectorEnv
"""Source of environments: a name, a class, a function or an environment instance."""

ENVIRONMENTS = NameRegistry("An environment", EnvError)


def get_env_name(source: EnvSource) -> str:
    """Returns the name of an environment source: a text, a class or a function."""
    return source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)


def register_environment(name: str, creator: Callable[[Any], Any]) -> None:
    """Registers a creator of environments under a name, for `config.environment(name)`.

    The name takes precedence over one that Gymnasium knows. Registering it again replaces the
    creator. The registry belongs to the process: a process that loads a checkpoint registers its
    names itself.

    Args:
        name: a non-empty text.
        creator: `f(env_context)` or a class; `make_any_environments` lists its possible results.
    """
    if not callable(creator):
        raise EnvError(
            f"The creator of {name!r} must be an environment class or f(env_context), got "
            f"{creator!r}. Write `lambda env_config: MyEnv(env_config)`."
        )
    ENVIRONMENTS.add(name, creator)
