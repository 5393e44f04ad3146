"""Training runs that are ended in every way: `python -m soak.run_endings`.

Trains PPO on CartPole-v1 (an MLP) from the command line, in processes that go on with each other's
run folder, and ends them:

* `--kills` by SIGKILL at a random moment after a checkpoint was written;
* `--pairs` of processes that resume one run at the same time: one trains, the other one is refused;
* `--signals` each by SIGINT, SIGTERM and SIGHUP at random moments, from the first line of the
  package on: while it imports, builds, trains, saves and exports. Two of five fall into the first
  second.

After each the checkpoint must be whole and no older than before, `progress.csv` must have the rows
1 to n once each, and the next process must go on from there. After a signal the process must have
ended within 5 seconds, with the status that `tfpolicies --help` tells, without losing an iteration,
and without leaving a temporary file or a process. Prints a line per part, and each violation; exits
with 1 if there was one. Processes that this script did not start are left alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from helpers.scripts import parse_options
from tfpolicies.cli.exit_codes import DONE, RUN_IN_USE
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.storage.checkpoint import read_checkpoint
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST

LIMIT = 5.0  # seconds in which a signal must have ended the process
BATCH = 256
FOREVER = 1_000_000_000
# Says when the first line of the package is about to run, with signals as a terminal leaves them.
LAUNCHER = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
class First:
    def find_spec(self, name, path=None, target=None):
        if name == "tfpolicies":
            os.write(told, b"!")
told = int(sys.argv.pop(1))
sys.meta_path.insert(0, First())
runpy.run_module("tfpolicies", run_name="__main__", alter_sys=True)
"""

Process = subprocess.Popen[bytes]


def get_iteration(run: Path) -> int:
    """Returns the iteration of a run's checkpoint, all of which is read; 0 if there is none."""
    folder = run / "checkpoints" / "latest"
    if not (folder / ALGORITHM_MANIFEST).exists():
        return 0
    checkpoint = read_checkpoint(folder, ALGORITHM_MANIFEST, kind="Algorithm")
    return checkpoint.manifest["progress"]["iteration"]


def get_rows(run: Path) -> list[int]:
    if not (run / "progress.csv").exists():
        return []
    return [int(row["iteration"]) for row in read_progress(run / "progress.csv")]


class Bench:
    """Runs and what their processes may leave.

    Args:
        folder: an empty one.
        seed: of the moments.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.runs = folder / "runs"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.moments = random.Random(seed)
        self.violations: list[str] = []
        self.errors = folder / "errors"

    @contextlib.contextmanager
    def training(self, *words: str) -> Iterator[tuple[Process, int]]:
        """Starts a training, and a file that tells of its first line; ends it on leaving."""
        reading, writing = os.pipe()
        with self.errors.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(writing), "train", *words],
                pass_fds=[writing],
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        os.close(writing)
        try:
            yield process, reading
        finally:
            os.close(reading)
            process.kill()
            process.wait()

    def new_run(self, *words: str) -> Path:
        """Trains a new run for some iterations; returns its folder."""
        known = set(self.runs.glob("*"))
        first = ["CartPole-v1", "--seed", "0", "--run-dir", str(self.runs), *words]
        with self.training(*first) as (process, _):
            if process.wait() != DONE:
                raise SystemExit(f"a plain training ended with {process.returncode}")
        return next(iter(set(self.runs.glob("*")) - known))

    def expect(self, what: str, **rules: bool) -> None:
        """Prints and keeps each rule that does not hold."""
        for rule, holds in rules.items():
            if not holds:
                self.violations.append(f"{what}: not {rule.replace('_', ' ')}")
                print(self.violations[-1], flush=True)
                print(self.errors.read_text()[-500:], flush=True)

    def check(self, what: str, run: Path, before: int) -> int:
        """Checks a run after a process of its has ended; returns the checkpoint's iteration."""
        now, rows = get_iteration(run), get_rows(run)
        self.expect(
            f"{what} (iteration {before} -> {now}, {len(rows)} rows)",
            checkpoint_as_new_as_before=now >= before,
            rows_once_each=rows == list(range(1, len(rows) + 1)),
            rows_up_to_the_checkpoint=len(rows) >= now,
        )
        return now


def find_processes(session: int) -> list[int]:
    """Returns the processes of a session that are no zombies."""
    results = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                results.append(int(stat.parent.name))
    return results


