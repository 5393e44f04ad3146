"""The replay buffer that ported training loops make themselves."""

from __future__ import annotations

from typing import Any

from tfpolicies.batch.sample_batch import MultiAgentBatch
from tfpolicies.errors import UsageError
from tfpolicies.replay import multi_agent


class MultiAgentReplayBuffer(multi_agent.MultiAgentReplayBuffer):
    """Keeps the newest rows of each policy, and draws them uniformly.

    Args:
        capacity: rows kept per policy.
        num_shards: must be 1.
        **settings: as `tfpolicies.replay.multi_agent.MultiAgentReplayBuffer` takes them.

    Raises:
        UsageError: for several shards.
    """

    def __init__(self, capacity: int = 10_000, num_shards: int = 1, **settings: Any) -> None:
        if num_shards != 1:
            raise UsageError(f"num_shards must be 1, got {num_shards!r}; make several buffers.")
        super().__init__(capacity, **settings)

    def sample(self, num_items: int, policy_id: str | None = None) -> Any:
        """Returns `num_items` rows of one policy, or of each policy in a `MultiAgentBatch`.

        Args:
            num_items: how many rows.
            policy_id: whose; None for all policies.

        Raises:
            UnknownPolicyError: if no rows of this policy were added.
        """
        if policy_id is not None:
            return super().sample(num_items, policy_id)
        draw = super().sample
        found = {name: draw(num_items, name) for name in self.buffers}
        return MultiAgentBatch(found, num_items)
