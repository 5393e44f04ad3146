"""Measures PPO on a robot against Stable-Baselines3: whole training, environments included.

`python -m benchmarks.robot --help` lists the options; README.md says how to read the results.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import peers
from benchmarks.main_job import HERE, compare
from benchmarks.plan import Cell, Contestant, Measurement

SETTINGS: dict[str, Any] = {
    "num_envs": 8,
    "fragment": 256,
    "minibatch": 64,
    "epochs": 10,
    "lr": 3e-4,
    "gamma": 0.99,
    "lambda": 0.95,
    "clip": 0.2,
    "grad_clip": 0.5,
    "vf_loss_coeff": 0.5,
    "hidden": [64, 64],
    "first_seed": 10,
}
"""Stable-Baselines3's defaults for PPO, with 8 environments; `--set` changes them for both."""


def measurement(env: str) -> Measurement:
    """Returns what is measured: Gymnasium's environments, and EnvPool's, of both contestants."""
    pairs = [(name, *way) for way in _WAYS for name in ("ours", "SB3")]
    return Measurement(
        "training",
        f"PPO on {env}: sampling and learning",
        (Cell("training", "training", "steps/s", higher_is_better=True),),
        tuple(
            Contestant(f"{name}, {label}", name.lower(), _SCRIPTS[name], variant)
            for name, label, variant in pairs
        ),
    )


_WAYS = (("Gymnasium", "gymnasium"), ("EnvPool", "envpool"))
_SCRIPTS = {"ours": "ours_robot.py", "SB3": "peer_sb3_robot.py"}


def main() -> int:
    """Runs what the command line asks for; returns 1 if a contestant failed."""
    options = _parse()
    console = Console()
    console.width = max(console.width, 120)
    interpreters = {"ours": Path(sys.executable)}
    if options.sb3_python:
        interpreters["sb3"] = options.sb3_python.absolute()
    else:
        try:
            interpreters["sb3"] = peers.interpreter(peers.SB3, options.peers)
        except peers.PeerError as error:
            console.print(f"[red]{error}[/red]", highlight=False)
            return 1
    settings = SETTINGS | {"env": options.env} | options.set
    taken = measurement(options.env)
    return compare(console, taken, interpreters, settings, options, "robot.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robot", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short repetition of each")
    parser.add_argument("--env", default="HalfCheetah-v4", help="known to Gymnasium and EnvPool")
    parser.add_argument(
        "--set", type=json.loads, default={}, help="other settings as JSON, e.g. '{\"epochs\": 4}'"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for robot.json")
    parser.add_argument(
        "--peers", type=Path, default=HERE / ".peers", help="folder for the peer's environment"
    )
    parser.add_argument(
        "--sb3-python", type=Path, help="an interpreter that has sb3's packages already"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
