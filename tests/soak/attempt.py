"""Attempts to load a hostile or damaged input, and the tally of what comes of them."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import TfPoliciesError

CPU_SECONDS, MEGABYTES = 2.0, 500.0  # at most, for one input


class Attempt(NamedTuple):
    """One hostile input, ready to be loaded."""

    what: str  # for the report
    load: Callable[[], Any]
    changed: Callable[[], str | None] = lambda: None  # what a refusal has changed; None if nothing
    arrays: Callable[[Any], Any] = lambda _: []  # the arrays of what was loaded
    may_start: str = "nothing"  # the program that it may run in a process of its own


Victim = Callable[[random.Random], Attempt]


class Tally:
    """The ends of attempts: each input must be loaded or refused, and do nothing else."""

    def __init__(self) -> None:
        self.loaded = self.refused = 0
        self.kinds: Counter[str] = Counter()
        self.other: list[str] = []  # what must not be, one line each
        self.slowest = self.largest = 0.0

    def __str__(self) -> str:
        return (
            f"loaded {self.loaded}, refused {self.refused}, other {len(self.other)}; at most "
            f"{self.slowest:.2f} s of CPU and {self.largest:.0f} MB a file"
        )

    def attack(
        self,
        name: str,
        victim: Victim,
        numbers: range,
        seed: int,
        *,
        watch: Callable[[], AbstractContextManager[list[str]]] | None = None,
        refusal: type[Exception] = TfPoliciesError,
    ) -> None:
        """Loads a hostile input for each number; the same seed makes the same ones."""
        for number in numbers:
            attempt = victim(random.Random(f"{seed} {name} {number}"))
            self.kinds[attempt.what] += 1
            fault = self._load(attempt, watch or watch_events, refusal)
            if fault:
                self.other.append(f"{name} {number} ({attempt.what}): {fault}")

    def _load(self, attempt: Attempt, watch: Any, refusal: type[Exception]) -> str:
        """Loads one input; returns what was wrong about that, "" if nothing."""
        before, started, fault = _forget_peak(), time.process_time(), ""
        with watch() as events:
            try:
                loaded = attempt.load()
                self.loaded += 1
                if not all(np.isfinite(x).all() for x in attempt.arrays(loaded)):
                    fault = "loaded weights that are not finite"
            except refusal:
                self.refused += 1
                fault = attempt.changed() or ""
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                fault = repr(error)[:300]
        faults = [fault, *dict.fromkeys(x for x in events if attempt.may_start not in x)]
        seconds, megabytes = time.process_time() - started, _peak_mb() - before
        self.slowest, self.largest = max(self.slowest, seconds), max(self.largest, megabytes)
        if seconds > CPU_SECONDS:
            faults.append(f"{seconds:.1f} s of CPU")
        if megabytes > MEGABYTES:
            faults.append(f"{megabytes:.0f} MB")
        return " ".join(faults).strip()


def _peak_mb() -> float:
    """Returns the most memory since `_forget_peak`, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def _forget_peak() -> float:
    """Begins to measure the peak of memory again; returns what it is now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_mb()


# Watching -----------------------------------------------------------------------------------------

_FORBIDDEN = ("exec", "compile", "marshal", "pickle", "os.system", "os.exec", "subprocess")
_FORBIDDEN += ("socket",)
_watchers: list[tuple[Callable[[str, Any], str], list[str]]] = []


@functools.cache
def _watch_process() -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if _watchers:
            judge, events = _watchers[-1]
            events += filter(None, [judge(event, arguments)])

    sys.addaudithook(audit)  # for good


def _find_execution(event: str, _: Any) -> str:
    return event if event.startswith(_FORBIDDEN) else ""


@contextlib.contextmanager
def watch_events(judge: Callable[[str, Any], str] = _find_execution) -> Iterator[list[str]]:
    """Collects what `judge` says of audit events: by default of running, unpickling, connecting."""
    _watch_process()
    _watchers.append((judge, []))
    try:
        yield _watchers[-1][1]
    finally:
        _watchers.pop()


# Damage -------------------------------------------------------------------------------------------


def damage_bytes(image: bytes, rng: random.Random) -> bytes:
    """Changes, cuts off, repeats, inserts or deletes bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        image = rng.choice(_DAMAGES)(image, rng)
    return image


def damage_file(path: Path, rng: random.Random) -> None:
    """Damages the bytes of a file, or deletes it."""
    if rng.random() < 0.25:
        path.unlink()
    else:
        path.write_bytes(damage_bytes(path.read_bytes(), rng))


def _flip(image: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(image)
    for _ in range(rng.choice((1, 2, 8, 64)) if image else 0):
        damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 255, rng.randrange(256)))
    return bytes(damaged)


def _truncate(image: bytes, rng: random.Random) -> bytes:
    return image[: rng.randrange(len(image) + 1)]


def _number(image: bytes, rng: random.Random) -> bytes:
    """Overwrites an aligned field, as addresses and lengths are, with a telling number."""
    at, size = 8 * rng.randrange(len(image) // 8 + 1), len(image)
    choices = (0, 2**64 - 1, 1 << rng.randrange(64), rng.randrange(size + 8))
    number = rng.choice((*choices, 8 * rng.randrange(999)))
    return image[:at] + number.to_bytes(8, "little") + image[at + 8 :]


def _splice(image: bytes, rng: random.Random) -> bytes:
    size = rng.randrange(1, 600)
    to, source = rng.randrange(len(image) + 1), rng.randrange(len(image) + 1)
    return image[:to] + image[source : source + size] + image[to + size :]


def _shift(image: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(image) + 1), rng.randrange(1, 64)
    if rng.random() < 0.5:
        return image[:at] + image[at + size :]
    return image[:at] + rng.randbytes(size) + image[at:]


_DAMAGES = (_flip, _flip, _number, _number, _truncate, _splice, _shift)
