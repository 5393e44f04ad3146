"""Calls of native code that take long, made so that signals are seen to meanwhile.

Python runs signal handlers between two instructions of the main thread, and native code is one
instruction. So the call is made in a thread that nobody has to wait for: neither the caller, whom
a signal takes out of waiting, nor the end of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Generic, TypeVar

Result = TypeVar("Result")

_TICK = 0.2  # seconds


class BackgroundCall(Generic[Result]):
    """A call that runs in a daemon thread, from `start` on.

    Args:
        call: what runs.
    """

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self._future: futures.Future[Result] = futures.Future()

    def start(self) -> None:
        """Begins the call. A signal may come before this returns, so keep the object first."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Result:
        """Waits for the call and returns what it gave, or raises what it raised."""
        self._wait()
        return self._future.result()

    def abandon(self) -> None:
        """Waits for the end of the call if it has begun; otherwise it never will."""
        if not self._future.cancel():
            self._wait()

    def _wait(self) -> None:
        while not futures.wait([self._future], _TICK).done:
            pass
