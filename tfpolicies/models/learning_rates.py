"""Learning-rate schedules: functions of time steps, and Keras schedules of gradient updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import keras

from tfpolicies.base.validators import is_one_of
from tfpolicies.errors import ConfigError, suggest_similar_names
from tfpolicies.models.eager_mode import ensure_eager

SCHEDULES = (
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
)
"""Keras's schedules: the only ones that a file may name."""

_PLAIN_TYPES = (type(None), bool, int, float, str)


class LearningRate(NamedTuple):
    """A learning rate that changes."""

    value: Callable[[int], float]
    counts_updates: bool  # whether it is a function of gradient updates, not of time steps


def resolve_schedule(lr: float | Callable[[int], float] | Mapping[str, Any]) -> LearningRate | None:
    """Returns the schedule that a setting `lr` describes; None for a number.

    Args:
        lr: a number; a function of the time step; a `keras.optimizers.schedules` object, which is
            a function of the number of gradient updates; or such a schedule as a dict, as in
            checkpoints: `{"type": "CosineDecay", "initial_learning_rate": ..., ...}`.

    >>> rate = resolve_schedule({"type": "InverseTimeDecay", "initial_learning_rate": 0.5,
    ...                       "decay_steps": 1, "decay_rate": 1.0})
    >>> rate.value(1), rate.counts_updates, resolve_schedule(1e-3)
    (0.25, True, None)
    """
    if isinstance(lr, int | float):
        return None
    schedule = _make_schedule(lr) if isinstance(lr, Mapping) else lr
    counts_updates = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)

    @ensure_eager()
    def evaluate(count: int) -> float:
        value = schedule(count)
        try:
            rate = float(value)
        except (TypeError, ValueError):
            rate = math.nan
        if not 0 <= rate < math.inf:
            raise ConfigError(
                f"lr must be a finite number, 0 or more, but {lr!r:.200} returned {value!r:.200} "
                f"for {count}."
            )
        return rate

    return LearningRate(evaluate, counts_updates)


def _make_schedule(config: Mapping[str, Any]) -> Any:
    settings = dict(config)
    name = settings.pop("type", None)
    if not is_one_of(name, *SCHEDULES):
        raise ConfigError(
            f"lr={dict(config)!r:.200} does not describe a Keras schedule."
            f"{suggest_similar_names(str(name), SCHEDULES)} Its type must be one of "
            f"{', '.join(SCHEDULES)}."
        )
    lists = [x if isinstance(x, list | tuple) else [x] for x in settings.values()]
    if not all(isinstance(x, _PLAIN_TYPES) for x in chain(*lists)):
        raise ConfigError(f"lr={dict(config)!r:.200} must hold numbers, or lists of numbers.")
    try:
        return getattr(keras.optimizers.schedules, name)(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr={dict(config)!r:.200}: {error}") from error
