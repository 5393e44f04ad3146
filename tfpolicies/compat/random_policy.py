"""`RandomPolicy`, which ported scripts import from RLlib's examples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.batch.leaves import iterate_leaves
from tfpolicies.compat.utils import batch
from tfpolicies.models.action_mapping import ActionMapping
from tfpolicies.models.spaces import get_at_path, is_float_box, unflatten
from tfpolicies.policy.policy import ActionBatch, Policy
from tfpolicies.policy.policy_config import derive_seed


class RandomPolicy(Policy):
    """Samples actions from its action space, ignores observations, and does not learn.

    The setting `seed` and the policy's id determine them. With `ignore_action_bounds`, actions of a
    Box of floats are normally distributed, and count as normalised ones if the config normalises
    actions.

    >>> from gymnasium import spaces
    >>> policy = RandomPolicy(spaces.Discrete(3), spaces.Discrete(2), {"seed": 0})
    >>> set(policy.compute_actions(np.zeros(50, int)).actions.tolist())
    {0, 1}
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        seed = derive_seed(self.config.get("seed"), self.policy_id, "actions")
        self._ignores_bounds = self.config.get("ignore_action_bounds", False) and is_float_box(
            self.action_space
        )
        self._sampling_space = copy.deepcopy(self.action_space)
        if self._ignores_bounds:
            shape, dtype = self.action_space.shape, self.action_space.dtype
            self._sampling_space = spaces.Box(-np.inf, np.inf, shape, dtype)  # type: ignore[arg-type]
        self._sampling_space.seed(seed % 2**31)

    def compute_actions(
        self,
        obs_batch: Any,
        state_batches: Sequence[np.ndarray] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ActionBatch:
        """Samples an action for each row of `obs_batch`."""
        del args, kwargs
        rows = len(next(iterate_leaves(obs_batch)))
        actions = batch([self._sampling_space.sample() for _ in range(rows)])
        if self.config.get("normalize_actions", True) and not self._ignores_bounds:
            mapping = ActionMapping(self.action_space, normalize=True, clip=False, zero_based=False)
            sampled_leaves = [get_at_path(actions, leaf.path) for leaf in mapping.leaves]
            actions = unflatten(self.action_space, mapping.from_env(sampled_leaves))
        return ActionBatch(actions, list(state_batches or []), {})
