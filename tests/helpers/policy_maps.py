"""Policies that one number tells apart, and maps of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.factories import make
from tfpolicies import Policy, PolicyMap


def fill(policy: Policy, number: float) -> Policy:
    """Gives all weights one number; returns the policy."""
    policy.set_weights([np.full_like(x, number) for x in policy.get_weights().values()])
    return policy


def get_number(policy: Policy) -> float:
    """Returns the one number that all weights have."""
    (number,) = {float(x) for array in policy.get_weights().values() for x in array.flat}
    return number


def make_filled(number: float, *arguments: Any, **config: Any) -> Policy:
    """Makes a policy whose weights are all one number."""
    return fill(make(*arguments, **config), number)


def make_map(*ids: str, **arguments: Any) -> PolicyMap:
    """Makes a map of policies whose weights are 1, 2, 3..."""
    policies = PolicyMap(**arguments)
    for i, policy_id in enumerate(ids):
        policies[policy_id] = make(seed=i)
        fill(policies.get_handle(policy_id), i + 1)
    return policies


def release_folder(policies: PolicyMap) -> None:
    """Leaves the folder of a map as a killed process does."""
    policies._store._folder_lock.release()
