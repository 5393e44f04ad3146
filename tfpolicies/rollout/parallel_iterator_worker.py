"""The methods of a worker that RLlib's parallel iterators call."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tfpolicies.errors import UsageError
from tfpolicies.rollout.base_worker import BaseWorker


class ParallelIteratorWorker(BaseWorker):
    """Base class of workers that parallel iterators draw from."""

    _items: Iterator[Any] | None = None
    _queues: dict[int, list[deque[Any]]]  # by step: the items drawn for each start

    def par_iter_init(self, transform: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        """Starts an endless iterator over `sample()`.

        Args:
            transform: takes that iterator and returns the one to draw from.
        """
        endless = (self.sample() for _ in itertools.count())
        self._items = transform(endless)
        self._queues = {}

    def par_iter_next(self) -> Any:
        """Returns the next item.

        Raises:
            StopIteration: if the transformed iterator is at its end.
            UsageError: before `par_iter_init`; also an AssertionError.
        """
        return next(self._require_items())

    def par_iter_next_batch(self, batch_ms: int) -> list[Any]:
        """Returns the items that came in `batch_ms` milliseconds, at least one.

        Raises:
            StopIteration: if there is none left.
            UsageError: before `par_iter_init`; also an AssertionError.
        """
        return self._draw_batch(self.par_iter_next, batch_ms)

    def par_iter_slice(self, step: int, start: int) -> Any:
        """Returns the next of every `step`-th item, counted from `start`.

        Items are drawn `step` at a time; those of other starts are queued.

        Raises:
            StopIteration: if there is none left.
            UsageError: before `par_iter_init`, or unless `0 <= start < step`; also an
                AssertionError.
        """
        items = self._require_items()
        if not 0 <= start < step:
            raise UsageError(f"start must be from 0 to step - 1, got {start} of {step}.")
        queues = self._queues.setdefault(step, [deque() for _ in range(step)])
        if not queues[start]:
            for queue, item in zip(queues, items, strict=False):
                queue.append(item)
        if not queues[start]:
            raise StopIteration
        return queues[start].popleft()

    def par_iter_slice_batch(self, step: int, start: int, batch_ms: int) -> list[Any]:
        """Returns the items of `par_iter_slice` that came in `batch_ms` milliseconds, at least one.

        Raises:
            StopIteration: if there is none left.
            UsageError: before `par_iter_init`, or unless `0 <= start < step`; also an
                AssertionError.
        """
        return self._draw_batch(lambda: self.par_iter_slice(step, start), batch_ms)

    def _draw_batch(self, draw: Callable[[], Any], batch_ms: int) -> list[Any]:
        deadline = time.perf_counter() + batch_ms / 1e3
        items = [draw()]
        while time.perf_counter() < deadline:
            try:
                items.append(draw())
            except StopIteration:
                break
        return items

    def _require_items(self) -> Iterator[Any]:
        if self._items is None:
            raise UsageError("Call `par_iter_init(transform)` before drawing items.")
        return self._items
