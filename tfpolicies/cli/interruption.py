"""Ctrl-C that lets an iteration end."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While entered, the first Ctrl-C (or SIGTERM) only sets `requested`; a second one interrupts.

    The handlers found are put back on leaving. Only the main thread may enter.
    """

    def __init__(self) -> None:
        self.requested = False
        self._found: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self._found = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._found.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
