"""Ends a child process together with its parent."""

from __future__ import annotations

import os
import signal


def end_with_parent() -> None:
    """Has the system end this process and its children when its parent's process ends.

    The parent holds the other end of standard input. When that is closed, however the parent ended,
    the kernel sends a signal to the whole process group, even if a call hangs in native code.
    """
    import fcntl

    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere it is SIGIO, which also ends processes
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
