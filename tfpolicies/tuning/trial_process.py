"""The study's side of a process that trains trials: starts it, asks it and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.envs.child_process import restore_error
from tfpolicies.envs.env_process import dumps
from tfpolicies.tuning.trial_program import CheckMessage, ResultMessage, RunRequest

_PROGRAM = (
    "import sys; connection = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
    "from tfpolicies.tuning.trial_program import serve; serve(connection)"
)
_THREAD_COUNT_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ProcessSetup(NamedTuple):
    """Input of each process of a study.

    Attributes:
        pickled_config: the config of the study.
        registries: the result of `pack_registries`.
        log_path: the file to which the process writes its log.
        num_processes: how many share the machine.
    """

    pickled_config: bytes
    registries: list[Any]
    log_path: Path
    num_processes: int


class TrialProcess:
    """A process that trains runs, one after the other.

    It is a new interpreter, not a fork. When this object is closed, or the study's process ends in
    any way, it ends as well, and so do its environments.

    Args:
        setup: of the study.
    """

    def __init__(self, setup: ProcessSetup) -> None:
        parent_socket, child_socket = socket.socketpair()
        threads = str(max(1, (os.cpu_count() or 1) // setup.num_processes))
        defaults = dict.fromkeys(_THREAD_COUNT_VARIABLES, threads)
        with child_socket, open(setup.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(child_socket.fileno()), *sys.path],
                stdin=subprocess.PIPE,  # closed when the study's process ends
                stdout=log,
                stderr=log,
                pass_fds=[child_socket.fileno()],
                env={**(defaults if setup.num_processes > 1 else {}), **os.environ},
                start_new_session=True,  # Ctrl-C is for the study's process
            )
        self.connection = Connection(parent_socket.detach())
        self.num_runs = 0
        self._finalize = weakref.finalize(self, _end_process, self._process, self.connection)
        with contextlib.suppress(OSError):
            self.connection.send((setup.pickled_config, setup.registries))

    def receive_check(self) -> bool:
        """Waits until the process has built the algorithm once.

        Returns:
            Whether the action space is a Box of floats.

        Raises:
            EOFError: if the process has ended.
            Exception: the exception of the build.
        """
        message: CheckMessage = self.connection.recv()
        if message.error is not None:
            raise restore_error(message.error)
        return message.has_box_actions

    def start(self, request: RunRequest) -> None:
        self.num_runs += 1
        with contextlib.suppress(OSError):  # `receive` notices a process that has ended
            self.connection.send_bytes(dumps(request))

    def receive(self) -> Any:
        """Returns the next message of the run; a `ResultMessage` if the process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return ResultMessage(None, f"the process of the trial ended by {self.close()}")

    def answer(self, should_continue: bool) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(should_continue)

    @property
    def is_closed(self) -> bool:
        return not self._finalize.alive

    def close(self) -> str:
        """Ends the process; returns how it ended if it had ended by itself, else "SIGKILL"."""
        self._finalize()
        code = self._process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _end_process(process: subprocess.Popen[bytes], connection: Connection) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()  # type: ignore[union-attr]
    connection.close()
    process.wait()
