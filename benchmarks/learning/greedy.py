"""Greedy episodes behind training: the same ones for every library."""

from collections.abc import Callable
from typing import Any

EPISODES = 20
FIRST_SEED = 10_000


def returns_of(env: Any, act: Callable[[Any], Any]) -> list[float]:
    """Returns the undiscounted returns of 20 episodes.

    Args:
        env: a Gymnasium environment; the i-th episode begins with `reset(seed=10_000 + i)`.
        act: an action for an observation, without exploration.
    """
    return [_return_of(env, act, FIRST_SEED + i) for i in range(EPISODES)]


def _return_of(env: Any, act: Callable[[Any], Any], seed: int) -> float:
    obs, _ = env.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(act(obs))
        total, ended = total + float(reward), terminated or truncated
    return total
