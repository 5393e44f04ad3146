"""Counts of function traces, with an optional limit."""

from __future__ import annotations

from collections import Counter

import tensorflow as tf

from tfpolicies.errors import RetraceError


class TraceCounts(Counter[str]):
    """The number of runs of each function body, by the name of the function.

    Args:
        limit: the number of times that a function may be retraced; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self._limit = limit
        self._last_inputs: dict[str, list[str]] = {}

    def record(self, name: str, *inputs: object) -> None:
        """Counts one run of a function's body; raises a `RetraceError` beyond the limit."""
        self[name] += 1
        if self._limit is None:
            return
        descriptions = [_describe_input(x) for x in tf.nest.flatten(inputs)]
        before, self._last_inputs[name] = self._last_inputs.get(name, descriptions), descriptions
        if self[name] - 1 > self._limit:
            raise RetraceError(
                f"The function {name!r} was traced {self[name]} times; "
                f"eager_max_retraces={self._limit} allows {self._limit + 1}. "
                f"{_describe_change(before, descriptions)} Each trace costs as much as thousands "
                "of calls: find the cause of the traces, or raise the limit; None disables it."
            )


def _describe_input(value: tf.Tensor) -> str:
    if not hasattr(value, "dtype"):
        return repr(value)
    return f"{tf.as_dtype(value.dtype).name}{list(value.shape)}"


def _describe_change(before: list[str], after: list[str]) -> str:
    if len(before) != len(after):
        return f"It got {len(after)} inputs, and {len(before)} the last time."
    changed = [
        f"input {i} was {old} and is {new}"
        for i, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    ]
    if changed:
        return f"Since the last time, {'; '.join(changed)}."
    return "Its inputs are as the last time, so a runtime has created it again."
