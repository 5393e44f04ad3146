"""`register_env`: names for environments under the old name of that function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpolicies.envs.registry import register_environment


def register_env(name: str, env_creator: Callable[[Any], Any]) -> None:
    """Gives a creator of environments a name, which `config.environment(name)` then takes.

    Args:
        name: a non-empty text.
        env_creator: `f(env_context)`, `env_context` being the `env_config` with the index of the
            worker; it may give a `gymnasium.Env`, a `MultiAgentEnv` or one of PettingZoo.

    Raises:
        EnvError: if the name is no text or the creator cannot be called.
    """
    register_environment(name, env_creator)
