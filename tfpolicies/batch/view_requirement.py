"""`ViewRequirement`: how a model or a loss derives one of its columns from collected columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import gymnasium
import numpy as np

from tfpolicies.errors import BatchError, BatchUsageError, NotOfferedError, SpaceError

_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(\d+))?")


@dataclass(frozen=True)
class ViewRequirement:
    """One column that a model or a loss reads, and the collected column it comes from.

    Change one with `dataclasses.replace(requirement, used_for_training=False)`.

    Args:
        data_col: the collected column; None means the column of the same name.
        space: the space of one value; an unbounded float32 scalar if None.
        shift: which time steps are seen, relative to the current one: a number, several numbers,
            or a range with both ends included, `"-3:-1"`, or with a step, `"-6:0:2"`.
        index: an absolute position in the trajectory to be seen instead, if given.
        batch_repeat_value: how many time steps share one value (`max_seq_len` for the states of
            a recurrent model).
        used_for_compute_actions: whether acting reads the column.
        used_for_training: whether the loss reads the column.

    Attributes:
        shift_arr: the shifts as int64 [num_shifts].

    Raises:
        BatchUsageError: if an argument other than `space` is malformed.
        SpaceError: if `space` is not a Gymnasium space.

    >>> ViewRequirement("obs", shift="-3:-1").shift_arr
    array([-3, -2, -1])
    """

    data_col: str | None = None
    space: gymnasium.Space | None = None
    shift: int | str | Sequence[int] = 0
    index: int | None = None
    batch_repeat_value: int = 1
    used_for_compute_actions: bool = True
    used_for_training: bool = True
    shift_arr: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.space is None:
            space = gymnasium.spaces.Box(-np.inf, np.inf, shape=(), dtype=np.float32)
            object.__setattr__(self, "space", space)
        elif not isinstance(self.space, gymnasium.Space):
            raise SpaceError(
                f"`space` must be a Gymnasium space or None, but got {self.space!r}. Wrap a shape "
                "as `gymnasium.spaces.Box(low, high, shape)`."
            )
        if not (self.data_col is None or (isinstance(self.data_col, str) and self.data_col)):
            _refuse("data_col", "the name of a column or None", self.data_col)
        if not (self.index is None or _is_whole(self.index)):
            _refuse("index", "a whole number or None", self.index)
        if not _is_whole(self.batch_repeat_value) or self.batch_repeat_value < 1:
            _refuse("batch_repeat_value", "a whole number from 1", self.batch_repeat_value)
        for name in ("used_for_compute_actions", "used_for_training"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "True or False", getattr(self, name))
        if isinstance(self.shift, list | np.ndarray):
            object.__setattr__(self, "shift", tuple(np.asarray(self.shift).tolist()))
        object.__setattr__(self, "shift_arr", _parse_shift(self.shift))

    def require_causal(self, column: str) -> None:
        """Checks that acting needs no value from the future.

        Args:
            column: the name of the required column, for the message.

        Raises:
            BatchError: if acting uses the column and a shift is positive.
        """
        if self.used_for_compute_actions and self.shift_arr.max() > 0:
            raise BatchError(
                f"A column used for acting cannot look ahead, but {column!r} has the shift "
                f"{self.shift!r}. Set `used_for_compute_actions=False`, or a shift up to 0."
            )


class ReadOnlyViews(dict[str, ViewRequirement]):
    """The view requirements of a policy, by column: what it reads, to be looked at.

    Whatever would change them raises a `NotOfferedError`. What is so in any case may be said: that
    the memory before a step (`state_in_0`) is the one after the step before (`state_out_0`).
    """

    def __setitem__(self, column: str, requirement: ViewRequirement) -> None:
        self.update({column: requirement})

    def update(self, *args: Any, **kwargs: Any) -> None:
        if not all(_is_memory(*item) for item in dict(*args, **kwargs).items()):
            self.refuse()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotOfferedError(
            "The view requirements of a policy cannot be changed: nothing would follow from it. A "
            "model's own work, set in its constructor before the policy is made "
            '(self.view_requirements["prev_actions"] = ViewRequirement("actions", shift=-1)). What '
            "postprocessing and learning need can be added as a column in "
            "`postprocess_trajectory`; a history of observations is `FrameStack`'s, an agent "
            "connector. To work on a copy: dict(policy.view_requirements)."
        )

    refuse = __delitem__ = _refuse
    clear = pop = popitem = setdefault = _refuse
    __ior__ = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[str, ViewRequirement]]]:
        return ReadOnlyViews, (dict(self),)


def _is_memory(column: str, requirement: ViewRequirement) -> bool:
    """Whether a column is a part of the memory as every policy is given it."""
    after = column.replace("state_in_", "state_out_", 1)
    is_memory = column != after and requirement.data_col == after
    return is_memory and requirement.shift_arr.tolist() == [-1]


def _parse_shift(shift: object) -> np.ndarray:
    if _is_whole(shift):
        return np.array([shift], dtype=np.int64)
    if isinstance(shift, tuple) and shift and all(map(_is_whole, shift)):
        return np.array(shift, dtype=np.int64)
    match = _RANGE.fullmatch(shift) if isinstance(shift, str) else None
    if match is None:
        _refuse("shift", 'a whole number, several of them, or a range "a:b" or "a:b:step"', shift)
    start, stop, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if start > stop or step < 1:
        _refuse("shift", "a range that ascends in steps from 1", shift)
    return np.arange(start, stop + 1, step, dtype=np.int64)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _refuse(name: str, rule: str, value: object) -> NoReturn:
    raise BatchUsageError(f"`{name}` of a ViewRequirement must be {rule}, but got {value!r}.")
