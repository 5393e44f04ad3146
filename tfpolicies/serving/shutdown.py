"""Graceful shutdown of a server: drains, finishes running requests, and exits in bounded time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

from tfpolicies.serving.connections import ConnectionLimiter
from tfpolicies.serving.repository import ModelRepository
from tfpolicies.system.signal_handling import describe_signal

GRACE_SECONDS = 30.0
"""Seconds to finish running requests once the server accepts no more."""

_FORCED_EXIT_SECONDS = 10.0  # seconds after the grace period in which the process exits in any case
_ABORT_SECONDS = 1.0  # seconds until the process exits after a second signal


class Shutdown:
    """Handles SIGTERM and SIGINT.

    SIGTERM drains the server: it is not ready, but still answers for `drain_seconds`, in which load
    balancers and clients switch to other servers. Then it stops: it accepts no more requests and
    finishes the running ones. SIGINT stops it without draining. A second signal ends it at once.

    Attributes:
        is_loaded: whether the models are loaded; a signal before that ends the loading.
        stopping: set when the server accepts no more requests.
        aborting: set when it also does not wait for running ones.
        aborted_by: the number of the signal that set it; None if none did.

    Args:
        repository: the models.
        connections: of HTTP.
        drain_seconds: how long it drains; 0 for not at all.
        log: called with a log line when draining begins.
    """

    def __init__(
        self,
        repository: ModelRepository,
        connections: ConnectionLimiter,
        drain_seconds: float,
        log: Callable[[str], object],
    ) -> None:
        self.is_loaded = False
        self.stopping, self.aborting = asyncio.Event(), asyncio.Event()
        self.aborted_by: int | None = None
        self._repository, self._connections = repository, connections
        self._drain_seconds, self._log = drain_seconds, log

    def begin(self, number: int) -> None:
        if self._repository.is_draining:
            self._abort(number)
            return
        self._repository.is_draining = True
        self._connections.drain()
        drain_seconds = self._drain_seconds if number == signal.SIGTERM and self.is_loaded else 0.0
        if not self.is_loaded:
            self._repository.time_limits.stop()
        _exit_later(drain_seconds + GRACE_SECONDS + _FORCED_EXIT_SECONDS, 1)
        asyncio.get_running_loop().call_later(drain_seconds, self.stop)
        if drain_seconds:
            self._log(
                f"{describe_signal(number)}: not ready from now on, answers for {drain_seconds:g} "
                "more seconds (--drain-seconds). A second signal ends it at once."
            )

    def stop(self) -> None:
        self._connections.is_stopping = True
        self.stopping.set()

    def _abort(self, number: int) -> None:
        self.aborted_by = number
        _exit_later(_ABORT_SECONDS, 128 + number)
        self.stop()
        self._repository.time_limits.stop()
        self._connections.abort()
        self.aborting.set()


def _exit_later(seconds: float, status: int) -> None:
    timer = threading.Timer(seconds, os._exit, [status])
    timer.daemon = True
    timer.start()
