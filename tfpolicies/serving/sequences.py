"""The sequences of steps that clients play, with their state."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from tfpolicies.errors import RequestError
from tfpolicies.serving.batching import Arrays
from tfpolicies.serving.calls import Answer, Call, Way
from tfpolicies.serving.memory import SLOTS
from tfpolicies.serving.running import Running
from tfpolicies.serving.tensors import require_outputs
from tfpolicies.serving.texts import quote

Name = int | str


class Sequence:
    """One episode of a client, or several that step together.

    Attributes:
        name: the client's id for it.
        rows: the number of observations in each step.
        runner: the version that executes all of its steps, even if there are newer ones.
        last_used: when, in seconds.
        is_over: whether it has ended.
        step_lock: a lock to hold during a step; it is granted in the order of arrival.
    """

    def __init__(self, name: Name, running: Running, rows: int, now: float) -> None:
        self.name, self.rows, self.running, self.last_used = name, rows, running, now
        self.is_over = False
        self.turn = asyncio.Lock()
        self._slots = running.memory.begin(rows)
        self._is_stepping = False

    async def step(self, feed: Arrays, call: Call) -> Arrays:
        """Executes a step and returns its outputs; the caller must hold `turn`.

        A step that has begun runs to its end, even if its caller is cancelled.

        Args:
            feed: the result of `Version.step_feed`.
            request: the request.
        """
        self._is_stepping = True
        try:
            return await self.running.step({**feed, SLOTS: self._slots}, Way.of(call))
        finally:
            self._is_stepping = False
            if self.is_over:
                self.running.memory.end(self._slots)

    def end(self) -> None:
        """Ends it; a running step is the last one."""
        if not self.is_over:
            self.is_over = True
            if not self._is_stepping:
                self.running.memory.end(self._slots)


class Sequences:
    """The sequences of one model, limited in rows and idle time.

    Args:
        max_rows: how many rows all of them may have.
        idle_seconds: seconds without a step after which a sequence is dropped.
        clock: returns the time in seconds.
    """

    def __init__(self, most: int, idle: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._idle, self._clock = most, idle, clock
        self._all: OrderedDict[Name, Sequence] = OrderedDict()  # the least recently used first
        self._rows = 0  # of all sequences

    def __len__(self) -> int:
        return len(self._all)

    async def step(self, name: Name, call: Call, newest: Running) -> Answer:
        """Executes one step of a sequence; steps of one sequence run in the order of arrival.

        Args:
            name: of the sequence.
            request: the request.
            newest: the version for a new sequence.

        Raises:
            RequestError: if the step is invalid or the sequence is unknown; nothing changes.
        """
        self.forget_idle()
        known = None if call.options.starts else self._all.get(name)
        if known is None and not call.options.starts:
            raise self._unknown(name)
        version = (known.running if known else newest).version
        if call.version not in ("", version.name):
            raise RequestError(
                f"The sequence {quote(name)} uses the version {version.name!r}, got a "
                f"request for {quote(call.version)}. Leave the version out.",
                404,
            )
        require_outputs(version.step_outputs, call.outputs)
        feed = version.step_feed(call.inputs, call.options)
        rows = len(next(iter(feed.values())))
        sequence = known or self._begin(name, newest, rows)
        if rows != sequence.rows:
            raise RequestError(
                f"Each step of the sequence {quote(name)} has {sequence.rows} rows, as its first "
                f"one had, got {rows}."
            )
        async with sequence.turn:
            if sequence.is_over:
                raise self._unknown(name)
            try:
                outputs = await sequence.step(feed, call)
            except asyncio.CancelledError:  # its caller has disconnected, but it was executed
                self._taken(sequence, call)
                raise
            self._taken(sequence, call)
        return Answer.to(call, version.name, outputs)

    def _taken(self, sequence: Sequence, call: Call) -> None:
        self._touch(sequence)
        if call.options.ends:
            self._end(sequence)

    def forget_idle(self) -> None:
        """Drops the sequences that had no step for too long."""
        latest = self._clock() - self._idle
        while self._all:
            oldest = next(iter(self._all.values()))
            if oldest.last_used > latest:
                return
            if oldest.turn.locked():
                self._touch(oldest)
            else:
                self._end(oldest)

    def _begin(self, name: Name, running: Running, rows: int) -> Sequence:
        before = self._all.get(name)
        others = self._rows - (before.rows if before else 0)
        if others + rows > self._most:
            raise RequestError(
                f"The server keeps at most {self._most} rows of sequences of this model "
                f"(--max-sequences); {others} are active, and {rows} would be added. End some with "
                "sequence_end, or try again later.",
                429,
            )
        if before is not None:
            self._end(before)
        found = self._all[name] = Sequence(name, running, rows, self._clock())
        self._rows += rows
        return found

    def _unknown(self, name: Name) -> RequestError:
        return RequestError(
            f"There is no sequence {quote(name)}: it was not started with sequence_start, has "
            f"ended, or had no step for {self._idle:g} s. Start it with sequence_start."
        )

    def _touch(self, sequence: Sequence) -> None:
        if self._all.get(sequence.name) is sequence:
            self._all.move_to_end(sequence.name)
            sequence.last_used = self._clock()

    def _end(self, sequence: Sequence) -> None:
        sequence.end()
        if self._all.get(sequence.name) is sequence:
            del self._all[sequence.name]
            self._rows -= sequence.rows
