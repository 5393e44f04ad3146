"""The methods by which old parallel iterators drew from a worker."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from tfpolicies.errors import UsageError


class ParallelIteration:
    """Adds the methods to a class that has `sample()`."""

    _items: Iterator[Any] | None = None
    _slices: dict[tuple[int, int], Iterator[Any]]

    def sample(self) -> Any:
        """Returns a batch."""
        raise NotImplementedError

    def par_iter_init(self, transform: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        """Begins an endless iterator over `sample()`.

        Args:
            transform: takes that iterator and returns the one to draw from.
        """
        endless = (self.sample() for _ in itertools.count())
        self._items = transform(endless)
        self._slices = {}

    def par_iter_next(self) -> Any:
        """Returns the next item.

        Raises:
            StopIteration: if the transformed iterator is at its end.
            UsageError: before `par_iter_init`; also an AssertionError.
        """
        return next(self._begun())

    def par_iter_next_batch(self, batch_ms: int) -> list[Any]:
        """Returns the items that came in `batch_ms` milliseconds, at least one.

        Raises:
            StopIteration: if there is none left.
            UsageError: before `par_iter_init`; also an AssertionError.
        """
        end = time.perf_counter() + batch_ms / 1e3
        found = [self.par_iter_next()]
        while time.perf_counter() < end:
            try:
                found.append(self.par_iter_next())
            except StopIteration:
                break
        return found

    def par_iter_slice(self, step: int, start: int) -> Any:
        """Returns the next of every `step`-th item, counted from `start`.

        Raises:
            StopIteration: if there is none left.
            UsageError: before `par_iter_init`; also an AssertionError.
        """
        return next(self._slice(step, start))

    def par_iter_slice_batch(self, step: int, start: int, batch_ms: int) -> list[Any]:
        """Returns those of `par_iter_slice` that came in `batch_ms` milliseconds, at least one.

        Raises:
            StopIteration: if there is none left.
            UsageError: before `par_iter_init`; also an AssertionError.
        """
        items = self._slice(step, start)
        end = time.perf_counter() + batch_ms / 1e3
        found = [next(items)]
        while time.perf_counter() < end:
            more = next(items, _END)
            if more is _END:
                break
            found.append(more)
        return found

    def _begun(self) -> Iterator[Any]:
        if self._items is None:
            raise UsageError("Call `par_iter_init(transform)` before drawing items.")
        return self._items

    def _slice(self, step: int, start: int) -> Iterator[Any]:
        """Returns the iterator of one slice; all slices share the items that were drawn."""
        key = (step, start)
        if key not in self._begun_slices():
            self._items, own = itertools.tee(self._begun())
            self._slices[key] = itertools.islice(own, start, None, step)
        return self._slices[key]

    def _begun_slices(self) -> dict[tuple[int, int], Iterator[Any]]:
        self._begun()
        return self._slices


_END = object()
