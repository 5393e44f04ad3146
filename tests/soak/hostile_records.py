"""Damaged and hostile files of recorded steps: `PYTHONPATH=tests python -m soak.hostile_records`.

Reads files of each format, made by seeded mutation and by hand, in the child process that parses
untrusted files, and packed columns also in this process. Each must be refused by an error of this
package or be read; nothing may be executed, hang or end this process. Prints how many were refused
and read, and the largest CPU time and memory of a child: at most 2 s, and 0.15 s per megabyte of
the file, and 500 MB. `--count` is the number per format.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from gymnasium import spaces

from tfpolicies.errors import TfPoliciesError
from tfpolicies.offline.block_reader import BlockReader
from tfpolicies.offline.column_map import ColumnMap
from tfpolicies.offline.data_spaces import infer_spaces
from tfpolicies.offline.open_data import open_data
from tfpolicies.offline.source_process import SECONDS_PER_MEGABYTE

MAX_SECONDS, MAX_MEGABYTES, MAX_WALL_SECONDS = 2.0, 500, 30.0
SPACES = spaces.Box(-np.inf, np.inf, (3,)), spaces.Discrete(2)
NAMES = ("obs", "actions", "rewards", "eps_id", "t", "terminateds")
logging.getLogger("tfpolicies").setLevel(logging.ERROR)


def read_file(path: Path, trusted: bool, infers: bool) -> str:
    """Reads a file as training would; returns "read", or the message of its refusal."""
    source = None
    try:
        source = open_data(path, trusted=trusted)
        if infers:
            infer_spaces(source)
            return "read"
        column_map = ColumnMap(source.column_names)
        names = column_map.find_sources(NAMES, ("obs", "actions"))
        reader = BlockReader(
            source, names, seed=0, shuffle_rows=1000, find_starts=column_map.find_starts
        )
        while reader.position.epoch == 0:
            block = reader.read_block()
            for chunk in block.chunks:
                column_map.read(chunk, SPACES, NAMES)
    except TfPoliciesError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if source is not None:
            source.close()
    return "read"


def get_child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def attack(folder: Path, canary: Path, trusted: bool, show: bool) -> None:
    """Reads the files in a folder; prints the figures and the failures."""
    failures: list[str] = []
    outcomes: collections.Counter[str] = collections.Counter()
    seconds, slowest, longest = 0.0, "", 0.0
    labels = json.loads((folder / "labels.txt").read_text())
    for name, label in labels.items():
        runs = (False, True) if label.startswith("by hand") else (False,)
        for infers in runs:
            before, start = get_child_seconds(), time.monotonic()
            try:
                outcome = read_file(folder / name, trusted, infers)
            except Exception as error:
                outcome = "failed"
                failures.append(f"{name}, {label}: {type(error).__name__}: {error!s:.300}")
            duration, wall = get_child_seconds() - before, time.monotonic() - start
            if show:
                print(
                    f"{name}, {label} [{duration:.2f} s, {wall:.2f} s]: {outcome:.300}", flush=True
                )
            if not infers:
                outcomes[outcome if outcome in ("read", "failed") else "refused"] += 1
            longest = max(longest, wall)
            if duration > seconds:
                seconds, slowest = duration, label
            limit = MAX_SECONDS + SECONDS_PER_MEGABYTE * (folder / name).stat().st_size / (1 << 20)
            if duration > limit or wall > MAX_WALL_SECONDS:
                failures.append(f"{name}, {label}: {duration:.2f} s of CPU, {wall:.2f} s")
            if canary.exists():
                failures.append(f"{name}, {label}: code was executed")
                canary.unlink()
    megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    if megabytes > MAX_MEGABYTES:
        failures.append(f"{megabytes} MB")
    place = "in this process" if trusted else f"in child processes of at most {megabytes} MB"
    print(f"{place}: {dict(outcomes)}; {seconds:.2f} s of CPU ({slowest}), {longest:.2f} s in all")
    print("\n".join(f"FAILED {failure}" for failure in failures), flush=True)
    sys.exit(bool(failures))


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--kinds", default="parquet,json,packed,zip")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        folder, canary, trusted = options.attack
        attack(Path(folder), Path(canary), trusted == "1", options.show)
    status = 0
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            canary = Path(folder, "canary")
            make = "import sys; from pathlib import Path; from helpers.hostile_records import *; "
            make += "write_files(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])"
            arguments = [folder, kind, str(options.count), str(canary)]
            subprocess.run([sys.executable, "-c", make, *arguments], check=True)
            for trusted in ("0", "1") if kind == "packed" else ("0",):
                print(f"{kind}, ", end="", flush=True)
                command = [sys.executable, "-m", "soak.hostile_records"]
                command += ["--show"] * options.show
                # In a process of its own: the memory of a parent counts as that of its children.
                status |= subprocess.run(
                    [*command, "--attack", folder, str(canary), trusted]
                ).returncode
    return int(bool(status))


if __name__ == "__main__":
    sys.exit(main())
