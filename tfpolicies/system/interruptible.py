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
    """A call that runs in a daemon thread.

    Args:
        call: what runs.
    """

    def __init__(self, call: Callable[[], Result]) -> None:
        self._future: futures.Future[Result] = futures.Future()
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], Result]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Result:
        """Waits for the call and returns what it gave, or raises what it raised."""
        self.wait()
        return self._future.result()

    def wait(self) -> None:
        """Waits for the end of the call, whatever it gives."""
        while not futures.wait([self._future], _TICK).done:
            pass
