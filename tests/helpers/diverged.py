"""Policies whose weights are not finite."""

from typing import Any

import numpy as np


def make_diverged(policy: Any) -> Any:
    """Gives a policy weights that are all NaN; returns the policy."""
    with policy.driver.allow_non_finite():
        policy.set_weights([np.full(w.shape, np.nan) for w in policy.get_weights().values()])
    return policy
