"""Time limits of models: long runs get a lower priority, and are terminated at the limit."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time

import onnxruntime

_CHECK_SECONDS = 0.05  # seconds between two checks of running models
_YIELD_SECONDS = 1.0  # seconds after which the priority of a run is lowered
_NICE_INCREMENT = 10  # increment of its nice value: it gets a tenth of a contended CPU


class ModelTimeoutError(Exception):
    """A model exceeded its time limit, or the server stops."""


class _ThreadLimit:
    """The time limit of the runs of one thread; a context manager.

    Attributes:
        options: ONNX Runtime's options of the runs.
        deadline: when they are terminated, in seconds of `time.monotonic`.
        yield_time: when the thread's priority is lowered.
    """

    def __init__(self) -> None:
        self.options, self.deadline = onnxruntime.RunOptions(), math.inf
        self.yield_time = math.inf
        self._is_terminated = self._can_yield = False
        self._thread = threading.get_native_id()

    def start(self, seconds: float) -> None:
        """Sets the time limit of the next runs."""
        now = time.monotonic()
        self.deadline = now + seconds
        if self._can_yield:
            self.yield_time = now + _YIELD_SECONDS
        if self._is_terminated:
            self.options.terminate = self._is_terminated = False

    def allow_yielding(self) -> None:
        """Allows to lower the thread's priority during long runs."""
        self._can_yield = sys.platform == "linux"  # only there each thread has a priority

    def yield_to_others(self) -> None:
        """Lowers the priority of the thread permanently: raising it again needs privileges."""
        self.yield_time, self._can_yield = math.inf, False
        with contextlib.suppress(OSError):  # the thread has ended
            priority = os.getpriority(os.PRIO_PROCESS, self._thread) + _NICE_INCREMENT
            os.setpriority(os.PRIO_PROCESS, self._thread, priority)

    def terminate(self) -> None:
        self.options.terminate = self._is_terminated = True

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        self.deadline = self.yield_time = math.inf
        if self._is_terminated and isinstance(error, Exception):
            raise ModelTimeoutError from error


class TimeLimits:
    """Terminates overdue runs of ONNX Runtime, between two operations of the graph.

    A separate thread watches the runs, because a run may block the event loop.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._limits: list[_ThreadLimit] = []
        self._lock = threading.Lock()  # so that the limit of one run does not end the next
        self._is_stopped = False
        self._watch_thread = threading.Thread(target=self._watch, name="time limits", daemon=True)

    def get_options(self) -> onnxruntime.RunOptions:
        """Returns the run options with which runs of this thread can be terminated in a `limit`."""
        return self._get_limit().options

    def limit(self, seconds: float) -> _ThreadLimit:
        """Returns a context that limits runs of this thread with `get_options`.

        It raises `ModelTimeoutError` if a run was terminated.
        """
        limit = self._get_limit()
        with self._lock:
            limit.start(seconds)
            if self._is_stopped:
                limit.terminate()
        return limit

    def allow_yielding(self) -> None:
        """Lets this thread get a lower priority once one of its runs takes longer than a second."""
        self._get_limit().allow_yielding()

    def stop(self) -> None:
        """Terminates all runs, including later ones."""
        with self._lock:
            self._is_stopped = True
            for limit in self._limits:
                limit.terminate()

    def _get_limit(self) -> _ThreadLimit:
        limit: _ThreadLimit | None = getattr(self._local, "limit", None)
        if limit is None:
            limit = self._local.limit = _ThreadLimit()
            with self._lock:
                self._limits.append(limit)
                if len(self._limits) == 1:
                    self._watch_thread.start()
        return limit

    def _watch(self) -> None:
        while not self._is_stopped:
            time.sleep(_CHECK_SECONDS)
            with self._lock:
                now = time.monotonic()
                for limit in self._limits:
                    if now > limit.deadline:
                        limit.terminate()
                    if now > limit.yield_time:
                        limit.yield_to_others()
