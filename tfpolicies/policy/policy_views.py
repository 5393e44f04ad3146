"""View requirements of a policy, and the rules for setting them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import BatchUsageError, NotOfferedError, UsageError

_MADE = {
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


class PolicyViews(MutableMapping[str, ViewRequirement]):
    """The columns that a policy reads, by name, and those added to its batches.

    A view that is set becomes a column of the policy's batches, before postprocessing. Set it in
    the constructor of the policy's class, so that the policies of remote workers and checkpoints
    also have it; after the first sample or update it cannot be changed. Columns that every batch
    has cannot be changed, but setting them as they are is allowed. Acting reads what the model
    requires.

    Args:
        required: the views that the model requires for training.

    Attributes:
        added_views: the views that were set, and `required`.
        is_frozen: whether batches have been made, so that views can no longer be set.
    """

    def __init__(self, required: Mapping[str, ViewRequirement]) -> None:
        self.added = {n: view for n, view in required.items() if not _is_made(n, view)}
        for name, view in self.added.items():
            _require_makeable(name, view)
        self.is_settled = False
        self._defaults: Mapping[str, ViewRequirement] | None = None
        self._policy: Any = None

    def of(self, policy: Any) -> PolicyViews:
        """Binds the policy, which reading and setting need, and returns these requirements.

        Before that they do not reference it, so that the policy can be freed.
        """
        self._policy = policy
        return self

    def __getstate__(self) -> dict[str, Any]:  # copies of the policy compute them again
        return {**vars(self), "_policy": None, "_defaults": None, "is_settled": False}

    def _all(self) -> dict[str, ViewRequirement]:
        views = self._defaults or self._policy._default_views()
        if not self._policy._sees_zeros:  # a dummy batch is used to find the columns read
            self._defaults = views
        return {**views, **self.added}

    def __getitem__(self, column: str) -> ViewRequirement:
        return self._all()[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def __setitem__(self, column: str, requirement: ViewRequirement) -> None:
        if not isinstance(requirement, ViewRequirement):
            raise BatchUsageError(
                f"view_requirements[{column!r}] must be a ViewRequirement, got "
                f"{requirement!r:.200}."
            )
        if _is_made(column, requirement) or self._is_seen(column, requirement):
            return
        if requirement.asks_to_act:
            _refuse(
                column,
                "used_for_compute_actions=True, but acting reads what the model requires: set it "
                "in the model's constructor (self.view_requirements[...] = ViewRequirement(...)), "
                "or name an input of the Keras model prev_n_obs; leave it out here, so that "
                "postprocessing and the loss get the column",
            )
        _require_makeable(column, requirement)
        self._require_open(column)
        self.added[column] = dataclasses.replace(requirement, used_for_compute_actions=False)

    def __delitem__(self, column: str) -> None:
        if column not in self.added:
            _refuse(column, "not been set by you, so it cannot be deleted")
        self._require_open(column)
        del self.added[column]

    def _is_seen(self, column: str, requirement: ViewRequirement) -> bool:
        """Whether the model reads this view to act, so that batches have it."""
        views = {view.name: view for view in self._policy.driver.acting.views}
        if column not in views:
            return False
        _require_same(column, requirement, views[column].source, views[column].shifts)
        return True

    def _require_open(self, column: str) -> None:
        if self.is_settled or self._policy.num_grad_updates:
            raise UsageError(
                f"view_requirements[{column!r}] cannot be changed any more: batches without it "
                "exist, or the policy has learned. Set it before the first sample() and the first "
                "update, best in the constructor of the policy's class."
            )


def _is_made(column: str, requirement: ViewRequirement) -> bool:
    """Whether every batch has a column exactly as it is required; raises if it has another form."""
    made = _MADE.get(column)
    if made is None and column.startswith("state_in_"):
        made = (column.replace("state_in_", "state_out_", 1), -1)
    elif made is None and column.startswith("state_out_"):
        made = (column, 0)
    if made is None:
        return False
    _require_same(column, requirement, made[0], (made[1],))
    return True


def _require_same(
    column: str, requirement: ViewRequirement, source: str, shifts: tuple[int, ...]
) -> None:
    same = (requirement.data_col or column, tuple(requirement.shift_arr)) == (source, shifts)
    if not same or requirement.index is not None:
        seen = shifts[0] if len(shifts) == 1 else list(shifts)
        _refuse(
            column,
            f"{requirement!r:.200}, but this column cannot be changed: it is {source!r} at the "
            f"shift {seen}. Set a view with another name, or add a column in "
            "`postprocess_trajectory`",
        )


def _require_makeable(column: str, requirement: ViewRequirement) -> None:
    if requirement.batch_repeat_value != 1:
        _refuse(
            column,
            f"batch_repeat_value={requirement.batch_repeat_value}, but only a recurrent state has "
            "one value for each sequence: leave it at 1",
        )
    source = requirement.data_col or column
    if source == SampleBatch.INFOS or (source == column and (requirement.shift_arr != 0).any()):
        _refuse(
            column,
            f"the data_col {source!r}, which has no views: name another collected column of arrays",
        )


def _refuse(column: str, what: str) -> NoReturn:
    raise NotOfferedError(f"view_requirements[{column!r}] has {what}.")
