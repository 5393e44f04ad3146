"""Combines waiting requests into batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.serving.time_limits import ModelTimeoutError

Arrays = Mapping[str, np.ndarray]
TimeLimitFactory = Callable[[float], AbstractContextManager[Any]]

_EVENT_LOOP_SECONDS = 0.001  # seconds of a batch up to which it runs in the event loop
_MAX_EVENT_LOOP_SECONDS = 0.25  # time limit there; if exceeded, all later batches use a thread
# Turns of the event loop without a further request, after which a batch starts
_QUIET_LOOP_TURNS = 10
_MAX_WAIT_SECONDS = 0.001  # seconds after which a batch starts in any case
_TRIAL_ROWS = 16  # rows of the trial batch that measures the cost per row


class BatchCost(NamedTuple):
    """CPU time of a batch, in seconds.

    Attributes:
        call: fixed cost per batch.
        row: cost per row.
    """

    call: float
    row: float

    @classmethod
    def measure(cls, run: Callable[[int], float]) -> BatchCost:
        """Measures the cost by running small batches.

        Args:
            run: runs the given number of rows and returns the seconds.
        """
        run(2)  # warm-up
        single_row = min(run(1) for _ in range(3))
        if single_row > _EVENT_LOOP_SECONDS:
            return cls(0.0, single_row)
        row = max(0.0, min(run(_TRIAL_ROWS) for _ in range(3)) - single_row) / (_TRIAL_ROWS - 1)
        return cls(max(0.0, single_row - row), row)

    def estimate_seconds(self, rows: int) -> float:
        return self.call + rows * self.row


UNBOUNDED_COST = BatchCost(call=float("inf"), row=0.0)
"""The cost of batches of unknown length, such as whole sequences."""


class _Uncancellable(asyncio.Future[Arrays]):
    """A future that cannot be cancelled; its awaiting task is cancelled once it is done."""

    def cancel(self, msg: object = None) -> bool:
        return False


class _Job(NamedTuple):
    feed: Arrays
    row_shapes: tuple[Any, ...]
    rows: int
    future: asyncio.Future[Arrays]


class Batcher:
    """Runs a function of arrays `[B, ...]` for many callers at once.

    When the function is free, all waiting requests run as one batch, together with those that
    arrive while the event loop turns a few times (about 30 us). So batch sizes follow the load.
    Short batches run in the event loop, others in a thread, so that the loop is not blocked.

    Args:
        infer: returns outputs `[B, ...]` by name for inputs `[B, ...]` by name.
        executor: provides the threads.
        cost: of a batch.
        max_rows: the most rows of a batch; a single request may have more.
        on_batch: called with the number of rows of each batch.
        cancellable: whether requests of disconnected callers are skipped.
        limit: returns a context that raises `ModelTimeoutError` after the given seconds.
        seconds: time limit of a batch.
    """

    def __init__(
        self,
        infer: Callable[[Arrays], dict[str, np.ndarray]],
        executor: Executor,
        cost: BatchCost,
        max_rows: int,
        on_batch: Callable[[int], object] = lambda rows: None,
        *,
        cancellable: bool = True,
        limit: TimeLimitFactory = nullcontext,
        seconds: float = 60.0,
    ) -> None:
        self._limit, self._seconds = limit, seconds
        self._future_class = asyncio.Future[Arrays] if cancellable else _Uncancellable
        self._infer, self._executor, self._cost = infer, executor, cost
        self._max_rows, self._on_batch = max_rows, on_batch
        self._waiting: deque[_Job] = deque()
        self._is_busy = False

    def run(self, feed: Arrays) -> asyncio.Future[Arrays]:
        """Returns a future of the outputs for these inputs."""
        future = self._future_class()
        row_shapes = tuple([x.shape[1:] for x in feed.values()])
        self._waiting.append(_Job(feed, row_shapes, len(next(iter(feed.values()))), future))
        if not self._is_busy:
            self._is_busy = True
            self._gather(0, 0, time.perf_counter() + _MAX_WAIT_SECONDS)
        return future

    def _gather(self, num_waiting: int, turns: int, deadline: float) -> None:
        """Starts a batch once no further request has arrived for some turns of the loop."""
        turns = turns + 1 if len(self._waiting) == num_waiting else 0
        if turns < _QUIET_LOOP_TURNS and time.perf_counter() < deadline:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._gather, len(self._waiting), turns, deadline)
        else:
            self._start_batch()

    def _start_batch(self) -> None:
        jobs = self._take_jobs()
        if not jobs:
            self._is_busy = False
            return
        rows = sum([job.rows for job in jobs])
        self._on_batch(rows)
        if self._cost.estimate_seconds(rows) <= _EVENT_LOOP_SECONDS:
            outputs = self._run_jobs(jobs, _MAX_EVENT_LOOP_SECONDS)
            if not isinstance(outputs, ModelTimeoutError):
                self._distribute(jobs, outputs)
                return
            self._cost = UNBOUNDED_COST
        loop = asyncio.get_running_loop()
        try:
            running = loop.run_in_executor(self._executor, self._run_jobs, jobs, self._seconds)
        except RuntimeError as error:  # the server is stopping
            self._distribute(jobs, error)
        else:
            running.add_done_callback(lambda done: self._distribute(jobs, done.result()))

    def _run_jobs(self, jobs: list[_Job], seconds: float) -> Arrays | Exception:
        feed = jobs[0].feed
        try:
            if len(jobs) > 1:
                feed = {name: np.concatenate([job.feed[name] for job in jobs]) for name in feed}
            with self._limit(seconds):
                return self._infer(feed)
        except Exception as error:
            return error

    def _take_jobs(self) -> list[_Job]:
        """Takes the first jobs with equal row shapes whose callers still wait."""
        jobs: list[_Job] = []
        rows = 0
        while self._waiting:
            job = self._waiting[0]
            if not job.future.done():
                rows += job.rows
                if jobs and (job.row_shapes != jobs[0].row_shapes or rows > self._max_rows):
                    break
                jobs.append(job)
            self._waiting.popleft()
        return jobs

    def _distribute(self, jobs: list[_Job], outputs: Arrays | Exception) -> None:
        """Delivers the outputs to the callers, after scheduling the next batch."""
        if isinstance(outputs, Exception) and len(jobs) > 1:  # retries each request separately
            single_jobs = [job._replace(row_shapes=(number,)) for number, job in enumerate(jobs)]
            self._waiting.extendleft(reversed(single_jobs))
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            asyncio.get_running_loop().call_soon(self._start_batch)
        start = 0
        for job in jobs:
            if job.future.done():  # its caller has disconnected
                pass
            elif not isinstance(outputs, Exception):
                rows = slice(start, start + job.rows)
                job.future.set_result({name: x[rows] for name, x in outputs.items()})
            elif len(jobs) == 1:
                job.future.set_exception(outputs)
            start += job.rows
