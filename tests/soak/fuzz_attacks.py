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

import argparse
import collections
import functools
import importlib
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

from soak.attempt import Attempt, Victim
from soak.hostile_files import all_victims
from tfpolicies.errors import TfPoliciesError

CPU_SECONDS, MEGABYTES = 2.0, 500.0  # at most, for one file
_HANGS = 20  # seconds after which a file counts as one that hangs
_HEADROOM = 2 << 30  # bytes that this process may take on top, so that the machine survives

# Watching -----------------------------------------------------------------------------------------

_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess", "socket.connect")
_FORBIDDEN += ("socket.bind", "marshal", "pickle", "ctypes.dlopen", "tfpolicies.fuzz")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "shutil")
_watched: list[list[str]] = []
_allowed_root = ""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event.startswith(_FORBIDDEN) or (event.startswith(_CHANGES) and _is_outside(arguments)):
        _watched[-1].append(f"{event}{arguments!r:.900}")
    elif event == "open" and _writes(arguments) and _is_outside(arguments):
        _watched[-1].append(f"open{arguments!r:.300}")


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 else 0
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_outside(arguments: tuple[Any, ...]) -> bool:
    path = arguments[0]
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    return not os.fsdecode(os.fspath(path)).startswith((_allowed_root, "/dev/null"))


def _tell_of_calls_into_the_command_line() -> None:
    """Makes calls of the command line's functions audit events; they stay what they are."""
    for module in ("tfpolicies.cli", "tfpolicies.cli.training"):
        loaded = importlib.import_module(module)
        for name, value in list(vars(loaded).items()):
            if callable(value) and getattr(value, "__module__", None) == module:
                if isinstance(value, type) or name in ("find_run",):
                    continue

                @functools.wraps(value)
                def told(*args: Any, _called: Any = value, **kwargs: Any) -> Any:
                    sys.audit("tfpolicies.fuzz", _called.__qualname__)
                    return _called(*args, **kwargs)

                setattr(loaded, name, told)


class _HangsError(BaseException):
    """A file took so long that it was given up."""


def _give_up(*_: Any) -> None:
    raise _HangsError


def _peak_mb() -> float:
    """Returns the most memory since `_forget_peak`, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _forget_peak() -> float:
    """Begins to measure the peak of memory anew; returns what it is now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_mb()


# The count ----------------------------------------------------------------------------------------


class Tally:
    """What became of the files of one kind."""

    def __init__(self) -> None:
        self.loaded = self.refused = 0
        self.kinds: collections.Counter[str] = collections.Counter()
        self.other: list[str] = []
        self.slowest = self.largest = 0.0

    def __str__(self) -> str:
        """Returns the counts in one line."""
        return (
            f"loaded {self.loaded}, refused {self.refused}, other {len(self.other)}; at most "
            f"{self.slowest:.2f} s of CPU and {self.largest:.0f} MB a file"
        )


def tried(name: str, victim: Victim, count: int, seed: int, skips: int = 0) -> Tally:
    """Loads `count` hostile files of one kind; the same seed makes the same ones."""
    tally = Tally()
    for number in range(skips, skips + count):
        attempt = victim(random.Random(f"{seed} {name} {number}"))
        tally.kinds[attempt.what] += 1
        seen = _seen(attempt, tally)
        if seen:
            tally.other.append(f"{name} {number} ({attempt.what}): {seen}")
    return tally


def _seen(attempt: Attempt, tally: Tally) -> str:
    """Loads one file; returns what was wrong about that, "" if nothing."""
    events: list[str] = []
    before, started, seen = _forget_peak(), time.process_time(), ""
    signal.setitimer(signal.ITIMER_REAL, _HANGS)
    _watched.append(events)
    try:
        loaded = attempt.load()
        signal.setitimer(signal.ITIMER_REAL, 0)
        tally.loaded += 1
        if not all(np.isfinite(x).all() for x in attempt.arrays(loaded)):
            seen = "loaded weights that are not finite"
    except TfPoliciesError:
        tally.refused += 1
        seen = attempt.changed() or ""
    except _HangsError:
        seen = "hangs"
    except Exception as error:
        seen = repr(error)[:300]
    finally:
        _watched.pop()
        signal.setitimer(signal.ITIMER_REAL, 0)
    events = [event for event in events if attempt.may_start not in event]
    seconds, megabytes = time.process_time() - started, _peak_mb() - before
    tally.slowest, tally.largest = max(tally.slowest, seconds), max(tally.largest, megabytes)
    if seconds > CPU_SECONDS:
        seen += f" {seconds:.1f} s of CPU"
    if megabytes > MEGABYTES:
        seen += f" {megabytes:.0f} MB"
    return " ".join([seen, *dict.fromkeys(events)]).strip()


def watch(root: Path) -> None:
    """Begins to watch this process; for good, since an audit hook stays."""
    global _allowed_root
    _allowed_root = str(root)
    os.environ["TMPDIR"] = tempfile.tempdir = str(root)
    sys.addaudithook(_audit)
    signal.signal(signal.SIGALRM, _give_up)
    _tell_of_calls_into_the_command_line()
    size = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (size + _HEADROOM, resource.RLIM_INFINITY))


def main() -> int:
    """Tries all victims; returns 1 if anything but loading and refusing happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="files in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a part of a victim's name")
    parser.add_argument("--skip", type=int, default=0, help="files of each victim to leave out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    bad, files = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        victims = list(all_victims(root))
        watch(root)
        for name, victim, share in victims:
            if options.only and options.only not in name:
                continue
            count = max(1, round(share * options.count))
            tally = tried(name, victim, count, options.seed, options.skip)
            kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(tally.kinds.items()))
            print(f"{name}: {tally}\n    ({kinds})", flush=True)
            print(
                *[f"    {line}" for line in tally.other], sep="\n", end="\n" if tally.other else ""
            )
            bad, files = bad + len(tally.other), files + count
    print(f"{files} files, {bad} neither loaded nor refused in order; keras {keras.__version__}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
