"""Settings that are known to learn well, by algorithm and environment: what asks for them.

`tfpolicies train` begins with these, and `tfpolicies tuned` lists them; in a script:

>>> from tfpolicies import PPOConfig
>>> PPOConfig().update_from_dict(tuned_settings("PPO", "CartPole-v1")).num_envs_per_worker
8

The data is in `tuned_table.py`. A package of yours adds entries for its algorithm, or for its
environments, by `register_tuned`.
"""

from __future__ import annotations

import copy
from typing import Any

from tfpolicies.algorithms.tuned_table import TUNED


def tuned_settings(algo: str, env: str) -> dict[str, Any]:
    """Returns tuned settings, for the caller to keep; none if nobody tuned that pair.

    Args:
        algo: the algorithm's name, such as `"PPO"`.
        env: the environment's registered name.
    """
    entry = TUNED.get((algo, env))
    return {} if entry is None else copy.deepcopy(dict(entry.settings))
