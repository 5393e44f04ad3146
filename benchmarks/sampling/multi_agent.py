"""Measures sampling with many agents against RLlib's old TensorFlow stack, in one run.

25 cars and 4 traffic lights, three policies, 8 copies of the town (`examples/traffic_grid.py`); the
mapping draws one of two policies for each car and episode. `python -m
benchmarks.sampling.multi_agent --help` lists the options.
"""

import argparse
import sys
from typing import Any

from benchmarks.overview.main_job import compare, parser_beside
from benchmarks.overview.plan import Cell, Contestant, Measurement
from tools import peers

SETTINGS: dict[str, Any] = {"cars": 25, "copies": 8, "fragment": 50, "first_seed": 10}

MEASUREMENT = Measurement(
    "traffic",
    "25 cars and 4 lights, 3 PPO policies, 8 copies: sampling, values and advantages included",
    (Cell("steps", "environment steps", "steps/s", higher_is_better=True),),
    (
        Contestant("ours", "ours", "sampling/ours_traffic.py"),
        Contestant("RLlib tf2", "rllib", "sampling/peer_rllib_traffic.py", "tf2"),
        Contestant("RLlib tf1", "rllib", "sampling/peer_rllib_traffic.py", "tf1"),
        Contestant("bare environment", "ours", "sampling/ours_traffic.py", "bare"),
    ),
)


def main() -> int:
    """Runs what the command line asks for; returns 1 if a contestant failed."""
    return compare(MEASUREMENT, peers.RLLIB, SETTINGS, _parse(), "multi_agent.json")


def _parse() -> argparse.Namespace:
    parser = parser_beside([peers.RLLIB], "multi_agent", __doc__)
    parser.add_argument("--quick", action="store_true", help="one short repetition of each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
