"""Formats the numbers of comparisons as texts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tfpolicies.analysis.seed_statistics import ConfidenceInterval
from tfpolicies.reporting.learning_curve import format_duration

MISSING = "\N{EN DASH}"
"""The text of a number that is not there."""

_DASH, _MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


def format_value(value: float) -> str:
    """Formats a number with up to four digits.

    >>> format_value(1234.56), format_value(-0.01234), format_value(float("nan"))
    ('1,235', '−0.01234', '–')
    """
    if not math.isfinite(value):
        return MISSING
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", _MINUS)


def format_interval(interval: ConfidenceInterval) -> str:
    """Formats the limits of an interval.

    >>> format_interval(ConfidenceInterval(1.0, -0.5, 2.0))
    '−0.5 to 2'
    """
    if not math.isfinite(interval.low):
        return MISSING
    return f"{format_value(interval.low)} to {format_value(interval.high)}"


def format_range(values: Iterable[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return MISSING
    low, high = (f"{round(value):,}" for value in (min(finite), max(finite)))
    return low if low == high else f"{low}{_DASH}{high}"


def format_durations(values: Iterable[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return MISSING
    low, high = (format_duration(value) for value in (min(finite), max(finite)))
    return low if low == high else f"{low} {_DASH} {high}"


def format_probability(interval: ConfidenceInterval) -> str:
    if not math.isfinite(interval.estimate):
        return MISSING
    text = f"{interval.estimate:.2f}"
    if not math.isfinite(interval.low):
        return f"{text} (single runs)"
    return f"{text} ({interval.low:.2f}{_DASH}{interval.high:.2f})"
