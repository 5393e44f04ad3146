"""Access to settings that are known to learn well, by algorithm and environment.

`tfpolicies train` starts from these, and `tfpolicies list tuned` lists them; in a script:

>>> from tfpolicies import PPOConfig
>>> PPOConfig.from_tuned("CartPole-v1").num_envs_per_worker
8

The data is in `tuned_table.py`. Other packages add entries for their algorithms or environments by
`register_tuned`, best in the module that defines the algorithm.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Sequence
from typing import Any

from tfpolicies.algorithms.tuned_hyperparameters_table import TUNED, Settings
from tfpolicies.algorithms.tuned_hyperparameters_table import TunedSettings as TunedSettings
from tfpolicies.errors import ConfigError

_MAX_SUGGESTIONS = 3  # suggested pairs if there is no entry


def get_tuned_settings(algo: str, env: str) -> dict[str, Any]:
    """Returns a copy of the tuned settings; an empty dict if there are none for that pair.

    Args:
        algo: the algorithm's name, such as `"PPO"`.
        env: the environment's registered name.
    """
    entry = find_tuned(algo, env)
    return {} if entry is None else copy.deepcopy(dict(entry.settings))


def find_tuned(algo: str, env: str) -> TunedSettings | None:
    """Returns the entry of an algorithm and an environment; None if there is none."""
    return TUNED.get((algo, env))


def require_tuned(algo: str, env: str) -> TunedSettings:
    entry = find_tuned(algo, env)
    if entry is None:
        nearest = suggest_tuned(algo, env)
        suggestion = f"; nearest are {nearest}" if nearest else ""
        raise ConfigError(
            f"There are no tuned settings for {algo} on {env}{suggestion}. `tfpolicies list "
            "tuned` lists all of them."
        )
    return entry


def get_tuned_entries(algo: str = "", env: str = "") -> dict[tuple[str, str], TunedSettings]:
    """Returns entries by algorithm and environment.

    Args:
        algo: the algorithm's name; "" for all.
        env: a part of the environment's name, in any case.
    """
    return {
        pair: entry
        for pair, entry in TUNED.items()
        if algo in ("", pair[0]) and env.lower() in pair[1].lower()
    }


def suggest_tuned(algo: str, env: str) -> str:
    """Returns the names of the entries nearest to a missing pair; "" if there are none.

    These are entries of the algorithm for other versions of the environment, then those of other
    algorithms for the environment, or else those of the algorithm for similar environments.

    >>> suggest_tuned("PPO", "HalfCheetah-v3")
    'PPO on HalfCheetah-v4, PPO on HalfCheetah-v5'
    >>> suggest_tuned("PG", "Acrobot-v1")
    'PPO on Acrobot-v1, A2C on Acrobot-v1, DQN on Acrobot-v1'
    """
    algo_envs = [other for name, other in TUNED if name == algo]
    versions = [
        (algo, other_env)
        for other_env in algo_envs
        if _strip_version(other_env) == _strip_version(env)
    ]
    pairs = versions + [pair for pair in TUNED if pair[1] == env]
    similar = difflib.get_close_matches(env, algo_envs, _MAX_SUGGESTIONS, 0.7)
    pairs = pairs or [(algo, other_env) for other_env in similar]
    return ", ".join(f"{name} on {other}" for name, other in pairs[:_MAX_SUGGESTIONS])


def _strip_version(env: str) -> str:
    return env.rpartition(":")[2].rpartition("-v")[0]


def register_tuned(
    algo: str,
    env: str,
    settings: Settings,
    *,
    source: str,
    steps: int,
    threshold: float | None = None,
    deviations: Sequence[str] = (),
) -> None:
    """Adds or replaces tuned settings.

    Args:
        algo: the algorithm's name.
        env: the environment's registered name.
        settings: of the algorithm's config, by name.
        source: their paper or file.
        steps: environment steps that the source trains for.
        threshold: the mean return of an episode that it reports; None if it reports none.
        deviations: how the settings differ from the source, each in a few words.
    """
    TUNED[algo, env] = TunedSettings(settings, source, steps, threshold, tuple(deviations))
