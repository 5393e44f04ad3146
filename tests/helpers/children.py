"""Forked processes that tell their parent what they do, and end at a step."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfpolicies.errors import TfPoliciesError

_STEPS = {"open", "os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir"}
_STEPS |= {"os.truncate", "shutil.copyfile", "fcntl.flock"}


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def call_at_step(
    at_step: int | None, folder: Path, end: Callable[[], None] = kill_self
) -> Callable[[], int]:
    """Calls `end` right before this process's step of a number; returns a function that counts."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == at_step:
            end()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        is_elsewhere = event == "open" and not str(arguments[0]).startswith(str(folder))
        if event in _STEPS and not is_elsewhere:
            step()

    real = os.fsync

    def fsync(descriptor: int) -> None:
        step()
        real(descriptor)

    sys.addaudithook(audit)
    os.fsync = fsync
    return lambda: count


class Child:
    """A forked process, and what it says.

    It says `ended` if `work` returns, `refused` if that raises an error of the package, and
    `failed` after any other error.

    Args:
        work: is called in the child with `say`, which sends JSON by name.
    """

    def __init__(self, work: Callable[[Callable[..., None]], None]) -> None:
        reading, writing = os.pipe()
        self.id = os.fork()
        if self.id == 0:
            status = 1
            try:
                os.close(reading)

                def say(**words: Any) -> None:
                    os.write(writing, json.dumps(words).encode() + b"\n")

                try:
                    work(say)
                    say(ended=True)
                    status = 0
                except TfPoliciesError as error:
                    say(refused=f"{type(error).__name__}: {error}"[:300])
                except BaseException:
                    say(failed=traceback.format_exc()[-1500:])
            finally:
                os._exit(status)
        os.close(writing)
        self._reading = reading
        self._rest = b""
        self.words: dict[str, Any] = {}

    def hear(self, until: str | None, limit: float) -> bool:
        """Listens until a word comes, or the end; returns whether it came in time."""
        deadline = time.monotonic() + limit
        while until is None or until not in self.words:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reading], [], [], left)[0]:
                return False
            content = os.read(self._reading, 65536)
            if not content:
                return until is None
            *lines, self._rest = (self._rest + content).split(b"\n")
            for line in lines:
                self.words |= json.loads(line)
        return True

    def end(self) -> str:
        """Ends the process if it runs; returns its signal or status."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.id, signal.SIGKILL)
        _, status = os.waitpid(self.id, 0)
        os.close(self._reading)
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else str(status)
