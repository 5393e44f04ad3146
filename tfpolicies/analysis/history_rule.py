"""The base of the rules for whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfpolicies.algorithms.health_rules import Finding
from tfpolicies.analysis.run_history import RunHistory

MIN_ROWS = 10
"""Iterations that a trend needs."""

_END_SHARE = 0.1  # share of the iterations that are the end of a run


class Located(NamedTuple):
    """A finding about a policy; "" for the whole run."""

    finding: Finding
    policy_id: str = ""


@dataclass(frozen=True, kw_only=True)
class HistoryRule:
    """A rule for a whole run.

    Attributes:
        name: names the cause, in output for machines.
        title: names the cause in a few words.
        find: yields findings.
        is_symptom: whether causes of higher rank explain it.
        needs_stuck: whether it applies only to runs that do not learn, or forget.
    """

    name: str
    title: str
    find: Callable[[RunHistory], Iterator[Located]]
    is_symptom: bool = False
    needs_stuck: bool = True


def get_end(values: np.ndarray) -> np.ndarray:
    """Returns the last tenth of some values, at least one."""
    return values[-max(1, int(_END_SHARE * len(values))) :]


def mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def get_extremes(values: np.ndarray) -> tuple[float, float]:
    """Returns the smallest and the largest finite value; NaN without one."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (math.nan, math.nan)


def divide(dividend: float, divisor: float) -> float:
    """Returns a quotient; NaN for a division by 0."""
    return dividend / divisor if divisor else math.nan
