"""The program in front of a fork of `warm_start`: passes everything on, and ends as the fork does.

The files that `WarmStart` writes run it without site packages, and define `SOCKET`, the path of the
server's socket, and `NAME`, the program.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys

SOCKET: str = globals()["SOCKET"]
NAME: str = globals()["NAME"]


def main() -> None:
    name, words = NAME, sys.argv[1:]
    if name != "tfpolicies" and (not words or (words[0].startswith("-") and words[0] != "-m")):
        os.execv(sys.executable, [sys.executable, *words])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(SOCKET)
    program = {"words": [name, *words], "folder": os.getcwd(), "environment": dict(os.environ)}
    content = json.dumps(program).encode()
    socket.send_fds(connection, [len(content).to_bytes(4, "little")], [0, 1, 2])
    connection.sendall(content)
    pid = receive(connection)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = receive(connection)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def receive(connection: socket.socket) -> int:
    content = b""
    while len(content) < 8:
        part = connection.recv(8 - len(content))
        if not part:
            os._exit(1)
        content += part
    return array.array("q", content)[0]


main()
