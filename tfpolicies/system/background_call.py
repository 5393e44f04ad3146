"""Runs long native calls in a background thread, so that signals are handled meanwhile.

Python runs signal handlers between two instructions of the main thread, and a native call is one
instruction. A call in a daemon thread delays neither the caller, whose wait a signal can
interrupt, nor the end of the process.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Generic, TypeVar

Result = TypeVar("Result")

_POLL_SECONDS = 0.2  # seconds


class BackgroundCall(Generic[Result]):
    """A call that runs in a daemon thread, from `start` on.

    Args:
        call: the function to run.
    """

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self._future: futures.Future[Result] = futures.Future()

    def start(self) -> None:
        """Starts the call. A signal may come before this returns, so store the object first."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self, seconds: float = math.inf) -> Result:
        """Waits for the call; returns its result or raises its exception.

        Args:
            seconds: how long to wait.
        """
        deadline = time.monotonic() + seconds
        while not futures.wait([self._future], min(_POLL_SECONDS, seconds)).done:
            if time.monotonic() > deadline:
                raise TimeoutError(f"it took longer than {seconds:g} s")
        return self._future.result()

    def cancel(self) -> bool:
        """Keeps the call from starting; returns False if it has started."""
        return self._future.cancel()
