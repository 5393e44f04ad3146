"""RLlib's schedules: objects whose values change with time steps.

Settings accept lists or functions instead.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.errors import UsageError

Interpolation = Callable[[Any, Any, Any], Any]


class Schedule(abc.ABC):
    """A function of the time step, for `lr`, `epsilon_schedule` and other settings that accept one.

    A subclass overrides `_value(t)`, with operators that work for numbers and tensors.

    Args:
        framework: with `"tf"` and `"tf2"` all values are tensors; otherwise only those of tensors.
    """

    def __init__(self, framework: str | None = None) -> None:
        self.framework = framework

    @abc.abstractmethod
    def _value(self, t: Any) -> Any:
        """Returns the value at a time step, a number or a float32 tensor."""

    def value(self, t: Any) -> Any:
        """Returns the value at a time step: a float, or a float32 tensor of the shape of `t`."""
        if self.framework in ("tf", "tf2") or tf.is_tensor(t):
            t = tf.cast(t, tf.float32)
            return tf.broadcast_to(tf.cast(self._value(t), tf.float32), tf.shape(t))
        return float(self._value(t))

    def __call__(self, t: Any) -> Any:
        """Returns `value(t)`."""
        return self.value(t)


class ConstantSchedule(Schedule):
    """One value for all time steps.

    Args:
        value: the value.
        framework: see `Schedule`.
    """

    def __init__(self, value: float, framework: str | None = None) -> None:
        super().__init__(framework)
        self._constant = value

    def _value(self, t: Any) -> Any:
        return self._constant


def _interpolate_linearly(start: Any, end: Any, alpha: Any) -> Any:
    return start + alpha * (end - start)


class PiecewiseSchedule(Schedule):
    """Interpolates values between points, linearly by default.

    Args:
        endpoints: `[(timestep, value), ...]`, with time steps that do not decrease.
        framework: see `Schedule`.
        interpolation: `f(left, right, alpha)`, the value at the fraction `alpha`, in [0, 1),
            between two points.
        outside_value: the value before the first point, and from the last one on.

    Raises:
        UsageError: for other endpoints; and for time steps outside, if there is no value for them.
            Tensors cannot be compared while tracing, so they always need one.

    >>> PiecewiseSchedule([(0, 20.0), (500, 30.0)])(400)
    28.0
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[int, float]],
        framework: str | None = None,
        interpolation: Interpolation = _interpolate_linearly,
        outside_value: float | None = None,
    ) -> None:
        super().__init__(framework)
        self.endpoints = _parse_endpoints(endpoints)
        self.interpolation = interpolation
        self.outside_value = outside_value

    def _value(self, t: Any) -> Any:
        (first_step, _), (last_step, _) = self.endpoints[0], self.endpoints[-1]
        if self.outside_value is None and (tf.is_tensor(t) or not first_step <= t < last_step):
            raise UsageError(
                f"The endpoints define values from {first_step} to {last_step} (exclusive), but "
                f"the time step is {t!r:.100}. Give an `outside_value`."
            )
        where, result = (tf if tf.is_tensor(t) else np).where, self.outside_value or 0.0
        for (start, left), (stop, right) in pairwise(self.endpoints):
            alpha = (t - start) / max(stop - start, 1)
            result = where(
                (start <= t) & (t < stop), self.interpolation(left, right, alpha), result
            )
        return result


class PolynomialSchedule(Schedule):
    """`final_p + (initial_p - final_p) * (1 - t / schedule_timesteps)^power`, then `final_p`.

    Args:
        schedule_timesteps: the time step at which `final_p` is reached.
        final_p: the last value.
        framework: see `Schedule`.
        initial_p: the first value.
        power: the exponent.

    Raises:
        UsageError: if `schedule_timesteps` is not positive.
    """

    def __init__(
        self,
        schedule_timesteps: int,
        final_p: float,
        framework: str | None = None,
        initial_p: float = 1.0,
        power: float = 2.0,
    ) -> None:
        super().__init__(framework)
        self.schedule_timesteps = _require_positive(schedule_timesteps)
        self.final_p, self.initial_p, self.power = final_p, initial_p, power

    def _value(self, t: Any) -> Any:
        minimum = (tf if tf.is_tensor(t) else np).minimum
        remaining = 1.0 - minimum(t, self.schedule_timesteps) / self.schedule_timesteps
        return self.final_p + (self.initial_p - self.final_p) * remaining**self.power


class LinearSchedule(PolynomialSchedule):
    """Interpolates linearly from `initial_p` to `final_p`: a `PolynomialSchedule` of power 1.

    Args:
        settings: see `PolynomialSchedule`.

    >>> LinearSchedule(schedule_timesteps=100, initial_p=2.0, final_p=1.0)(25)
    1.75
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(power=1.0, **settings)


class ExponentialSchedule(Schedule):
    """`initial_p * decay_rate^(t / schedule_timesteps)`, without an end.

    Args:
        schedule_timesteps: the time step at which the value is `initial_p * decay_rate`.
        framework: see `Schedule`.
        initial_p: the first value.
        decay_rate: the factor.

    Raises:
        UsageError: if `schedule_timesteps` is not positive.
    """

    def __init__(
        self,
        schedule_timesteps: int,
        framework: str | None = None,
        initial_p: float = 1.0,
        decay_rate: float = 0.1,
    ) -> None:
        super().__init__(framework)
        self.schedule_timesteps = _require_positive(schedule_timesteps)
        self.initial_p, self.decay_rate = initial_p, decay_rate

    def _value(self, t: Any) -> Any:
        return self.initial_p * self.decay_rate ** (t / self.schedule_timesteps)


def _require_positive(schedule_timesteps: int) -> int:
    if not schedule_timesteps > 0:
        raise UsageError(
            f"`schedule_timesteps` must be more than 0, got {schedule_timesteps!r}. For one value "
            "at all time steps use a ConstantSchedule."
        )
    return schedule_timesteps


def _parse_endpoints(endpoints: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    try:
        points = [(int(timestep), float(value)) for timestep, value in endpoints]
    except (TypeError, ValueError):
        points = []
    if not points or points != sorted(points, key=itemgetter(0)):
        raise UsageError(
            "`endpoints` must be [(timestep, value), ...] with time steps that do not decrease, "
            f"got {endpoints!r:.200}. Sort them."
        )
    return points
