"""The observation filters of a worker's policies: read, replace and apply their statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.errors import UsageError
from tfpolicies.policy_map.policy_map import PolicyMap


class ObservationFilters:
    """The observation filters of those policies of a worker that have one.

    Args:
        policy_map: the policies.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self._policy_map = policy_map

    @property
    def by_policy(self) -> dict[str, Any]:
        filters = {pid: policy.driver.filters for pid, policy in self._policy_map.items()}
        return {pid: by_kind["filter"] for pid, by_kind in filters.items() if "filter" in by_kind}

    def copy(self) -> dict[str, Any]:
        """Returns copies by policy id, including their pending statistics."""
        return {
            pid: observation_filter.snapshot() for pid, observation_filter in self.by_policy.items()
        }

    def sync(self, new_filters: Mapping[str, Any]) -> None:
        """Replaces the statistics; see `RolloutWorker.sync_filters`."""
        filters = self.by_policy
        missing, unknown = (
            sorted(set(filters) - set(new_filters)),
            sorted(set(new_filters) - set(filters)),
        )
        if missing or unknown:
            raise UsageError(
                f"new_filters must have exactly the policies of this worker that have a filter, "
                f"{sorted(filters)}; missing: {missing}, unknown: {unknown}. Pass the result of "
                "`get_filters()` of a worker with the same policies."
            )
        for policy_id, observation_filter in filters.items():
            observation_filter.snapshot().sync(new_filters[policy_id])
        for policy_id, observation_filter in filters.items():
            observation_filter.sync(new_filters[policy_id])
            self._policy_map.get_handle(policy_id).driver.apply_filters()

    def flush(self) -> None:
        """Applies the statistics of the sampled observations.

        A stand-alone worker calls this before each sample; an algorithm calls it once per training
        iteration, so that acting and learning normalize observations alike.
        """
        for policy in self._policy_map.values():
            policy.driver.learning.flush_filters()
