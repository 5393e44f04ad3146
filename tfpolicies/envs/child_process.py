"""The worker's side of a child process that steps environments: starts, asks and ends it.

The process is a new interpreter, not a fork, so it has neither TensorFlow nor the user's script; it
runs `env_process.serve`. Requests and answers go through a socket between parent and child. A
process that crashes or hangs leaves a traceback in an unnamed file, which `ProcessLostError` holds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from tfpolicies.envs.env_process import TRACE_SIGNAL, SerializedError
from tfpolicies.envs.shared_arrays import make_unnamed_file
from tfpolicies.errors import EnvError

_PROGRAM = (
    "import sys; process, requests, memory, trace = map(int, sys.argv[1:5]); "
    "sys.path[:] = sys.argv[5:]; from tfpolicies.envs.env_process import serve; "
    "serve(process, requests, memory, trace)"
)
_THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Thread counts of numerical libraries, 1 unless the user sets them: there are many processes."""

_TRACE_BYTES = 100_000  # maximal size of a traceback
_TRACE_SECONDS = 0.5  # time for a hanging process to write its traceback


class RemoteTraceback(Exception):
    """The cause of an error raised in an environment's process: its traceback there.

    Args:
        text: the traceback.
        frames: its frames.

    Attributes:
        frames: as given.
    """

    def __init__(self, text: str, frames: Sequence[traceback.FrameSummary]) -> None:
        super().__init__(f"\n{text}")
        self.frames = frames


class ProcessLostError(Exception):
    """A process has ended, or was ended because it hung.

    Args:
        reason: the signal or the exit status of the process; or why it was ended.
        trace: its traceback; "" if there is none.

    Attributes:
        trace: as given.
    """

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(reason)
        self.trace = trace


class ChildProcess:
    """A process that steps a share of environments, as its worker sees it.

    It answers requests in the order in which they were sent. When this object is garbage-collected,
    or the worker's process ends, the process ends as well.

    Args:
        number: index of the process within its worker.
        memory: the file of the shared memory.

    Attributes:
        number: as given.
        outstanding: number of answers not yet received.
    """

    def __init__(self, number: int, memory: IO[bytes]) -> None:
        self.number = number
        self.outstanding = 0
        self._lost: ProcessLostError | None = None
        parent_socket, child_socket = socket.socketpair()
        self._trace = make_unnamed_file()
        files = [file.fileno() for file in (child_socket, memory, self._trace)]
        arguments = map(str, (number, *files, *sys.path))
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                stdin=subprocess.PIPE,  # closed when the worker ends: see `end_with_parent`
                pass_fds=files,
                env={**dict.fromkeys(_THREAD_COUNT_VARIABLES, "1"), **os.environ},
                start_new_session=True,  # Ctrl-C is for this process
            )
        self._connection = Connection(parent_socket.detach())
        self._finalize = weakref.finalize(
            self, _end_process, self._process, self._connection, self._trace, os.getpid()
        )

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, request: bytes) -> None:
        """Sends a request, if the process is still there; `receive` raises if it is not."""
        self.outstanding += 1
        if self._lost is None:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(request)

    def receive(self) -> Any:
        """Returns an answer.

        Raises:
            ProcessLostError: if the process has ended.
            Exception: the exception raised in the process.
        """
        self.outstanding -= 1
        if self._lost is not None:
            raise self._lost
        try:
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self.end() from error
        is_result, result, records = pickle.loads(answer)
        for name, level, text in records:
            logging.getLogger(name).log(level, "%s", text)
        if is_result:
            return result
        raise restore_error(result)

    def has_ended(self) -> bool:
        """Returns True if the process has ended, even if others hold its end of the socket."""
        if hasattr(os, "waitid"):  # it does not release the process id
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        return self._process.poll() is not None

    def is_lost(self) -> bool:
        """Returns True if the end of the process has been noticed."""
        return self._lost is not None

    def end(self, why: str = "") -> ProcessLostError:
        """Ends the process and those that it started.

        Args:
            why: reason for ending a running process; "" if it has ended by itself.

        Returns:
            The error that `receive` raises from now on.
        """
        if self._lost is None:
            if why:
                self._process.send_signal(TRACE_SIGNAL)
                time.sleep(_TRACE_SECONDS)
            trace = os.pread(self._trace.fileno(), _TRACE_BYTES, 0).decode(errors="replace")
            self._finalize()  # also sets the return code
            self._lost = ProcessLostError(why or _describe_end(self._process.returncode), trace)
        return self._lost

    def close(self) -> None:
        self.end()

    def wait(self, seconds: float) -> None:
        """Waits until the process has ended by itself."""
        deadline = time.monotonic() + seconds
        while self._lost is None and not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.002)


def _describe_end(code: int) -> str:
    """Returns how a process with a return code ended.

    >>> _describe_end(-11), _describe_end(3)
    ('SIGSEGV', 'exit status 3')
    """
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _end_process(
    process: subprocess.Popen[bytes], connection: Connection, trace: IO[bytes], owner: int
) -> None:
    if os.getpid() != owner:  # a fork of the process that started it
        return
    if process.returncode is None:  # so its process id has not been reused
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()  # type: ignore[union-attr]
    connection.close()
    trace.close()
    process.wait()


def restore_error(serialized: SerializedError) -> Exception:
    """Returns an exception that a process sent, caused by its traceback there."""
    try:
        error = pickle.loads(serialized.pickled)
    except Exception:
        error = EnvError(serialized.text.rstrip().rpartition("\n")[2])
    error.__cause__ = RemoteTraceback(serialized.text, serialized.frames)
    return error


def iterate_ready(
    processes: Iterable[ChildProcess], seconds: float, on_silent: Callable[[ChildProcess], None]
) -> Iterator[ChildProcess]:
    """Yields each process as soon as it has answered, or is lost.

    Args:
        processes: processes to which a request was sent.
        seconds: interval between two checks of silent processes.
        on_silent: called with each silent process; it may end it.
    """
    poll, waiting = select.poll(), {}
    for process in processes:
        if process.is_lost():
            yield process
            continue
        waiting[process.fileno()] = process
        poll.register(process.fileno(), select.POLLIN)
    while waiting:
        ready = [file for file, _ in poll.poll(1000 * seconds)]
        for file in ready:
            poll.unregister(file)
            yield waiting.pop(file)
        for file, process in [] if ready else list(waiting.items()):
            on_silent(process)
            if process.is_lost():
                poll.unregister(file)
                yield waiting.pop(file)


def end_if_dead(process: ChildProcess) -> None:
    """Cleans up a process that has ended; `receive` raises then."""
    if process.has_ended():
        process.end()
