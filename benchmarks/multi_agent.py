"""Measures sampling with many agents against RLlib's old TensorFlow stack, in one run.

25 cars and 4 traffic lights, three policies, 8 copies of the town (`examples/traffic_grid.py`); the
mapping draws one of two policies for each car and episode. `python -m benchmarks.multi_agent
--help` lists the options.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import peers
from benchmarks.main_job import HERE, compare
from benchmarks.plan import Cell, Contestant, Measurement

SETTINGS: dict[str, Any] = {"cars": 25, "copies": 8, "fragment": 50, "first_seed": 10}

MEASUREMENT = Measurement(
    "traffic",
    "25 cars and 4 lights, 3 PPO policies, 8 copies: sampling, values and advantages included",
    (Cell("steps", "environment steps", "steps/s", higher_is_better=True),),
    (
        Contestant("ours", "ours", "ours_traffic.py"),
        Contestant("RLlib tf2", "rllib", "peer_rllib_traffic.py", "tf2"),
        Contestant("RLlib tf1", "rllib", "peer_rllib_traffic.py", "tf1"),
        Contestant("bare environment", "ours", "ours_traffic.py", "bare"),
    ),
)


def main() -> int:
    """Runs what the command line asks for; returns 1 if a contestant failed."""
    options = _parse()
    console = Console()
    console.width = max(console.width, 120)
    interpreters = {"ours": Path(sys.executable)}
    try:
        given = options.rllib_python
        interpreters["rllib"] = (
            given.absolute() if given else peers.interpreter(peers.RLLIB, options.peers)
        )
    except peers.PeerError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    return compare(console, MEASUREMENT, interpreters, SETTINGS, options, "multi_agent.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multi_agent", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short repetition of each")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="folder for multi_agent.json"
    )
    parser.add_argument(
        "--peers", type=Path, default=HERE / ".peers", help="folder for the peer's environment"
    )
    parser.add_argument(
        "--rllib-python", type=Path, help="an interpreter that has RLlib's packages already"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
