"""The sequences of steps that clients play, with their state."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from tfpolicies.errors import RequestError
from tfpolicies.serving.batching import Arrays
from tfpolicies.serving.infer_requests import InferRequest, InferResponse, InferVariant
from tfpolicies.serving.model_runner import ModelRunner
from tfpolicies.serving.request_texts import quote
from tfpolicies.serving.sequence_state import SLOTS
from tfpolicies.serving.tensor_checks import require_outputs

SequenceName = int | str


class ServedSequence:
    """One episode of a client, or several that step together.

    Attributes:
        name: the client's id for it.
        rows: the number of observations in each step.
        runner: the version that executes all of its steps, even if there are newer ones.
        last_used: when, in seconds.
        is_over: whether it has ended.
        step_lock: a lock to hold during a step; it is granted in the order of arrival.
    """

    def __init__(self, name: SequenceName, runner: ModelRunner, rows: int, now: float) -> None:
        self.name, self.rows, self.runner, self.last_used = name, rows, runner, now
        self.is_over = False
        self.step_lock = asyncio.Lock()
        self._slots = runner.states.allocate(rows)
        self._is_stepping = False

    async def step(self, feed: Arrays, request: InferRequest) -> Arrays:
        """Executes a step and returns its outputs; the caller must hold `step_lock`.

        A step that has begun runs to its end, even if its caller is cancelled.

        Args:
            feed: the result of `ModelVersion.make_step_feed`.
            request: the request.
        """
        self._is_stepping = True
        try:
            return await self.runner.step(
                {**feed, SLOTS: self._slots}, InferVariant.for_request(request)
            )
        finally:
            self._is_stepping = False
            if self.is_over:
                self.runner.states.release(self._slots)

    def end(self) -> None:
        """Ends it; a running step is the last one."""
        if not self.is_over:
            self.is_over = True
            if not self._is_stepping:
                self.runner.states.release(self._slots)


class SequenceStore:
    """The sequences of one model, limited in rows and idle time.

    Args:
        max_rows: how many rows all of them may have.
        idle_seconds: seconds without a step after which a sequence is dropped.
        clock: returns the time in seconds.
    """

    def __init__(
        self, max_rows: int, idle_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_rows, self._idle_seconds, self._clock = max_rows, idle_seconds, clock
        self._sequences: OrderedDict[SequenceName, ServedSequence] = (
            OrderedDict()
        )  # the least recently used first
        self._num_rows = 0  # of all sequences

    def __len__(self) -> int:
        return len(self._sequences)

    async def step(
        self, name: SequenceName, request: InferRequest, newest: ModelRunner
    ) -> InferResponse:
        """Executes one step of a sequence; steps of one sequence run in the order of arrival.

        Args:
            name: of the sequence.
            request: the request.
            newest: the version for a new sequence.
        """
        self.drop_idle()
        existing = None if request.options.starts_sequence else self._sequences.get(name)
        if existing is None and not request.options.starts_sequence:
            raise self._make_unknown_error(name)
        version = (existing.runner if existing else newest).version
        if request.version not in ("", version.name):
            raise RequestError(
                f"The sequence {quote(name)} uses the version {version.name!r}, got a "
                f"request for {quote(request.version)}. Leave the version out.",
                404,
            )
        require_outputs(version.step_outputs, request.outputs)
        feed = version.make_step_feed(request.inputs, request.options)
        rows = len(next(iter(feed.values())))
        sequence = existing or self._begin(name, newest, rows)
        if rows != sequence.rows:
            raise RequestError(
                f"Each step of the sequence {quote(name)} has {sequence.rows} rows, as its first "
                f"one had, got {rows}."
            )
        async with sequence.step_lock:
            if sequence.is_over:
                raise self._make_unknown_error(name)
            try:
                outputs = await sequence.step(feed, request)
            except asyncio.CancelledError:  # its caller has disconnected, but it was executed
                self._complete_step(sequence, request)
                raise
            self._complete_step(sequence, request)
        return InferResponse.from_outputs(request, version.name, outputs)

    def _complete_step(self, sequence: ServedSequence, request: InferRequest) -> None:
        self._touch(sequence)
        if request.options.ends_sequence:
            self._end(sequence)

    def drop_idle(self) -> None:
        """Drops the sequences that had no step for too long."""
        cutoff = self._clock() - self._idle_seconds
        while self._sequences:
            oldest = next(iter(self._sequences.values()))
            if oldest.last_used > cutoff:
                return
            if oldest.step_lock.locked():
                self._touch(oldest)
            else:
                self._end(oldest)

    def _begin(self, name: SequenceName, runner: ModelRunner, rows: int) -> ServedSequence:
        previous = self._sequences.get(name)
        other_rows = self._num_rows - (previous.rows if previous else 0)
        if other_rows + rows > self._max_rows:
            raise RequestError(
                f"The server keeps at most {self._max_rows} rows of sequences of this model "
                f"(--max-sequences); {other_rows} are active, and {rows} would be added. End some "
                "with sequence_end, or try again later.",
                429,
            )
        if previous is not None:
            self._end(previous)
        sequence = self._sequences[name] = ServedSequence(name, runner, rows, self._clock())
        self._num_rows += rows
        return sequence

    def _make_unknown_error(self, name: SequenceName) -> RequestError:
        return RequestError(
            f"There is no sequence {quote(name)}: it was not started with sequence_start, has "
            f"ended, or had no step for {self._idle_seconds:g} s. Start it with sequence_start."
        )

    def _touch(self, sequence: ServedSequence) -> None:
        if self._sequences.get(sequence.name) is sequence:
            self._sequences.move_to_end(sequence.name)
            sequence.last_used = self._clock()

    def _end(self, sequence: ServedSequence) -> None:
        sequence.end()
        if self._sequences.get(sequence.name) is sequence:
            del self._sequences[sequence.name]
            self._num_rows -= sequence.rows
