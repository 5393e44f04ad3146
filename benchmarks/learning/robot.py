"""Measures PPO on a robot against Stable-Baselines3: whole training, environments included.

`python -m benchmarks.learning.robot --help` lists the options; README.md says how to read the
results.
"""

import argparse
import json
import sys
from typing import Any

from benchmarks.overview.main_job import compare, parser_beside
from benchmarks.overview.plan import Cell, Contestant, Measurement
from tools import peers

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
_SCRIPTS = {"ours": "learning/ours_robot.py", "SB3": "learning/peer_sb3_robot.py"}


def main() -> int:
    """Runs what the command line asks for; returns 1 if a contestant failed."""
    options = _parse()
    settings = SETTINGS | {"env": options.env} | options.set
    return compare(measurement(options.env), peers.SB3, settings, options, "robot.json")


def _parse() -> argparse.Namespace:
    parser = parser_beside([peers.SB3], "robot", __doc__)
    parser.add_argument("--quick", action="store_true", help="one short repetition of each")
    parser.add_argument("--env", default="HalfCheetah-v4", help="known to Gymnasium and EnvPool")
    parser.add_argument(
        "--set", type=json.loads, default={}, help="other settings as JSON, e.g. '{\"epochs\": 4}'"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
