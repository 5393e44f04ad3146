"""The view requirements of a policy, and what may be set among them."""

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
"""The columns that every batch has: what each is made of, at which shift."""


class PolicyViews(MutableMapping[str, ViewRequirement]):
    """The columns that a policy reads, by name, and those that its batches get besides.

    What is set here becomes a column of the policy's batches, before they are postprocessed, until
    the first sample or update; set it in the constructor of the policy's class, so that the
    policies of remote workers and checkpoints have it, too. What every batch has cannot be changed,
    but what is so in any case may be said. Acting reads what the model requires.

    Args:
        required: what the model requires for training.

    Attributes:
        added: what was set, and `required`.
        is_settled: whether batches have been made, so that nothing can be set any more.
    """

    def __init__(self, required: Mapping[str, ViewRequirement]) -> None:
        self.added = {n: view for n, view in required.items() if not _is_made(n, view)}
        for name, view in self.added.items():
            _require_makeable(name, view)
        self.is_settled = False
        self._defaults: Mapping[str, ViewRequirement] | None = None
        self._policy: Any = None

    def of(self, policy: Any) -> PolicyViews:
        """Returns these requirements to somebody who reads or sets them, and so needs the policy.

        Until then they do not hold it, so that a policy goes with its last handle.
        """
        self._policy = policy
        return self

    def __getstate__(self) -> dict[str, Any]:  # copies of the policy ask anew
        return {**vars(self), "_policy": None, "_defaults": None, "is_settled": False}

    def _all(self) -> dict[str, ViewRequirement]:
        views = self._defaults or self._policy._default_views()
        if not self._policy._sees_zeros:  # from which it will be known what is read
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
            _refuse(column, "to be taken out, but only what was set can be")
        self._require_open(column)
        del self.added[column]

    def _is_seen(self, column: str, requirement: ViewRequirement) -> bool:
        """Whether the model reads such a view while it acts, so that it is there."""
        views = {view.name: view for view in self._policy.driver.acting.views}
        if column not in views:
            return False
        _require_same(column, requirement, views[column].source, views[column].shifts)
        return True

    def _require_open(self, column: str) -> None:
        if self.is_settled or self._policy.num_grad_updates:
            raise UsageError(
                f"view_requirements[{column!r}] cannot be changed any more: batches were made "
                "without it, or learned from. Set it before the first sample() and the first "
                "update, best in the constructor of the policy's class."
            )


def _is_made(column: str, requirement: ViewRequirement) -> bool:
    """Whether every batch has a column, just as it is required.

    Raises:
        NotOfferedError: if it has it in another form.
    """
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
            f"shift {seen}. Set a view of another name, or add a column in "
            "`postprocess_trajectory`",
        )


def _require_makeable(column: str, requirement: ViewRequirement) -> None:
    """Checks that batches can have a column.

    Raises:
        NotOfferedError: if they cannot.
    """
    if requirement.batch_repeat_value != 1:
        _refuse(
            column,
            f"batch_repeat_value={requirement.batch_repeat_value}, but only a memory has one value "
            "for each sequence: leave it at 1",
        )
    source = requirement.data_col or column
    if source == SampleBatch.INFOS or (source == column and (requirement.shift_arr != 0).any()):
        _refuse(
            column,
            f"the data_col {source!r}, of which no steps can be seen: name another collected "
            "column of arrays",
        )


def _refuse(column: str, what: str) -> NoReturn:
    raise NotOfferedError(f"view_requirements[{column!r}] has {what}.")
