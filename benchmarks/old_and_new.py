"""Compares two commits of this package, in turns: `python -m benchmarks.old_and_new --old REV`.

Measures the CPU time of acting (1 and 32 observations), of sampling (1, 8 and 32 environments, per
step) and of PPO's gradient steps (80 in one call, and one) on CartPole with two networks of 2 x 64
units; and of sampling with many agents, in the town of `examples/traffic_grid.py`. Each figure
comes from a process that does one thing; processes of the old and of the new commit take turns, in
pairs. What is printed is the median over pairs of old time / new time: above 1 the new commit is
faster. Exits with 1 if one is below `--least`.

`--whole "league --policies 200"` measures another benchmark instead, each commit's own, as a whole:
the time of the process and the CPU time of it and of those that it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
VARIANTS = (
    ("acting", "onnx"),
    ("acting", "tf"),
    ("sampling", "vector"),
    ("sampling", "instances"),
    ("updates", "xla"),
    ("updates", "plain"),
    ("traffic", ""),
)


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yields a folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(HERE.parent), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def figures(tree: Path, measurement: str, variant: str, seconds: float) -> dict[str, float]:
    """Returns the µs of CPU per call or step that one process of a commit measured."""
    command = [sys.executable, str(HERE / "cpu_per_call.py"), measurement, variant]
    command += ["--seconds", str(seconds)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
        env={**os.environ, "PYTHONPATH": str(tree)},
    )
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if Path(answer["tree"]) != tree.resolve():
        raise SystemExit(f"measured {answer['tree']} instead of {tree}")
    return answer["figures"]


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


def main() -> int:
    """Measures and prints; returns 1 if a ratio is too small."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", required=True, help="revision to compare with")
    parser.add_argument("--new", default="HEAD", help="revision that is compared")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each figure")
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
                order = (old, new) if pair % 2 == 0 else (new, old)
                found = {
                    tree: whole(tree, variant)
                    if options.whole
                    else figures(tree, measurement, variant, options.seconds)
                    for tree in order
                }
                for name, before in found[old].items():
                    key = (measurement, variant, name)
                    ratios.setdefault(key, []).append(before / found[new][name])
                    micros.setdefault(key, []).append(found[new][name])
            print(f"pair {pair + 1} of {options.pairs}", file=sys.stderr)
    medians = {key: statistics.median(found) for key, found in ratios.items()}
    for key, median in medians.items():
        each = ratios[key]
        print(
            f"{' '.join(key):24} old / new {median:.3f} ({min(each):.3f}-{max(each):.3f}), "
            f"new {statistics.median(micros[key]):.2f} µs"
        )
    return 1 if min(medians.values()) < options.least else 0


if __name__ == "__main__":
    raise SystemExit(main())
