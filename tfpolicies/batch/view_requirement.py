"""`ViewRequirement`: the rule by which a column of a model or a loss is derived."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import gymnasium
import numpy as np

from tfpolicies.base.extensions import Extensible, ExtensibleMeta
from tfpolicies.errors import BatchError, BatchUsageError, SpaceError

_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(\d+))?")


@dataclass(frozen=True)
class ViewRequirement(Extensible, metaclass=ExtensibleMeta):
    """One column that a model or a loss reads, and the collected column it comes from.

    Change one with `dataclasses.replace(requirement, used_for_training=False)`.

    Args:
        data_col: the collected column; None means the column of the same name.
        space: the space of one value; an unbounded float32 scalar if None.
        shift: the time steps to read, relative to the current one: a number, several numbers,
            or a range with both ends included, `"-3:-1"`, or with a step, `"-6:0:2"`.
        index: an absolute position in the trajectory to read instead, if given.
        batch_repeat_value: how many time steps share one value (`max_seq_len` for the states of
            a recurrent model).
        used_for_compute_actions: whether acting reads the column; the default is True for a
            model's view, and False for a view that is set on a policy.
        used_for_training: whether the loss reads the column.

    Attributes:
        shift_arr: the shifts as int64 [num_shifts].
        asks_to_act: whether `used_for_compute_actions` was passed as True.

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
    used_for_compute_actions: bool = None  # type: ignore[assignment]  # becomes True
    used_for_training: bool = True
    shift_arr: np.ndarray = field(init=False, repr=False, compare=False)
    asks_to_act: bool = field(init=False, repr=False, compare=False)

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
            _raise_invalid("data_col", "the name of a column or None", self.data_col)
        if not (self.index is None or _is_integer(self.index)):
            _raise_invalid("index", "an integer or None", self.index)
        if not _is_integer(self.batch_repeat_value) or self.batch_repeat_value < 1:
            _raise_invalid("batch_repeat_value", "an integer >= 1", self.batch_repeat_value)
        object.__setattr__(self, "asks_to_act", self.used_for_compute_actions is True)
        if self.used_for_compute_actions is None:
            object.__setattr__(self, "used_for_compute_actions", True)
        for name in ("used_for_compute_actions", "used_for_training"):
            if not isinstance(getattr(self, name), bool):
                _raise_invalid(name, "True or False", getattr(self, name))
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


def _parse_shift(shift: object) -> np.ndarray:
    if _is_integer(shift):
        return np.array([shift], dtype=np.int64)
    if isinstance(shift, tuple) and shift and all(map(_is_integer, shift)):
        return np.array(shift, dtype=np.int64)
    match = _RANGE.fullmatch(shift) if isinstance(shift, str) else None
    if match is None:
        _raise_invalid(
            "shift", 'an integer, several integers, or a range "a:b" or "a:b:step"', shift
        )
    start, stop, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if start > stop or step < 1:
        _raise_invalid("shift", "a range that ascends with a step >= 1", shift)
    return np.arange(start, stop + 1, step, dtype=np.int64)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _raise_invalid(name: str, rule: str, value: object) -> NoReturn:
    raise BatchUsageError(f"`{name}` of a ViewRequirement must be {rule}, but got {value!r}.")
