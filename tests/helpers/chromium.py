"""A page in Chromium that tests drive, and folders that are served to it."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).parents[1] / "browser" / "drive.mjs"


class Chromium:
    """One page after the other in one browser; each method is an action of `drive.mjs`.

    Args:
        tools: the folder in which playwright-core is installed.
    """

    def __init__(self, tools: Path) -> None:
        self._process = subprocess.Popen(
            ["node", str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tools,
            env={**os.environ, "CHROMIUM": "/usr/bin/chromium"},
        )

    def do(self, action: str, **how: Any) -> Any:
        """Takes an action and returns what it gives; raises what fails in the page."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": action, **how}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self._process.communicate(timeout=30)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder as `python -m http.server` does, and gives its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
