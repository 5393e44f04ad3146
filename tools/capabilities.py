"""Writes `tfpolicies/algorithms/capabilities.json`: builds each algorithm for each kind of space.

`python -m tools.capabilities` takes about a minute; a test compares each answer with a real build.
"""

import json
from pathlib import Path

from tfpolicies.algorithms.algorithm_registry import find_algorithm, get_registered_names
from tfpolicies.algorithms.capabilities import find_capabilities

FILE = Path(__file__).parents[1] / "tfpolicies" / "algorithms" / "capabilities.json"


def main() -> None:
    """Writes the file."""
    algorithms = {name: find_algorithm(name) for name in get_registered_names()}
    records = {name: find_capabilities(x).to_json() for name, x in algorithms.items()}
    FILE.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
