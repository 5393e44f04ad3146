"""Running mean and standard deviation: one pass, stable, mergeable."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from tfpolicies.errors import ObservationError


class RunningStat:
    """Count, mean and spread of all arrays pushed so far, component by component.

    Two sets A and B are merged by the pairwise update of Chan, Golub & LeVeque 1979 (Stanford
    report STAN-CS-79-773, section 2): with d = mean_B - mean_A and n = n_A + n_B,
    mean = mean_A + d n_B / n and M2 = M2_A + M2_B + d^2 n_A n_B / n, where M2 is the sum of squared
    deviations from the mean. The M2 of a batch is the corrected two-pass sum of Chan, Golub &
    LeVeque 1983 (The American Statistician 37:3, equation 1.7). Both keep their precision if the
    mean is much larger than the spread.

    Args:
        shape: the shape of one element.

    Attributes:
        count: float64, the number of elements.
        mean: float64 `[*shape]`; zeros while there are no elements.
        m2: float64 `[*shape]`, sum of squared deviations from the mean.

    The arrays are replaced by each update, never modified.

    >>> stat = RunningStat(())
    >>> stat.push_batch([1.0, 2.0, 6.0])
    >>> float(stat.mean), float(stat.var)
    (3.0, 7.0)
    """

    __slots__ = ("count", "m2", "mean", "shape")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = tuple(shape)
        self.count = 0.0
        self.mean = np.zeros(self.shape)
        self.m2 = np.zeros(self.shape)

    @property
    def var(self) -> np.ndarray:
        """The unbiased variance, M2 / (n - 1), float64 `[*shape]`; 0 below two elements."""
        return self.m2 / max(self.count - 1.0, 1.0)

    @property
    def std(self) -> np.ndarray:
        """The square root of `var`."""
        return np.sqrt(self.var)

    def push_batch(self, batch: ArrayLike) -> None:
        """Adds the rows of `batch` `[B, *shape]`, of any real dtype."""
        rows = np.asarray(batch)
        if rows.ndim == 0 or rows.shape[1:] != self.shape:
            expected = ", ".join(("B", *map(str, self.shape)))
            raise ObservationError(
                f"A running mean needs batches of shape [{expected}], but got {rows.shape}. Give "
                "one element a batch axis: `value[None]`."
            )
        if not len(rows):
            return
        count = float(len(rows))
        with np.errstate(invalid="ignore", over="ignore"):
            deviations = rows.astype(np.float64)
            mean = deviations.mean(axis=0)
            deviations -= mean
            residual = deviations.sum(axis=0)
            m2 = np.einsum("b...,b...->...", deviations, deviations) - np.square(residual) / count
        if not np.isfinite(m2).all():
            raise ObservationError(
                "A running mean needs finite values, but the batch has NaN, infinity or numbers "
                "whose squares overflow. Clip or fix them in the environment."
            )
        self._merge_moments(count, mean + residual / count, np.maximum(m2, 0.0))

    def merge(self, other: RunningStat) -> None:
        """Adds all elements of `other`, of the same shape; does not change `other`."""
        self._merge_moments(other.count, other.mean, other.m2)

    def copy(self) -> RunningStat:
        new = RunningStat(self.shape)
        new.count, new.mean, new.m2 = self.count, self.mean, self.m2
        return new

    def _merge_moments(self, count: float, mean: np.ndarray, m2: np.ndarray) -> None:
        total = self.count + count
        if not count:
            return
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.m2 = self.m2 + m2 + np.square(delta) * (self.count * count / total)
        self.count = total
