"""Code that runs in processes and threads of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
HOME = TESTS.parent


def run_python(
    *words: object, seconds: float = 300, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs Python, which finds the tests' helpers, and asserts that it succeeds.

    Args:
        words: the code or the path of a script, after it the arguments; or options of Python and
            their values.
        seconds: after which it is killed.
        variables: of the environment; None removes one.
    """
    paths = [str(TESTS), str(HOME), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    is_code = not str(words[0]).startswith("-") and not str(words[0]).endswith(".py")
    options = ["-c"] if is_code else []
    ran = subprocess.run(
        [sys.executable, *options, *map(str, words)],
        env={name: x for name, x in environment.items() if x is not None},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran


def run_threads(*calls: Callable[[], object], seconds: float = 60) -> None:
    """Calls functions in a thread each; raises their first error, and asserts that all end."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def start_program(code: str, *words: str, **settings: Any) -> subprocess.Popen[str]:
    """Starts Python code in another process, whose output is text in pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": str(HOME)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits for a condition; returns its last value."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
