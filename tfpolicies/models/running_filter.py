"""Base of all filters: statistics that are frozen while acting and merged without double counting.

A filter acts with *frozen* scalings. Observations in the meantime are *pending*, and are merged
into the statistics by `flush`: acting, learning and every export of one iteration use the same
scalings. With N workers and one central filter, an iteration is::

    changes = [worker.snapshot(flush=True) for worker in workers]
    for change in changes:
        central.apply_changes(change)
    for worker in workers:
        worker.sync(central)

Each observation is counted once: a snapshot with `flush=True` contains the pending ones, and the
original moves them into its statistics, which `sync` then replaces.
"""

from __future__ import annotations

import abc
import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from tfpolicies.base.extensions import Extensible
from tfpolicies.base.type_aliases import Setting
from tfpolicies.base.validators import one_of
from tfpolicies.errors import ObservationError, WeightsError
from tfpolicies.models.running_stat import RunningStat

CLIP = 10.0  # normalised values are clipped to +-CLIP

FILTER_NAMES = ("NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter")
"""Values of `observation_filter`; the last two are equal: workers' statistics are merged."""

FILTER_RULE = one_of(*FILTER_NAMES)

RETURN_FILTER = "ReturnStdFilter"

REWARD_FILTER_RULE = one_of(*FILTER_NAMES, RETURN_FILTER)
"""The rule for `reward_filter`."""

_FIELDS = ("count", "mean", "m2")
_Filter = TypeVar("_Filter", bound="RunningFilter")


