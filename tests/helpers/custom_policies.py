"""Policies without TensorFlow."""

import numpy as np

from helpers.factories import OBS, TWO
from tfpolicies import Policy
from tfpolicies.policy.policy import ActionBatch


class ZeroPolicy(Policy):
    """Always takes action 0; has a default for each argument."""

    def __init__(self, observation_space=OBS, action_space=TWO, config=None):
        super().__init__(observation_space, action_space, config or {})

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})
