"""Time limits of models: long runs get a lower priority, and are terminated at the limit."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time

import onnxruntime

_EVERY = 0.05  # seconds between two checks of running models
_LONG = 1.0  # seconds after which the priority of a run is lowered
_NICER = 10  # increment of its nice value: it gets a tenth of a contended CPU


class OverdueError(Exception):
    """A model exceeded its time limit, or the server stops."""


class _Limit:
    """The time limit of the runs of one thread; a context manager.

    Attributes:
        options: ONNX Runtime's options of the runs.
        deadline: when they are terminated, in seconds of `time.monotonic`.
        yield_time: when the thread's priority is lowered.
    """

    def __init__(self) -> None:
        self.options, self.until = onnxruntime.RunOptions(), math.inf
        self.yields_at = math.inf
        self._is_ended = self._can_yield = False
        self._thread = threading.get_native_id()

    def begin(self, seconds: float) -> None:
        """Sets the time limit of the next runs."""
        now = time.monotonic()
        self.until = now + seconds
        if self._can_yield:
            self.yields_at = now + _LONG
        if self._is_ended:
            self.options.terminate = self._is_ended = False

    def let_yield(self) -> None:
        """Allows to lower the thread's priority during long runs."""
        self._can_yield = sys.platform == "linux"  # only there each thread has a priority

    def yield_to_others(self) -> None:
        """Lowers the priority of the thread permanently: raising it again needs privileges."""
        self.yields_at, self._can_yield = math.inf, False
        with contextlib.suppress(OSError):  # the thread has ended
            priority = os.getpriority(os.PRIO_PROCESS, self._thread) + _NICER
            os.setpriority(os.PRIO_PROCESS, self._thread, priority)

    def end(self) -> None:
        """Terminates the current run."""
        self.options.terminate = self._is_ended = True

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.until = self.yields_at = math.inf
        if self._is_ended and isinstance(error, Exception):
            raise OverdueError from error


class TimeLimits:
    """Terminates overdue runs of ONNX Runtime, between two operations of the graph.

    A separate thread watches the runs, because a run may block the event loop.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._all: list[_Limit] = []
        self._lock = threading.Lock()  # so that the limit of one run does not end the next
        self._is_over = False
        self._watcher = threading.Thread(target=self._watch, name="time limits", daemon=True)

    def get_options(self) -> onnxruntime.RunOptions:
        """Returns the run options with which runs of this thread can be terminated in a `limit`."""
        return self._get_limit().options

    def limit(self, seconds: float) -> _Limit:
        """Returns a context that limits runs of this thread with `get_options`.

        It raises `OverdueError` if a run was terminated.
        """
        limit = self._get_limit()
        with self._lock:
            limit.begin(seconds)
            if self._is_over:
                limit.end()
        return limit

    def let_yield(self) -> None:
        """Lets this thread get a lower priority once one of its runs takes longer than a second."""
        self._get_limit().let_yield()

    def stop(self) -> None:
        """Terminates all runs, including later ones."""
        with self._lock:
            self._is_over = True
            for limit in self._all:
                limit.end()

    def _get_limit(self) -> _Limit:
        limit: _Limit | None = getattr(self._local, "limit", None)
        if limit is None:
            limit = self._local.limit = _Limit()
            with self._lock:
                self._all.append(limit)
                if len(self._all) == 1:
                    self._watcher.start()
        return limit

    def _watch(self) -> None:
        while not self._is_over:
            time.sleep(_EVERY)
            with self._lock:
                now = time.monotonic()
                for limit in self._all:
                    if now > limit.until:
                        limit.end()
                    if now > limit.yields_at:
                        limit.yield_to_others()