class Scaling(NamedTuple):
    """The frozen mean and scale of one leaf; both float32 `[*shape]`, read-only."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def from_arrays(cls, mean: ArrayLike, scale: ArrayLike) -> Scaling:
        """Returns read-only float32 copies of two arrays of one shape."""
        arrays = [np.array(array, np.float32) for array in (mean, scale)]
        for array in arrays:
            array.flags.writeable = False
        return cls(*arrays)


class RunningFilter(Extensible, abc.ABC):
    """Frozen and pending statistics of several quantities: the base class of filters.

    Filters are thread-safe. Copies, also pickled ones, are independent.

    Args:
        shapes: the shape of one element of each quantity.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._lock = threading.Lock()
        self._frozen = [RunningStat(shape) for shape in shapes]
        self._pending = [RunningStat(shape) for shape in shapes]
        self._update_scalings()

    @property
    def statistics(self) -> tuple[RunningStat, ...]:
        """Copies of the frozen statistics, one per quantity."""
        with self._lock:
            return tuple(stat.copy() for stat in self._frozen)

    @property
    def pending_count(self) -> int:
        """The number of elements that the next `flush` merges."""
        return int(self._pending[0].count) if self._pending else 0

    @property
    def is_empty(self) -> bool:
        """Whether no element was observed yet, nor is one pending."""
        return not any(stat.count for stat in (*self._frozen, *self._pending))

    def flush(self) -> None:
        """Moves the pending elements into the statistics."""
        with self._lock:
            self._flush()

    def snapshot(self: _Filter, *, flush: bool = False) -> _Filter:
        """Returns an independent copy, pending elements included.

        Args:
            flush: whether the original flushes afterwards, so that the next snapshot holds none of
                the elements that this one has pending. `apply_changes` needs such snapshots.
        """
        with self._lock:
            new = copy.deepcopy(self)
            if flush:
                self._flush()
        return new

    def forget_pending(self) -> None:
        """Discards the pending elements, because another filter counts them."""
        with self._lock:
            self._pending = [RunningStat(stat.shape) for stat in self._frozen]

    def apply_changes(self, other: RunningFilter) -> None:
        """Adds the *pending* elements of `other` to the statistics; does not change `other`.

        Raises:
            WeightsError: if `other` has other quantities.
        """
        self._check_same_quantities(other)
        with other._lock:
            changes = [stat.copy() for stat in other._pending]
        with self._lock:
            for stat, change in zip(self._frozen, changes, strict=True):
                stat.merge(change)
            self._update_scalings()

    def sync(self, other: RunningFilter) -> None:
        """Copies the statistics of `other`; its own pending elements stay pending.

        Raises:
            WeightsError: if `other` has other quantities.
        """
        self._check_same_quantities(other)
        frozen = list(other.statistics)
        with self._lock:
            self._frozen = frozen
            self._update_scalings()

    def get_state(self) -> dict[str, np.ndarray]:
        """Returns statistics and pending elements as new float64 arrays.

        The keys are `frozen/<i>/count`, `/mean`, `/m2` and `pending/<i>/...` for quantity i.
        """
        with self._lock:
            return {
                f"{kind}/{i}/{field}": np.array(getattr(stat, field), np.float64)
                for kind, stats in (("frozen", self._frozen), ("pending", self._pending))
                for i, stat in enumerate(stats)
                for field in _FIELDS
            }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `get_state`.

        Raises:
            WeightsError: if keys, shapes or numbers do not fit; then nothing has changed.
        """
        expected = self.get_state()
        if not isinstance(state, Mapping) or set(state) != set(expected):
            keys = sorted(state) if isinstance(state, Mapping) else type(state).__name__
            _raise_invalid_state(f"the keys {sorted(expected)}", keys)
        shapes = [stat.shape for stat in self._frozen]
        frozen, pending = (
            [_restore_stat(state, f"{kind}/{i}", shape) for i, shape in enumerate(shapes)]
            for kind in ("frozen", "pending")
        )
        with self._lock:
            self._frozen, self._pending = frozen, pending
            self._update_scalings()

    def _flush(self) -> None:
        for stat, change in zip(self._frozen, self._pending, strict=True):
            stat.merge(change)
        self._pending = [RunningStat(stat.shape) for stat in self._frozen]
        self._update_scalings()

    def _observe(self, batches: Sequence[Any]) -> None:
        """Adds one batch per quantity to the pending elements, or none if one is invalid."""
        changes = [RunningStat(stat.shape) for stat in self._pending]
        for i, (change, batch) in enumerate(zip(changes, batches, strict=True)):
            try:
                change.push_batch(batch)
            except ObservationError as error:
                raise ObservationError(f"{self._get_label(i)}: {error}") from error
        with self._lock:
            for stat, change in zip(self._pending, changes, strict=True):
                stat.merge(change)

    def _check_same_quantities(self, other: RunningFilter) -> None:
        shapes = [stat.shape for stat in self._frozen]
        other_shapes = [stat.shape for stat in getattr(other, "_frozen", ())]
        if type(other) is not type(self) or shapes != other_shapes:
            raise WeightsError(
                "Filters can only be merged if their classes and shapes are equal, but "
                f"{type(other)} of shapes {other_shapes} was passed to {type(self)} of shapes "
                f"{shapes}. Build both for one observation space and one `observation_filter`."
            )

    def _update_scalings(self) -> None:
        self._scalings = tuple(self._compute_scaling(stat) for stat in self._frozen)

    @abc.abstractmethod
    def _compute_scaling(self, stat: RunningStat) -> Scaling:
        """Returns the scaling to act with, given the frozen statistics of one quantity."""

    @abc.abstractmethod
    def _get_label(self, index: int) -> str:
        """Returns the name of a quantity, for messages."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


def _restore_stat(state: Mapping[str, Any], prefix: str, shape: tuple[int, ...]) -> RunningStat:
    stat = RunningStat(shape)
    for field, expected_shape in zip(_FIELDS, ((), shape, shape), strict=True):
        array = np.asarray(state[f"{prefix}/{field}"])
        if (
            array.shape != expected_shape
            or array.dtype.kind not in "fiu"
            or not np.isfinite(array).all()
        ):
            _raise_invalid_state(f"finite numbers {expected_shape} as {prefix}/{field}", array)
        if field != "mean" and (array < 0).any():
            _raise_invalid_state(f"numbers from 0 as {prefix}/{field}", array)
        value = array.astype(np.float64)
        setattr(stat, field, float(value) if field == "count" else value)
    return stat


def _raise_invalid_state(rule: str, value: Setting) -> NoReturn:
    raise WeightsError(
        f"The state of a filter must have {rule}, but got {value!r}. Restore a state that "
        "`get_state` of a filter for the same space returned."
    )
