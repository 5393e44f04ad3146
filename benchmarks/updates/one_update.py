"""Measures what one update per call costs beside its arithmetic.

`python -m benchmarks.updates.one_update` loads 2048 rows and updates a PPO policy with two layers
of 64 by 256 of them per `learn_on_loaded_batch`. In turns, in one process, it calls the compiled
function alone with tensors that are ready. Then it compares 80 calls to the same 80 updates as one
call of `learn_epochs`, and with `--sb3-python PATH` to Stable-Baselines3.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import FOLDER, probe

probe.hush()

import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from tfpolicies import PPOTF2Policy  # noqa: E402
from tfpolicies.testing import random_batch  # noqa: E402

ROWS, MINIBATCH, EPOCHS, CALLS = 2048, 256, 10, 1000
MOST = 0.3  # ms that a call may cost more than its compiled function


def made() -> tuple[PPOTF2Policy, Any]:
    """Returns a policy that has compiled its update, and a batch."""
    settings = {"sgd_minibatch_size": MINIBATCH, "model": {"fcnet_hiddens": [64, 64]}, "lr": 1e-5}
    policy = PPOTF2Policy(spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2), settings)
    batch = random_batch(policy, ROWS)
    policy.load_batch_into_buffer(batch)
    policy.learn_on_loaded_batch(0)
    policy.learn_epochs(batch, EPOCHS, MINIBATCH)
    return policy, batch


def bare(policy: PPOTF2Policy) -> Callable[[], Any]:
    """Returns the compiled function of one call, with ready tensors."""
    first_calls: Any = policy.program.inference.eager._first_calls
    run, taken = first_calls.run, []
    first_calls.run = lambda key, call, *more: taken.append(call) or run(key, call, *more)
    policy.learn_on_loaded_batch(0)
    first_calls.run = run
    (call,) = taken
    return call


def in_turns(*calls: Callable[[], Any], count: int) -> list[list[float]]:
    """Returns the ms of each call, made in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(count):
        for call, result in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            result.append(1e3 * (time.perf_counter() - began))
    return times


def sb3_ms(interpreter: Path) -> float:
    """Returns the ms of the same 80 updates by Stable-Baselines3."""
    script = FOLDER / "overview" / "peer_sb3.py"
    done = subprocess.run(
        [str(interpreter), str(script), "update"], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["figures"]["update"])


def main() -> int:
    """Prints the table; the exit status says whether a call costs too much."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.updates.one_update", description=__doc__
    )
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--sb3-python", type=Path, help="an interpreter that has its packages")
    options = parser.parse_args()
    policy, batch = made()
    offsets = [*range(0, ROWS, MINIBATCH)] * EPOCHS
    alone, call = in_turns(
        bare(policy), lambda: policy.learn_on_loaded_batch(MINIBATCH), count=options.calls
    )

    def many() -> None:
        for offset in offsets:
            policy.learn_on_loaded_batch(offset)

    eighty, one = in_turns(many, lambda: policy.learn_epochs(batch, EPOCHS, MINIBATCH), count=9)
    figures = {
        "the compiled function alone": statistics.median(alone),
        "learn_on_loaded_batch": statistics.median(call),
        f"{len(offsets)} calls": statistics.median(eighty),
        "the same as one call": statistics.median(one),
    }
    if options.sb3_python:
        figures["Stable-Baselines3"] = sb3_ms(options.sb3_python)
    table = Table(title=f"PPO, {MINIBATCH} rows per update: ms (medians)")
    for heading in ("what", "ms", "as a share of the 80 calls"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, value in figures.items():
        share = value / figures[f"{len(offsets)} calls"]
        table.add_row(name, f"{value:.2f}", f"{share:.3f}")
    more = statistics.median(b - a for a, b in zip(alone, call, strict=True))
    Console().print(table)
    print(f"A call costs {more:.2f} ms more than its function; at most {MOST} is the goal.")
    return int(more > MOST)


if __name__ == "__main__":
    sys.exit(main())
