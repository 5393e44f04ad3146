"""View requirements of a policy, and the rules for setting them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import BatchUsageError, UnsupportedMethodError, UsageError

_ALWAYS_PRESENT = {
    **{
        name: (name, 0)
        for name in (
            *(SampleBatch.OBS, SampleBatch.ACTIONS, SampleBatch.REWARDS, SampleBatch.TERMINATEDS),
            *(SampleBatch.TRUNCATEDS, SampleBatch.INFOS, SampleBatch.EPS_ID, SampleBatch.UNROLL_ID),
            *(SampleBatch.AGENT_INDEX, SampleBatch.T),
        )
    },
    SampleBatch.NEXT_OBS: (SampleBatch.OBS, 1),
}
"""The columns that every batch has, with their source columns and shifts."""


class PolicyViewRequirements(MutableMapping[str, ViewRequirement]):
    """The columns that a policy reads, by name, and those added to its batches.

    A view that is set becomes a column of the policy's batches, before postprocessing. Set it in
    the constructor of the policy's class, so that the policies of remote workers and checkpoints
    also have it; after the first sample or update it cannot be changed. Columns that every batch
    has cannot be changed, but setting them as they are is allowed. Acting reads the model's
    requirements.

    Args:
        required: the views that the model requires for training.

    Attributes:
        added_views: the views that were set, and `required`.
        is_frozen: whether batches have been made, so that views can no longer be set.
    """

    def __init__(self, required: Mapping[str, ViewRequirement]) -> None:
        self.added_views = {
            n: view for n, view in required.items() if not _is_always_present(n, view)
        }
        for name, view in self.added_views.items():
            _require_available(name, view)
        self.is_frozen = False
        self._defaults: Mapping[str, ViewRequirement] | None = None
        self._policy: Any = None

    def bind(self, policy: Any) -> PolicyViewRequirements:
        """Binds the policy, which reading and setting need, and returns these requirements.

        Before that they do not reference it, so that the policy can be freed.
        """
        self._policy = policy
        return self

    def __getstate__(self) -> dict[str, Any]:  # copies of the policy compute them again
        return {**vars(self), "_policy": None, "_defaults": None, "is_frozen": False}

    def _get_all(self) -> dict[str, ViewRequirement]:
        views = self._defaults or self._policy._make_default_views()
        if not self._policy._uses_dummy_batch:  # a dummy batch is used to find the columns read
            self._defaults = views
        return {**views, **self.added_views}

    def __getitem__(self, column: str) -> ViewRequirement:
        return self._get_all()[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._get_all())

    def __len__(self) -> int:
        return len(self._get_all())

    def __repr__(self) -> str:
        return repr(self._get_all())

    def __setitem__(self, column: str, requirement: ViewRequirement) -> None:
        if not isinstance(requirement, ViewRequirement):
            raise BatchUsageError(
                f"view_requirements[{column!r}] must be a ViewRequirement, got "
                f"{requirement!r:.200}."
            )
        if _is_always_present(column, requirement) or self._is_read_by_model(column, requirement):
            return
        if requirement.asks_to_act:
            _raise_not_offered(
                column,
                "used_for_compute_actions=True, but acting reads the model's requirements: set it "
                "in the model's constructor (self.view_requirements[...] = ViewRequirement(...)), "
                "or name an input of the Keras model prev_n_obs; leave it out here, so that "
                "postprocessing and the loss get the column",
            )
        _require_available(column, requirement)
        self._require_not_frozen(column)
        self.added_views[column] = dataclasses.replace(requirement, used_for_compute_actions=False)

    def __delitem__(self, column: str) -> None:
        if column not in self.added_views:
            _raise_not_offered(column, "not been set by you, so it cannot be deleted")
        self._require_not_frozen(column)
        del self.added_views[column]

    def _is_read_by_model(self, column: str, requirement: ViewRequirement) -> bool:
        """Whether the model reads this view to act, so that batches have it."""
        views = {view.name: view for view in self._policy.driver.acting.views}
        if column not in views:
            return False
        _require_same(column, requirement, views[column].source, views[column].shifts)
        return True

    def _require_not_frozen(self, column: str) -> None:
        if self.is_frozen or self._policy.num_grad_updates:
            raise UsageError(
                f"view_requirements[{column!r}] cannot be changed any more: batches without it "
                "exist, or the policy has learned. Set it before the first sample() and the first "
                "update, best in the constructor of the policy's class."
            )


def _is_always_present(column: str, requirement: ViewRequirement) -> bool:
    """Whether every batch has a column exactly as it is required; raises if it has another form."""
    origin = _ALWAYS_PRESENT.get(column)
    if origin is None and column.startswith("state_in_"):
        origin = (column.replace("state_in_", "state_out_", 1), -1)
    elif origin is None and column.startswith("state_out_"):
        origin = (column, 0)
    if origin is None:
        return False
    _require_same(column, requirement, origin[0], (origin[1],))
    return True


def _require_same(
    column: str, requirement: ViewRequirement, source: str, shifts: tuple[int, ...]
) -> None:
    is_same = (requirement.data_col or column, tuple(requirement.shift_arr)) == (source, shifts)
    if not is_same or requirement.index is not None:
        shown_shift = shifts[0] if len(shifts) == 1 else list(shifts)
        _raise_not_offered(
            column,
            f"{requirement!r:.200}, but this column cannot be changed: it is {source!r} at the "
            f"shift {shown_shift}. Set a view with another name, or add a column in "
            "`postprocess_trajectory`",
        )


def _require_available(column: str, requirement: ViewRequirement) -> None:
    if requirement.batch_repeat_value != 1:
        _raise_not_offered(
            column,
            f"batch_repeat_value={requirement.batch_repeat_value}, but only a recurrent state has "
            "one value for each sequence: leave it at 1",
        )
    source = requirement.data_col or column
    if source == SampleBatch.INFOS or (source == column and (requirement.shift_arr != 0).any()):
        _raise_not_offered(
            column,
            f"the data_col {source!r}, which has no views: name another collected column of arrays",
        )


def _raise_not_offered(column: str, reason: str) -> NoReturn:
    raise UnsupportedMethodError(f"view_requirements[{column!r}] has {reason}.")
