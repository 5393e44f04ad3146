"""Custom policies, without TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpolicies import Policy
from tfpolicies.policy.policy import ActionBatch


class ConstantPolicy(Policy):
    """Always gives the same action: its attribute `action`."""

    action: Any = 0

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **kwargs: Any) -> Any:
        action = np.asarray(self.action)
        return ActionBatch(np.broadcast_to(action, (len(obs_batch), *action.shape)), [], {})
