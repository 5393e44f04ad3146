"""States of running episodes, by an environment's methods `get_state` and `set_state`.

Checkpoints use these methods if an environment has both, so that a resumed run continues the
episodes. `get_state()` returns everything that later steps depend on, including the state of the
environment's generator, as numbers, texts, arrays, lists, tuples and dicts; `set_state(state)`
restores it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from tfpolicies.errors import EnvError
from tfpolicies.storage.json_values import decode_value, encode_value, find_unresolved


def has_episode_state(env: object) -> bool:
    """Whether an environment has both methods, with the parameters that checkpoints pass.

    An environment with only one of them, or with other parameters, uses the name for something
    else.

    >>> has_episode_state(object())
    False
    """
    getter, setter = (getattr(env, name, None) for name in ("get_state", "set_state"))
    return accepts_arguments(getter) and accepts_arguments(setter, None)


def accepts_arguments(function: Callable[..., Any] | None, *args: object) -> bool:
    """Whether a function or class can be called with positional arguments; False for None."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # Python cannot determine the signature
        return True
    return True


def get_episode_state(env: Any) -> Any:
    """Returns `env.get_state()`.

    Raises:
        EnvError: if it fails.
    """
    try:
        return env.get_state()
    except Exception as error:
        raise EnvError(f"`get_state` of {_get_name(env)} failed: {error!r}.") from error


def set_episode_state(env: Any, state: Any) -> None:
    """Calls `env.set_state(state)`.

    Raises:
        EnvError: if it fails, or there is no such method any more.
    """
    if not has_episode_state(env):
        raise EnvError(f"{_get_name(env)} no longer has `get_state` and `set_state`.")
    try:
        env.set_state(state)
    except Exception as error:
        raise EnvError(f"`set_state` of {_get_name(env)} failed: {error!r}.") from error


def encode_episode_states(states: Any) -> Any:
    """Returns results of `get_state` as JSON values, which `decode_value` reads.

    Raises:
        EnvError: if they contain an object that no file can hold.

    >>> encode_episode_states([{"level": 3}])
    [{'level': 3}]
    """
    encoded = encode_value(states)
    unresolved = find_unresolved(decode_value(encoded))
    if unresolved:
        objects = ", ".join(sorted({value.name for value in unresolved.values()}))
        raise EnvError(
            f"`get_state` returns {objects}, which no file can hold. Return numbers, texts, "
            "arrays, lists, tuples and dicts; of a generator, its `bit_generator.state`."
        )
    return encoded


def get_layer_states(env: Any) -> list[Any] | None:
    """Returns the states of an environment's layers from the outermost in, or None.

    The state of a wrapper with both methods is that of all that it wraps. Wrappers without them are
    supported only if they are Gymnasium's time limit or checks.

    Raises:
        EnvError: if a `get_state` fails.
    """
    if has_episode_state(env):
        return [get_episode_state(env)]
    if not isinstance(env, TimeLimit | OrderEnforcing | PassiveEnvChecker):
        return None
    inner = get_layer_states(env.env)
    elapsed_steps = env._elapsed_steps if isinstance(env, TimeLimit) else None
    return None if inner is None else [elapsed_steps, *inner]


def set_layer_states(env: Any, layers: Sequence[Any]) -> None:
    """Restores a result of `get_layer_states`.

    Raises:
        EnvError: if the environment has other layers now, or a `set_state` fails.
    """
    for elapsed_steps in layers[:-1]:
        if not isinstance(env, TimeLimit | OrderEnforcing | PassiveEnvChecker):
            raise EnvError(f"{_get_name(env)} has other wrappers than before.")
        if isinstance(env, TimeLimit):
            env._elapsed_steps = elapsed_steps
        env = env.env
    set_episode_state(env, layers[-1])


def _get_name(env: object) -> str:
    return type(getattr(env, "unwrapped", env)).__name__