def wait_at_most(process: Process, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def wait_for(run: Path, seen: int, process: Process) -> bool:
    """Waits for a checkpoint after iteration `seen`; False if the process ends before."""
    while process.poll() is None:
        if get_iteration(run) > seen:
            return True
        time.sleep(0.01)
    return False


def kills(bench: Bench, count: int) -> None:
    run = bench.new_run("--steps", str(BATCH))
    seen = get_iteration(run)
    often = ["--checkpoint-every", "1", "--steps", str(FOREVER)]
    for kill in range(1, count + 1):
        with bench.training("--resume", str(run), *often) as (process, _):
            went_on = wait_for(run, seen, process)
            time.sleep(bench.moments.uniform(0.0, 0.5))
        bench.expect(f"kill {kill}", goes_on=went_on)
        seen = bench.check(f"kill {kill}", run, seen)
    print(f"{count} kills: {seen} iterations, {len(bench.violations)} violations", flush=True)


def pairs(bench: Bench, count: int) -> None:
    run = bench.new_run("--steps", str(BATCH))
    seen, result = get_iteration(run), len(bench.violations)
    ends: Counter[tuple[int, ...]] = Counter()
    for pair in range(1, count + 1):
        words = ["--resume", str(run), "--steps", str((seen + 20) * BATCH)]
        with bench.training(*words) as (one, _):
            time.sleep(bench.moments.choice([0.0, bench.moments.uniform(0.0, 0.3)]))
            with bench.training(*words) as (other, _):
                statuses = sorted([one.wait(), other.wait()])
        ends[tuple(statuses)] += 1
        now = bench.check(f"pair {pair}", run, seen)
        bench.expect(
            f"pair {pair} {statuses}",
            one_that_trains_and_one_that_is_refused=statuses == [DONE, RUN_IN_USE],
            trained_by_one_process=now == seen + 20,
        )
        seen = now
    actual = ", ".join(f"{n} ended with {a} and {b}" for (a, b), n in ends.items())
    print(f"{count} pairs: {actual}, {len(bench.violations) - result} violations", flush=True)


def signals(bench: Bench, number: signal.Signals, count: int) -> None:
    result, slowest = len(bench.violations), 0.0
    ends: Counter[int] = Counter()
    run = bench.new_run("--steps", str(BATCH))
    began = time.monotonic()
    with bench.training("--resume", str(run), *_more(0)) as (process, _):
        process.wait()
    whole = time.monotonic() - began
    for turn in range(1, count + 1):
        seen = get_iteration(run)
        moment = bench.moments.uniform(0.0, 1.0 if turn % 5 < 2 else whole)
        heard = bench.errors.stat().st_size
        what = f"{number.name} {turn} after {moment:.3f} s"
        with bench.training("--resume", str(run), *_more(seen)) as (process, reading):
            os.read(reading, 1)
            wait_at_most(process, moment)
            process.send_signal(number)
            sent = time.monotonic()
            wait_at_most(process, 60)
            seconds = time.monotonic() - sent
            left = find_processes(process.pid)
        # As shells tell it of who was ended by a signal itself: at the very end, Python no longer
        # sees to signals.
        status = process.returncode if process.returncode >= 0 else 128 - process.returncode
        ends[status] += 1
        slowest = max(slowest, seconds)
        now = bench.check(what, run, seen)
        bench.expect(
            f"{what} (status {process.returncode}, {seconds:.1f} s)",
            a_documented_status=status in (DONE, 128 + number),
            in_time=seconds < LIMIT,
            without_a_traceback=b"Traceback" not in bench.errors.read_bytes()[heard:],
            all_iterations_saved=len(get_rows(run)) - now <= 1,
            without_temporary_files=not list(run.rglob(".*.tfp-tmp")) + _left(bench),
            without_processes=not left,
        )
    actual = ", ".join(f"{n} with {status}" for status, n in sorted(ends.items()))
    new = len(bench.violations) - result
    print(
        f"{count} {number.name} over {whole:.1f} s: ended {actual}; slowest {slowest:.1f} s, "
        f"iteration {get_iteration(run)}, {new} violations",
        flush=True,
    )


def _more(iterations: int) -> list[str]:
    goal = str((iterations + 100) * BATCH)
    return ["--steps", goal, "--export", "--checkpoint-every", "7"]


def _left(bench: Bench) -> list[Path]:
    """Returns what of the package lies in the folder of temporary files."""
    return list(bench.temporary.glob("tfpolicies-*")) + list(bench.temporary.rglob("*.onnx"))


def main() -> None:
    arguments = parse_options(__doc__, kills=100, pairs=20, signals=(50, "of each kind"), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.seed)
        if arguments.kills:
            kills(bench, arguments.kills)
        if arguments.pairs:
            pairs(bench, arguments.pairs)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if arguments.signals else ():
            signals(bench, number, arguments.signals)
    if bench.violations:
        raise SystemExit(f"{len(bench.violations)} violations")


if __name__ == "__main__":
    main()
