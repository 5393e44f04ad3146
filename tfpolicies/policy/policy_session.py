"""Sessions: objects that act step by step and keep the recurrent state in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfpolicies.base.finite_checks import is_finite
from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.leaves import expand_batch_axis, get_first_row, map_leaves
from tfpolicies.errors import ObservationError
from tfpolicies.models.spaces import batch_leaves, leaves, to_float32
from tfpolicies.policy.input_check import InputValidator
from tfpolicies.policy.recurrent_state import RecurrentState


class PolicySession:
    """Acts in one environment, or in B, and keeps the recurrent state and the earlier steps.

    Policies without a recurrent state are used in the same way.

    Args:
        policy: acts.
        batch_size: number of environments that act together; None for one, without a batch axis.
        explore: sample or be greedy; None takes the policy's config.
    """

    def __init__(
        self, policy: Any, batch_size: int | None = None, *, explore: bool | None = None
    ) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.explore = explore
        self._leaves = leaves(policy.observation_space)
        self._check = InputValidator(policy.observation_space, policy.action_space).check
        self.reset()

    def reset(self, rows: np.ndarray | Sequence[int] | None = None) -> None:
        """Starts new episodes: in all environments, or in those of a bool or index array."""
        if rows is None:
            self.recurrent_state = RecurrentState(self.policy, self.batch_size or 1)
        else:
            self.recurrent_state.reset(rows)

    def act(self, obs: Structure, reward: Any = None, explore: bool | None = None) -> Any:
        """Returns the action for the environment, as arrays that you own.

        Args:
            obs: one observation, or a batch `[B, ...]` with a batch size.
            reward: the reward of the last action, a number or `[B]`; for models that read it.
            explore: sample or be greedy; None takes the session's.

        Raises:
            ObservationError: if the observation does not fit the space, has NaN or infinity, or a
                mask that allows no action (see `debugging(check_inputs=...)`).
        """
        single = self.batch_size is None
        batch = expand_batch_axis(obs) if single else obs
        obs_leaves = batch_leaves(self._leaves, batch, "obs")
        rewards = None if reward is None else to_float32(reward, "reward").reshape(-1)
        if self.policy.config.get("check_inputs", True):
            self._check(obs_leaves)
            if rewards is not None and not is_finite(rewards):
                raise ObservationError(f"The reward must be finite, got {reward!r:.200}.")
        if rewards is not None:
            self.recurrent_state.record_rewards(rewards)
        actions, _ = self.recurrent_state.act(
            obs_leaves, self.explore if explore is None else explore
        )
        copies = map_leaves(np.copy, actions)
        return get_first_row(copies) if single else copies
