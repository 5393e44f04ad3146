"""Runs the code of documentation pages: `python -m tools.site.run_page [PAGE ...] [--quick]`.

Each page runs in a process and an empty folder of its own; without pages, all run. Without
`--quick` the pages' pictures are updated.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.site.code_blocks import DOCS, ROOT, CodeBlock, get_pages, read_code_blocks

PICTURES = DOCS / "images" / "tutorials"
_SERVERS = {  # commands that do not end, and the port at which they listen
    r"tfpolicies serve\b(?!.*--help)": 8000,
    r"python3? -m http\.server\b": 8000,
    r"tensorboard\b": 6006,
}
_START_SECONDS = 90.0
_FREE_SECONDS = 600.0  # until another program frees a port


def run_page(page: Path, folder: Path, *, quick: bool) -> None:
    """Runs all blocks of a page in order, in this process and in a folder.

    Python blocks share their names. A line that starts a server runs in the background until the
    page has ended.

    Args:
        page: the file.
        folder: the working directory; scripts in it can be imported.
        quick: whether the replacements for quick runs are made.

    Raises:
        Exception: any error of a block.
        subprocess.CalledProcessError: if a command fails.
    """
    sys.modules["__main__"] = script = types.ModuleType("__main__")  # classes refer to it by name
    names = vars(script)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with contextlib.ExitStack() as stack:
        for block in read_code_blocks(page):
            if block.not_run:
                continue
            code = block.get_quick_code() if quick else block.code
            print(f"-- {block}", flush=True)
            if block.file:
                (folder / block.file).write_text(code, encoding="utf-8")
            elif block.language == "python":
                padding = "\n" * (block.line - 1)  # for the line numbers of tracebacks
                exec(compile(padding + code, str(page), "exec"), names)
            else:
                for part, port in _split_servers(code):
                    if port is None:
                        _run_commands(part)
                    else:
                        stack.enter_context(_run_server(part, port))
            if not quick:
                _copy_pictures(block)


def _split_servers(code: str) -> Iterator[tuple[str, int | None]]:
    """Yields the commands of a block; those that start a server separately, with its port."""
    commands: list[str] = []
    for line in code.splitlines():
        port = next((port for regex, port in _SERVERS.items() if re.match(regex, line)), None)
        if port is None:
            commands.append(line)
        else:
            yield "\n".join(commands), None
            commands = []
            match = re.search(r"--port[ =](\d+)|http\.server (\d+)", line)
            yield line, port if match is None else int(match[1] or match[2])
    yield "\n".join(commands), None


def _run_commands(commands: str) -> None:
    if commands.strip():
        subprocess.run(["bash", "-e", "-o", "pipefail", "-c", commands], check=True)


@contextlib.contextmanager
def _run_server(command: str, port: int) -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / f"tfpolicies-page-{port}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pages that run at the same time take turns
        deadline = time.monotonic() + _FREE_SECONDS
        while _accepts_connections(port):  # of another program
            if time.monotonic() > deadline:
                raise RuntimeError(f"Another program listens at port {port}: end it.")
            time.sleep(1.0)
        yield from _run_until_closed(command, port)


def _run_until_closed(command: str, port: int) -> Iterator[None]:
    process = subprocess.Popen(["bash", "-c", f"exec {command.partition('  #')[0]}"])
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _accepts_connections(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command!r} does not listen at port {port}.")
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _accepts_connections(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _copy_pictures(block: CodeBlock) -> None:
    for source, name in block.pictures:
        PICTURES.mkdir(parents=True, exist_ok=True)
        [path] = Path().glob(source)
        shutil.copyfile(path, PICTURES / name)


def run_in_process(
    page: Path, folder: Path, *, quick: bool, programs: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a page in a new process; returns its exit status and output.

    Args:
        page: the file.
        folder: the working directory.
        quick: whether the replacements for quick runs are made.
        programs: a folder whose `python` and `tfpolicies` are used, such as `WarmStart().bin`; None
            for those of this process.
    """
    bin_folder = Path(sys.executable).parent
    folders = [*([] if programs is None else [programs]), bin_folder, os.environ["PATH"]]
    python = sys.executable if programs is None else str(programs / "python")
    variables = {
        "PATH": os.pathsep.join(map(str, folders)),
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "agg",
    }
    mode = ["--quick"] if quick else []
    return subprocess.run(
        [python, "-m", "tools.site.run_page", str(page), "--in", str(folder), *mode],
        env={**os.environ, **variables},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def _run_all(pages: Sequence[Path], *, quick: bool) -> int:
    failed = []
    for page in pages:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = run_in_process(page, Path(folder), quick=quick)
        minutes = (time.monotonic() - start) / 60
        outcome = "passed" if result.returncode == 0 else "failed"
        print(f"{page.relative_to(ROOT)}: {outcome} after {minutes:.1f} minutes", flush=True)
        if result.returncode:
            failed.append(page)
            print(result.stdout, flush=True)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", type=Path, nargs="*", help="default: all")
    parser.add_argument("--quick", action="store_true", help="with the replacements of the page")
    parser.add_argument("--in", dest="folder", type=Path, help="runs one page in this process")
    args = parser.parse_args()
    pages = [page.resolve() for page in args.pages] or get_pages()
    if args.folder is None:
        return _run_all(pages, quick=args.quick)
    [page] = pages
    run_page(page, args.folder.resolve(), quick=args.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
