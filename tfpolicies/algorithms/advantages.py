"""What algorithms with a critic share: their advantages, and the checks of their settings."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpolicies.batch.postprocessing import discounted_returns, generalized_advantages
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.sections import SCHEDULE
from tfpolicies.errors import ConfigError
from tfpolicies.policy.fragments import Fragments
from tfpolicies.rules import Rule, is_count

ENTROPY_SCHEDULE = Rule(lambda x: is_count(x) or SCHEDULE.holds(x), SCHEDULE.words)
"""`entropy_coeff_schedule`: [[timestep, entropy_coeff], ...], or n: to 0 at timestep n."""


def check_gae(config: AlgorithmConfig) -> None:
    """Checks that returns without GAE are those of whole episodes.

    Raises:
        ConfigError: naming the contradiction.
    """
    if not config.use_gae and config.batch_mode == "truncate_episodes":
        raise ConfigError(
            "use_gae=False needs whole episodes: set batch_mode='complete_episodes', or "
            "use_gae=True."
        )


def add_advantages(policy: Any, fragments: Fragments) -> None:
    """Adds `advantages`, `value_targets` and `values_bootstrapped` for all trajectories at once.

    With a critic they are GAE's (arXiv:1506.02438, equation 16), with `use_gae=False` those of
    lambda 1. Without a critic the advantages are discounted returns, and there is nothing to
    bootstrap with.

    Args:
        policy: has the hyper-parameters `gamma` and `lambda`, and the settings `use_critic` and
            `use_gae`.
        fragments: the columns are added here.
    """
    rewards, added = fragments.columns["rewards"], fragments.added
    gamma = policy.hyper("gamma")
    if not policy.config["use_critic"]:
        nothing = np.zeros_like(rewards)
        added["value_targets"] = nothing
        added["advantages"] = discounted_returns(rewards, fragments.ends, nothing, gamma=gamma)
        return
    next_values = fragments.next_values()
    added["advantages"], added["value_targets"] = generalized_advantages(
        rewards,
        fragments.columns["vf_preds"],
        next_values,
        fragments.columns["terminateds"],
        fragments.ends,
        gamma=gamma,
        lambda_=policy.hyper("lambda") if policy.config["use_gae"] else 1.0,
    )
    added["values_bootstrapped"] = next_values
