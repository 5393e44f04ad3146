"""A training run killed again and again: `python -m benchmarks.kill_and_resume --kills 50`.

Trains PPO on CartPole-v1 from the command line with a checkpoint after every iteration, kills the
process (SIGKILL) at a random moment after it wrote one, and goes on with `--resume`. After each
kill the checkpoint must be whole and no older than the last one seen, and the run's CSV must have
no row twice. Exits with 1 at the first one that is not.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tfpolicies.policy.checkpoints import ALGORITHM_MANIFEST
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.storage.checkpoint import read_checkpoint

TRAIN = [sys.executable, "-m", "tfpolicies", "train"]


def iteration_of(run: Path) -> int:
    checkpoint = read_checkpoint(
        run / "checkpoints" / "latest", ALGORITHM_MANIFEST, kind="Algorithm"
    )
    return checkpoint.manifest["progress"]["iteration"]


def run_until_killed(command: list[str], runs: Path, seen: int, moment: float) -> Path:
    """Starts a run, waits until it has passed iteration `seen`, and kills it `moment` s later."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            manifest = Path("checkpoints", "latest", ALGORITHM_MANIFEST)
            found = [path for path in runs.glob("*") if (path / manifest).exists()]
            if found and iteration_of(found[0]) > seen:
                time.sleep(moment)
                return found[0]
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    raise SystemExit(f"{' '.join(command)} ended by itself with code {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        often = ["--checkpoint-every", "1", "--steps", "1000000000"]
        first = [*TRAIN, "CartPole-v1", "--seed", "0", "--run-dir", str(runs), *often]
        again = [*TRAIN, "--resume", str(runs)]
        seen = 0
        for kill in range(1, arguments.kills + 1):
            command = first if kill == 1 else again
            run = run_until_killed(command, runs, seen, moments.uniform(0.0, 0.5))
            now = iteration_of(run)
            rows = [int(row["iteration"]) for row in read_progress(run / "progress.csv")]
            whole = rows == list(range(1, len(rows) + 1)) and now > seen and len(rows) >= now
            print(f"kill {kill}: iteration {now}, {len(rows)} rows", flush=True)
            if not whole:
                raise SystemExit(f"after kill {kill}: iteration {seen} -> {now}, rows {rows[-5:]}")
            seen = now
    print(f"{arguments.kills} kills, each time the run went on from a whole checkpoint")


if __name__ == "__main__":
    main()
