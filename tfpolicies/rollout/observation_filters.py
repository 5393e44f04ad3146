"""The observation filters of a worker's policies: read, replaced, put into effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.errors import UsageError
from tfpolicies.policy_map.policy_map import PolicyMap


class ObservationFilters:
    """The observation filters of the policies that have one.

    Args:
        policy_map: the policies.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self._policy_map = policy_map

    @property
    def by_policy(self) -> dict[str, Any]:
        """The filters themselves, by policy id."""
        filters = {pid: policy.driver.filters for pid, policy in self._policy_map.items()}
        return {pid: own["filter"] for pid, own in filters.items() if "filter" in own}

    def copy(self) -> dict[str, Any]:
        """Returns copies by policy id, with what is pending in them."""
        return {pid: each.snapshot() for pid, each in self.by_policy.items()}

    def sync(self, new_filters: Mapping[str, Any]) -> None:
        """Replaces the statistics; see `RolloutWorker.sync_filters`."""
        own = self.by_policy
        missing, unknown = sorted(set(own) - set(new_filters)), sorted(set(new_filters) - set(own))
        if missing or unknown:
            raise UsageError(
                f"new_filters must have a filter for each policy of this worker that has one, "
                f"{sorted(own)}, and no others; missing are {missing}, unknown are {unknown}. Give "
                "what `get_filters()` of a worker with the same policies returned."
            )
        for policy_id, each in own.items():
            each.snapshot().sync(new_filters[policy_id])
        for policy_id, each in own.items():
            each.sync(new_filters[policy_id])
            self._policy_map.handle(policy_id).driver.apply_filters()

    def flush(self) -> None:
        """Lets the statistics of what was sampled take effect.

        A worker of its own does it before each sample; an algorithm once per training iteration, so
        that what was acted on and what is learned from are normalised alike.
        """
        for policy in self._policy_map.values():
            policy.driver.learning.flush_filters()
