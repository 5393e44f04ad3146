"""The advantages that algorithms with a critic learn from."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpolicies.batch.postprocessing import discounted_returns, generalized_advantages
from tfpolicies.policy.fragments import Fragments


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
