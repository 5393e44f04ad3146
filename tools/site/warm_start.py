"""Starts Python programs in forks of a process that has imported TensorFlow already.

TensorFlow takes seconds to import, and the pages of the documentation start more than a hundred
programs. `WarmStart` is a server that imports it once; its `bin` folder has a `python` and a
`tfpolicies` that ask the server to fork, and then behave as the true ones: same arguments, folder,
environment, files, signals and exit status. `python` with other options than `-m` is the true one.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_PRELOADED = (
    *("tensorflow", "keras", "gymnasium", "h5py", "matplotlib.figure", "onnxruntime"),
    *("rich.console", "tfpolicies.algorithms.ppo", "tfpolicies.cli.commands"),
)
_START_SECONDS = 300.0
_CLIENT = """\
#!{python} -IS
import runpy
runpy.run_path({client!r}, dict(SOCKET={socket!r}, NAME={name!r}), "__main__")
"""


class WarmStart:
    """A server of forks, as a context; the programs that use it are in `bin`."""

    def __enter__(self) -> WarmStart:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        folder = Path(self._folder.name)
        path = str(folder / "socket")
        self.bin = folder / "bin"
        self.bin.mkdir()
        client = str(Path(__file__).with_name("warm_client.py"))
        for name in ("python", "python3", "tfpolicies"):
            text = _CLIENT.format(python=sys.executable, socket=path, name=name, client=client)
            (self.bin / name).write_text(text, encoding="utf-8")
            (self.bin / name).chmod(0o755)
        self._process = subprocess.Popen([sys.executable, "-m", __name__, path])
        deadline = time.monotonic() + _START_SECONDS
        while not os.path.exists(path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("The server of forks has not started.")
            time.sleep(0.1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


def _serve(path: str) -> dict[str, Any]:
    """Serves until the process ends; returns only in a fork: the program that it is to run."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{path}.new")
    server.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave no zombies
    os.rename(f"{path}.new", path)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _attend(connection)
        connection.close()


def _attend(connection: socket.socket) -> dict[str, Any]:
    """Forks the program, and tells its client how it ends; returns only in the program."""
    content, files, _, _ = socket.recv_fds(connection, 4, 3)
    size = int.from_bytes(content, "little")
    with connection.makefile("rb") as stream:
        program: dict[str, Any] = json.loads(stream.read(size))
    pid = os.fork()
    if pid == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return program
    for file in files:
        os.close(file)
    connection.sendall(array.array("q", [pid]).tobytes())
    pid_file = os.pidfd_open(pid)
    ready, _, _ = select.select([connection, pid_file], [], [])
    if pid_file not in ready:  # the client was killed
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(array.array("q", [os.waitstatus_to_exitcode(status)]).tobytes())
    os._exit(0)


def _run(program: dict[str, Any]) -> None:
    """Runs a program in this process, which then has its folder, environment and arguments."""
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        buffering = 1 if name == "stderr" or os.isatty(number) else -1
        file = open(number, mode, buffering, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    for path in reversed(program["environment"].get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    name, *words = program["words"]
    if name == "tfpolicies":
        from tfpolicies.__main__ import main

        sys.argv = [name, *words]
        sys.exit(main())
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, program["folder"])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def _exit_without_destructors(program: dict[str, Any]) -> None:
    """Runs a program and ends as Python does, but without the destructors of C++.

    Those of TensorFlow would join threads, which do not exist in a fork.
    """
    status: Any = 0
    try:
        _run(program)
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    os._exit(int(status or 0))


def main() -> None:
    for name in _PRELOADED:
        __import__(name)
    _exit_without_destructors(_serve(sys.argv[1]))


if __name__ == "__main__":
    main()
