"""Compares two commits in turns: `python -m benchmarks.commits.old_and_new --old REV`.

Measures the CPU time of acting (1 and 32 observations), of sampling (1, 8 and 32 environments, per
step) and of PPO's gradient steps (80 in one call, and one) on CartPole with two networks of 2 x 64
units; of sampling with many agents, in the town of `examples/traffic_grid.py`; and of writing and
reading 100 MB of arrays and of paging a policy into a map. Each pair is a
process of the old and one of the new commit, which do one thing and take turns at it, in stretches
of a tenth of a second: what else the machine does then slows both. A pair's ratio is the median of
old time / new time over its turns; what is printed is the median over pairs, above 1 where the new
commit is faster. Exits with 1 if one is below `--least`.

`--whole "league --policies 200"` measures another benchmark instead, each commit's own, as a whole:
the time of the process and the CPU time of it and of those that it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import FOLDER
from tools.commits import checked_out

HERE = Path(__file__).resolve().parent
VARIANTS = (
    ("acting", "onnx"),
    ("acting", "tf"),
    ("sampling", "vector"),
    ("sampling", "instances"),
    ("updates", "xla"),
    ("updates", "plain"),
    ("traffic", ""),
    ("files", ""),
)


class Measured:
    """A process that measures a commit, a stretch at a time.

    Attributes:
        names: of what it can measure.
    """

    def __init__(self, tree: Path, measurement: str, variant: str) -> None:
        self._scripts = tempfile.TemporaryDirectory()  # `benchmarks` of this commit, nothing else
        Path(self._scripts.name, "benchmarks").symlink_to(FOLDER)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "cpu_per_call.py"), measurement, variant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=tempfile.gettempdir(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join([self._scripts.name, str(tree)])},
        )
        answer = json.loads(self._line())
        if Path(answer["tree"]) != tree.resolve():
            raise SystemExit(f"measured {answer['tree']} instead of {tree}")
        self.names: list[str] = answer["figures"]

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._scripts.cleanup()

    def __call__(self, name: str) -> float:
        """Returns the µs of CPU per call or step, over a stretch."""
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        while line := self._process.stdout.readline():
            if line[0] in "{0123456789":
                return line
        raise SystemExit(f"{shlex.join(self._process.args)} ended")


def in_turns(
    old: Path, new: Path, measurement: str, variant: str, turns: int
) -> dict[str, tuple[float, float]]:
    """Returns old time / new time of a pair of processes, and the µs of the new one, by name."""
    results: dict[str, tuple[float, float]] = {}
    with Measured(old, measurement, variant) as before, Measured(new, measurement, variant) as now:
        for name in now.names:
            both = [(before(name), now(name)) for _ in range(turns)]
            ratio = statistics.median(earlier / later for earlier, later in both)
            results[name] = ratio, statistics.median(later for _, later in both)
    return results


def whole(tree: Path, command: str) -> dict[str, float]:
    """Returns the µs that a benchmark of a commit takes, by the clock and of CPU."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    name, *arguments = shlex.split(command)
    cpu_before, began = cpu(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
    )
    return {"wall": (time.perf_counter() - began) * 1e6, "CPU": (cpu() - cpu_before) * 1e6}


def as_wholes(old: Path, new: Path, command: str) -> dict[str, tuple[float, float]]:
    """Returns old time / new time of a benchmark of both commits, and the µs of the new one."""
    before, now = whole(old, command), whole(new, command)
    return {name: (before[name] / now[name], now[name]) for name in now}


def main() -> int:
    """Measures and prints; returns 1 if a ratio is too small."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", required=True, help="revision to compare with")
    parser.add_argument("--new", default="HEAD", help="revision that is compared")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--turns", type=int, default=20, help="of each figure, in a pair")
    parser.add_argument("--only", default="", help='of what is measured, such as "acting tf"')
    parser.add_argument("--whole", action="append", help="another benchmark with its options")
    parser.add_argument("--least", type=float, default=0.97, help="smallest ratio that is fine")
    options = parser.parse_args()
    variants = [pair for pair in VARIANTS if " ".join(pair).startswith(options.only)]
    if options.whole:
        variants = [("whole", command) for command in options.whole]
    ratios: dict[tuple[str, str, str], list[float]] = {}
    micros: dict[tuple[str, str, str], list[float]] = {}
    with checked_out(options.old) as old, checked_out(options.new) as new:
        for pair in range(options.pairs):
            for measurement, variant in variants:
                result = (
                    as_wholes(old, new, variant)
                    if options.whole
                    else in_turns(old, new, measurement, variant, options.turns)
                )
                for name, (ratio, micro) in result.items():
                    ratios.setdefault((measurement, variant, name), []).append(ratio)
                    micros.setdefault((measurement, variant, name), []).append(micro)
            print(f"pair {pair + 1} of {options.pairs}", file=sys.stderr)
    medians = {key: statistics.median(result) for key, result in ratios.items()}
    for key, median in medians.items():
        each = ratios[key]
        print(
            f"{' '.join(key):24} old / new {median:.3f} ({min(each):.3f}-{max(each):.3f}), "
            f"new {statistics.median(micros[key]):.2f} µs"
        )
    return 1 if min(medians.values()) < options.least else 0


if __name__ == "__main__":
    raise SystemExit(main())
