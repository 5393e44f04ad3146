"""One call for many policies against a call for each: `python -m benchmarks.league.stacked`.

Prints milliseconds for all policies together, and ratios. Everybody has turns: a round measures
each for `--seconds`, and figures are medians over the rounds. With `--rllib-python PATH` (an
interpreter as `tools.peers` makes it), RLlib's traced TF2 policies take part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table

from tfpolicies import PPOTF2Policy
from tfpolicies.policy_map.stacked_acting import compute_actions

_SMALL_IMAGE = {"conv_filters": [[16, [3, 3], 1]], "post_fcnet_hiddens": [64]}
_TANH = {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False}
KINDS: dict[str, tuple[spaces.Space, dict[str, Any], int, int]] = {
    "2x64 tanh, CartPole": (spaces.Box(-5, 5, (4,), np.float32), _TANH, 64, 16),
    "LSTM of 64": (
        spaces.Box(-5, 5, (4,), np.float32),
        {"fcnet_hiddens": [64], "use_lstm": True, "lstm_cell_size": 64},
        64,
        16,
    ),
    "CNN, 10x10x4": (spaces.Box(0, 255, (10, 10, 4), np.uint8), _SMALL_IMAGE, 64, 16),
    "CNN, 84x84x4": (spaces.Box(0, 255, (84, 84, 4), np.uint8), {}, 8, 4),
}
"""By name: observation space, model, policies, rows of each."""


def milliseconds(call: Callable[[], Any], seconds: float) -> float:
    """Returns the median duration of `call` in ms, over `seconds` and at least three calls."""
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while len(durations) < 3 or time.perf_counter() < end:
        before = time.perf_counter()
        call()
        durations.append(time.perf_counter() - before)
    return statistics.median(durations) * 1e3


def ways(kind: str, inference: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns what acts stacked, and what acts one by one, with policies of their own."""
    space, model, count, rows = KINDS[kind]
    rng = np.random.default_rng(0)

    def policies() -> dict[str, Any]:
        config = {"model": model, "inference": inference}
        return {
            f"p{i}": PPOTF2Policy(space, spaces.Discrete(2), {**config, "seed": i})
            for i in range(count)
        }

    obs = {
        f"p{i}": (20 * rng.random((rows, *space.shape))).astype(space.dtype) for i in range(count)
    }
    together, alone = policies(), policies()
    starts = [np.zeros((rows, *x.shape), np.float32) for x in together["p0"].get_initial_state()]
    memories = dict.fromkeys(obs, starts) if starts else None

    def stacked() -> None:
        compute_actions(together, obs, memories)

    def one_by_one() -> None:
        for name, policy in alone.items():
            policy.compute_actions(obs[name], starts or None)

    stacked(), one_by_one()
    return stacked, one_by_one


@contextmanager
def rllib(python: Path) -> Iterator[Callable[[float], float]]:
    """Starts RLlib with policies like those of the first kind; yields its stop watch."""
    _, _, count, rows = next(iter(KINDS.values()))
    script = Path(__file__).with_name("peer_rllib_stacked.py")
    command = [str(python), str(script), str(count), str(rows)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        stdin, said = child.stdin, child.stdout
        if stdin is None or said is None:
            raise SystemExit("RLlib's process has no pipes.")
        if said.readline() != "ready\n":
            raise SystemExit(f"RLlib did not start; `{' '.join(command)}` says why.")

        def measure(seconds: float) -> float:
            print(seconds, file=stdin, flush=True)
            return float(said.readline())

        yield measure
        stdin.close()


def measured(
    kind: str, inference: str, options: argparse.Namespace, peer: Callable[[float], float] | None
) -> dict[str, float]:
    """Returns the milliseconds of everybody, by name."""
    stacked, one_by_one = ways(kind, inference)
    results: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        results.setdefault("stacked", []).append(milliseconds(stacked, options.seconds))
        results.setdefault("own", []).append(milliseconds(one_by_one, options.seconds))
        if peer is not None:
            results.setdefault("rllib", []).append(peer(options.seconds))
    return {name: statistics.median(values) for name, values in results.items()}


def main() -> None:
    """Prints the table and, on the last line, the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=KINDS, action="append", help="kinds of policies")
    parser.add_argument("--rllib-python", type=Path)
    options = parser.parse_args()
    chosen = options.only or list(KINDS)
    if options.rllib_python is None:
        rows = _rows(chosen, options, None)
    else:
        with rllib(options.rllib_python) as peer:
            rows = _rows(chosen, options, peer)
    table = Table(title="Acting with all policies once, ms")
    headings = ["policies", "runtime", "stacked", "own calls", "ratio", "RLlib tf2", "ratio"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:2] else "right")
    for kind, inference, figures in rows:
        _, _, count, each = KINDS[kind]
        cells = [f"{count} x {each}: {kind}", inference, f"{figures['stacked']:.2f}"]
        for name in ("own", "rllib"):
            known = name in figures
            cells.append(f"{figures[name]:.1f}" if known else "")
            cells.append(f"{figures[name] / figures['stacked']:.1f}" if known else "")
        table.add_row(*cells)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    print(json.dumps(rows), file=sys.stdout)


def _rows(
    chosen: list[str], options: argparse.Namespace, peer: Callable[[float], float] | None
) -> list[tuple[str, str, dict[str, float]]]:
    first = next(iter(KINDS))
    return [
        (kind, inference, measured(kind, inference, options, peer if kind == first else None))
        for kind in chosen
        for inference in ("onnx", "tf")
    ]


if __name__ == "__main__":
    main()
