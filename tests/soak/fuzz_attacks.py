"""Loads files that somebody made to do harm, and counts what comes of it.

    python -m soak.fuzz_attacks --count 10000 --seed 0

Half of the files are sound up to one field, which is attacked: checksums, names and all else are
right, as a hostile writer would make them. The other half is damaged blindly. The attacks are other
names of Keras classes, functions and classes of this package where something is called, sizes that
no memory holds, models that explode (inner models called twice at each depth, attention over long
sequences, windows, steps, outputs and noise), FIFOs and devices in place of files, numbers that are
not finite, junk, changed array files, and a foreign `play.py`. Victims are the checkpoints of
policies and algorithms, kept stashes, run folders, exports, their ONNX files as they are imported,
played and served (`--only onnx`), and array files (`--only array`).

Each file must either be loaded or be refused with the package's own error. Listed is anything else:
another exception; something that was executed (a process, a socket, a file written outside of the
victim's folder, a call into the command line); more than 2 s of CPU or 500 MB; a refusal that had
changed the object it was to be loaded into; weights that are not finite.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from helpers.scripts import parse_options
from soak.attempt import Tally, watch_events
from soak.hostile_files import all_victims

_HANGS = 20  # seconds after which a file counts as one that hangs
_HEADROOM = 2 << 30  # bytes that this process may take on top, so that the machine survives

_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess", "socket.connect")
_FORBIDDEN += ("socket.bind", "marshal", "pickle", "ctypes.dlopen", "tfpolicies.fuzz")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "shutil")
_allowed_root = ""


def _judge(event: str, arguments: tuple[Any, ...]) -> str:
    """Returns what must not happen: an execution, or a change outside of the victim's folder."""
    if event.startswith(_FORBIDDEN) or (event.startswith(_CHANGES) and _is_outside(arguments)):
        return f"{event}{arguments!r:.900}"
    is_write = event == "open" and _writes(arguments) and _is_outside(arguments)
    return f"open{arguments!r:.300}" if is_write else ""


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 else 0
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_outside(arguments: tuple[Any, ...]) -> bool:
    path = arguments[0]
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    return not os.fsdecode(os.fspath(path)).startswith((_allowed_root, "/dev/null"))


def _audit_calls_into_the_command_line() -> None:
    """Makes calls of the command line's functions audit events; they stay what they are."""
    for module in ("tfpolicies.cli", "tfpolicies.cli.training"):
        loaded = importlib.import_module(module)
        for name, value in list(vars(loaded).items()):
            if callable(value) and getattr(value, "__module__", None) == module:
                if isinstance(value, type) or name in ("find_run",):
                    continue

                @functools.wraps(value)
                def audited(*args: Any, _called: Any = value, **kwargs: Any) -> Any:
                    sys.audit("tfpolicies.fuzz", _called.__qualname__)
                    return _called(*args, **kwargs)

                setattr(loaded, name, audited)


class _HangsError(BaseException):
    """A file took so long that it was given up."""


def _give_up(*_: Any) -> None:
    raise _HangsError


@contextlib.contextmanager
def _watch_attempt() -> Iterator[list[str]]:
    """Watches one attempt, and gives it up if it hangs."""
    with watch_events(_judge) as events:
        signal.setitimer(signal.ITIMER_REAL, _HANGS)
        try:
            yield events
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def watch(root: Path) -> None:
    global _allowed_root
    _allowed_root = str(root)
    os.environ["TMPDIR"] = tempfile.tempdir = str(root)
    signal.signal(signal.SIGALRM, _give_up)
    _audit_calls_into_the_command_line()
    size = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (size + _HEADROOM, resource.RLIM_INFINITY))


def main() -> int:
    options = parse_options(
        __doc__,
        count=(10_000, "files in all"),
        seed=0,
        only=("", "a part of a victim's name"),
        skip=(0, "files of each victim to leave out"),
    )
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    bad, files = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        victims = list(all_victims(root))
        watch(root)
        for name, victim, share in victims:
            if options.only not in name:
                continue
            count, tally = max(1, round(share * options.count)), Tally()
            numbers = range(options.skip, options.skip + count)
            tally.attack(name, victim, numbers, options.seed, watch=_watch_attempt)
            kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(tally.kinds.items()))
            print(f"{name}: {tally}", f"({kinds})", *tally.other, sep="\n    ", flush=True)
            bad, files = bad + len(tally.other), files + count
    print(f"{files} files, {bad} neither loaded nor refused in order; keras {keras.__version__}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
