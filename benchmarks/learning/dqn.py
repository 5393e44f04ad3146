"""Measures DQN on CartPole-v1 against Stable-Baselines3, with the same hyperparameters.

`python -m benchmarks.learning.dqn --help` lists the options; README.md says how to read the
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
    "goal": 475.0,
    "max_steps": 200_000,
    "num_envs": 1,
    "train_freq": 256,
    "gradient_steps": 128,
    "batch": 64,
    "capacity": 100_000,
    "learning_starts": 1000,
    "target_interval": 10,
    "lr": 2.3e-3,
    "gamma": 0.99,
    "epsilon_steps": 8000,
    "final_epsilon": 0.04,
    "grad_clip": 10.0,
    "hidden": [256, 256],
    "rounds": 8,  # of sampling and learning, between evaluations
    "episodes": 20,  # greedy ones of an evaluation
    "first_seed": 10,
}
"""Those of RL Baselines3 Zoo for CartPole-v1; `--set` changes them for both contestants."""

MEASUREMENT = Measurement(
    "learning",
    "DQN on CartPole-v1 to a mean return of 475 in 20 greedy episodes",
    (
        Cell("seconds", "time from process start", "s"),
        Cell("setup", "of which start-up", "s"),
        Cell("steps", "environment steps", "steps"),
    ),
    (
        Contestant("ours", "ours", "learning/ours_dqn.py"),
        Contestant("SB3", "sb3", "learning/peer_sb3_dqn.py"),
    ),
    startup_counts=True,
)


def main() -> int:
    """Runs what the command line asks for; returns 1 if a contestant failed."""
    options = _parse()
    return compare(MEASUREMENT, peers.SB3, SETTINGS | options.set, options, "dqn.json")


def _parse() -> argparse.Namespace:
    parser = parser_beside([peers.SB3], "dqn", __doc__)
    parser.add_argument("--quick", action="store_true", help="one seed only")
    parser.add_argument(
        "--set", type=json.loads, default={}, help="other settings as JSON, e.g. '{\"lr\": 1e-3}'"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
