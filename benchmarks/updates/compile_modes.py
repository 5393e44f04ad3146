"""Measures the forms of an update (plain, XLA, a plain loop around an XLA step) and acting.

`python -m benchmarks.updates.compile_modes` prints a table of PPO updates over networks of many
kinds, with the form that "auto" takes, and a table of acting through ONNX Runtime and TensorFlow.
With `--sb3`, Stable-Baselines3 learns from images beside it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import probe
from tools import peers

probe.hush()

import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from tfpolicies import PPOConfig, PPOTF2Policy  # noqa: E402
from tfpolicies.program.compile_mode import CompileMode  # noqa: E402
from tfpolicies.testing import random_batch  # noqa: E402

ROUNDS = 5
COMPILES_QUICKLY = 20.0  # seconds; slower forms are no measure for "auto"
HOPELESS = 10.0  # times as long as the best: one round tells enough
ACTING_ROWS = (1, 8, 32)
SETTINGS = {CompileMode.PLAIN: False, CompileMode.STEP: True, CompileMode.LOOP: "auto"}
"""One Program for each form: these settings make policies of different kinds."""


@dataclass(frozen=True)
class Case:
    """A network, and the update that it is measured with."""

    name: str
    shape: tuple[int, ...]
    model: dict[str, Any] = field(default_factory=dict)
    rows: int = 2048
    minibatch: int = 256
    epochs: int = 10

    def policy(self, **config: Any) -> PPOTF2Policy:
        """Returns a policy with this network."""
        space = spaces.Box(-1.0, 1.0, self.shape, np.float32)
        if len(self.shape) == 3:
            space = spaces.Box(0, 255, self.shape, np.uint8)
        settings = PPOConfig().to_dict() | {"model": self.model, "seed": 0} | config
        return PPOTF2Policy(space, spaces.Discrete(4), settings)


def _images(side: int, channels: int = 4) -> Case:
    return Case(f"images {side}", (side, side, channels), {}, 256, 64, 2)


def _memory(name: str, **model: Any) -> Case:
    return Case(name, (8,), {"fcnet_hiddens": [64], **model}, 2000, 200, 2)


CASES = (
    Case("MLP 64", (8,), {"fcnet_hiddens": [64, 64]}),
    Case("MLP 256", (8,), {"fcnet_hiddens": [256, 256]}),
    *(_images(side) for side in (42, 64, 84)),
    *(_memory(f"LSTM {n}", use_lstm=True, lstm_cell_size=n) for n in (64, 256)),
    *(_memory(f"GRU {n}", use_gru=True, lstm_cell_size=n) for n in (64, 256)),
    _memory("attention", use_attention=True),
)


# -- updates ----------------------------------------------------------------------------------


@dataclass
class Measured:
    """One form of an update."""

    compile_s: float
    update_ms: float


def updates(
    case: Case, forms: tuple[CompileMode, ...]
) -> tuple[dict[CompileMode, Measured], CompileMode]:
    """Returns what each form takes, in interleaved rounds, and the form that "auto" is."""
    batch = random_batch(case.policy(), case.rows)
    calls: dict[CompileMode, Callable[[], float]] = {}
    first: dict[CompileMode, float] = {}
    automatic = CompileMode.PLAIN
    for form in forms:
        policy = case.policy(jit_compile=SETTINGS[form])
        policy._learner.discover_columns()
        if form is CompileMode.LOOP:
            automatic = policy.program.updates.resolve_compile_mode(policy._state)
        policy.program.updates.compile_mode = form

        def call(policy: PPOTF2Policy = policy) -> float:
            began = time.perf_counter()
            policy.learn_epochs(batch, case.epochs, case.minibatch)
            return time.perf_counter() - began

        calls[form], first[form] = call, call()
    times: dict[CompileMode, list[float]] = {form: [calls[form]()] for form in forms}
    least = min(result[0] for result in times.values())
    for _ in range(ROUNDS - 1):
        for form, result in times.items():
            if result[0] < HOPELESS * least:
                result.append(calls[form]())
    medians = {form: statistics.median(result) for form, result in times.items()}
    measured = {form: Measured(first[form] - t, 1e3 * t) for form, t in medians.items()}
    return measured, automatic


def update_table(cases: list[Case]) -> Table:
    """Measures the updates of all cases."""
    table = Table(title="PPO updates: ms (s until the first was done); * what auto takes")
    for heading in ("network", *(form.value for form in CompileMode), "auto / best"):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    for case in cases:
        result, automatic = updates(case, tuple(CompileMode))
        cells = [
            f"{'* ' * (form is automatic)}{cost.update_ms:.1f} ({cost.compile_s:.1f})"
            for form, cost in ((form, result[form]) for form in CompileMode)
        ]
        quick = [x.update_ms for x in result.values() if x.compile_s < COMPILES_QUICKLY]
        ratio = result[automatic].update_ms / min(quick)
        table.add_row(case.name, *cells, f"{ratio:.2f}")
        print(case.name, *cells, f"{ratio:.2f}", file=sys.stderr, flush=True)
    return table


# -- acting -----------------------------------------------------------------------------------


def acting_table(cases: list[Case], seconds: float) -> Table:
    """Measures acting in both ways, in interleaved rounds."""
    table = Table(title="compute_actions: µs through ONNX Runtime / TensorFlow; auto against best")
    for heading in ("network", *(f"{rows} rows" for rows in ACTING_ROWS), "auto", "worst ratio"):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    for case in cases:
        policies = {way: case.policy(inference=way) for way in ("onnx", "tf")}
        automatic = case.policy(inference="auto").driver.acting.inference
        cells, worst = [], 0.0
        for rows in ACTING_ROWS:
            taken = {way: _acting(policy, rows, seconds) for way, policy in policies.items()}
            cells.append(f"{taken['onnx']:.0f} / {taken['tf']:.0f}")
            worst = max(worst, taken[automatic] / min(taken.values()))
        table.add_row(case.name, *cells, automatic, f"{worst:.2f}")
        print(case.name, *cells, automatic, f"{worst:.2f}", file=sys.stderr, flush=True)
    return table


def _acting(policy: PPOTF2Policy, rows: int, seconds: float) -> float:
    columns = random_batch(policy, rows)
    state = [np.zeros((rows, *x.shape), x.dtype) for x in policy.get_initial_state()]
    obs = np.asarray(columns["obs"])
    return probe.microseconds(lambda: policy.compute_actions(obs, state or None), seconds)


def sb3_table(interpreter: Path, rounds: int = 3) -> Table:
    """Measures the update on images of 84 x 84 x 4 beside Stable-Baselines3, in turns."""
    script = Path(__file__).with_name("peer_sb3_images.py")
    case = next(case for case in CASES if case.name == "images 84")
    policy = case.policy(jit_compile="auto")
    batch = random_batch(policy, case.rows)
    policy.learn_epochs(batch, case.epochs, case.minibatch)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {}
    for _ in range(rounds):
        for _ in range(ROUNDS):
            began = time.perf_counter()
            policy.learn_epochs(batch, case.epochs, case.minibatch)
            ours.append(1e3 * (time.perf_counter() - began))
        done = subprocess.run(
            [str(interpreter), str(script), "images"], capture_output=True, text=True, check=True
        )
        for name, value in json.loads(done.stdout.splitlines()[-1])["figures"].items():
            theirs.setdefault(name, []).append(value)
    table = Table(title="PPO update on 256 images 84 x 84 x 4, minibatch 64, 2 epochs: ms")
    table.add_column("who")
    table.add_column("median", justify="right")
    table.add_row("ours, auto", f"{statistics.median(ours):.0f}")
    for name, values in theirs.items():
        table.add_row(f"SB3, {name}", f"{statistics.median(values):.0f}")
    return table


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.updates.compile_modes", description=__doc__
    )
    parser.add_argument("--only", nargs="*", help="names of networks; all by default")
    parser.add_argument("--sb3", action="store_true", help="Stable-Baselines3 on images, too")
    parser.add_argument("--sb3-python", type=Path, help="an interpreter that has its packages")
    parser.add_argument("--peers", type=Path, default=peers.PEERS, help="else made here")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure of acting")
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.only or case.name in options.only]
    console = Console()
    console.width = max(console.width, 110)
    console.print(update_table(chosen))
    console.print(acting_table(chosen, options.seconds))
    peer_python = options.sb3_python
    if options.sb3 or peer_python:
        console.print(sb3_table(peer_python or peers.interpreter(peers.SB3, options.peers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
