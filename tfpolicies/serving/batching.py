"""Requests that wait together run together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np

Arrays = Mapping[str, np.ndarray]

_AT_ONCE = 0.001  # seconds of a batch for which another thread is not worth the way there


class _Job(NamedTuple):
    feed: Arrays
    kind: tuple[Any, ...]
    rows: int
    answer: asyncio.Future[dict[str, np.ndarray]]


class Batcher:
    """Runs a function of arrays `[B, ...]` for many callers at once.

    Nobody waits for others to come: what is there when the function is free runs together, so
    batches are as large as the load makes them. Short ones run in the event loop; others in a
    thread, so that the loop goes on meanwhile.

    Args:
        infer: gives outputs `[B, ...]` by name for inputs `[B, ...]` by name.
        executor: has the threads.
        row_seconds: what a row takes at most.
        max_rows: how many rows may run together; one caller may have more.
        note: is told the rows of each batch.
    """

    def __init__(
        self,
        infer: Callable[[Arrays], dict[str, np.ndarray]],
        executor: Executor,
        row_seconds: float,
        max_rows: int,
        note: Callable[[int], object] = lambda rows: None,
    ) -> None:
        self._infer, self._executor, self._row_seconds = infer, executor, row_seconds
        self._max_rows, self._note = max_rows, note
        self._waiting: deque[_Job] = deque()
        self._task: asyncio.Task[None] | None = None

    def run(self, feed: Arrays) -> asyncio.Future[dict[str, np.ndarray]]:
        """Returns a future of the outputs for these inputs."""
        loop = asyncio.get_running_loop()
        kind = tuple((name, x.shape[1:]) for name, x in feed.items())
        job = _Job(feed, kind, len(next(iter(feed.values()))), loop.create_future())
        self._waiting.append(job)
        if self._task is None:
            self._task = loop.create_task(self._work())
        return job.answer

    async def _work(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)  # those that arrived in the same moment come along
                await self._run(self._next())
        finally:
            self._task = None

    def _next(self) -> list[_Job]:
        """Takes the first jobs that have arrays of one kind."""
        jobs = [self._waiting.popleft()]
        rows = jobs[0].rows
        while self._waiting and self._waiting[0].kind == jobs[0].kind:
            rows += self._waiting[0].rows
            if rows > self._max_rows:
                break
            jobs.append(self._waiting.popleft())
        return jobs

    async def _run(self, jobs: list[_Job]) -> None:
        feed = jobs[0].feed
        if len(jobs) > 1:
            feed = {name: np.concatenate([job.feed[name] for job in jobs]) for name in feed}
        rows = sum(job.rows for job in jobs)
        self._note(rows)
        try:
            if rows * self._row_seconds <= _AT_ONCE:
                outputs = self._infer(feed)
            else:
                loop = asyncio.get_running_loop()
                outputs = await loop.run_in_executor(self._executor, self._infer, feed)
        except Exception as error:
            if len(jobs) > 1:  # the fault of one is not that of the others
                for job in jobs:
                    await self._run([job])
            elif not jobs[0].answer.done():
                jobs[0].answer.set_exception(error)
            return
        start = 0
        for job in jobs:
            if not job.answer.done():  # a caller may have gone
                stop = start + job.rows
                job.answer.set_result({name: x[start:stop] for name, x in outputs.items()})
            start += job.rows
