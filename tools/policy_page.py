"""Prints every method of the Policy page with the test that proves it, for both PPO policies.

python -m tools.policy_page
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tfpolicies import Policy

TESTS = Path(__file__).resolve().parents[1] / "tests" / "policy" / "test_policy_methods.py"
CLASSES = ("PPOTF2Policy", "PPOTF1Policy")
METHODS = (
    "__init__",
    "apply",
    "apply_gradients",
    "compute_actions",
    "compute_actions_from_input_dict",
    "compute_gradients",
    "compute_log_likelihoods",
    "compute_single_action",
    "export_checkpoint",
    "export_model",
    "from_checkpoint",
    "from_state",
    "get_connector_metrics",
    "get_exploration_state",
    "get_host",
    "get_initial_state",
    "get_num_samples_loaded_into_buffer",
    "get_session",
    "get_state",
    "get_weights",
    "import_model_from_h5",
    "init_view_requirements",
    "is_recurrent",
    "learn_on_batch",
    "learn_on_batch_from_replay_buffer",
    "learn_on_loaded_batch",
    "load_batch_into_buffer",
    "loss",
    "make_rl_module",
    "maybe_add_time_dimension",
    "maybe_remove_time_dimension",
    "num_state_tensors",
    "on_global_var_update",
    "postprocess_trajectory",
    "reset_connectors",
    "restore_connectors",
    "set_state",
    "set_weights",
)


class Outcomes:
    """Collects how each test ended."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.when == "call" or report.failed:
            self.by_name[name] = report.outcome


def main() -> int:
    """Runs the tests and prints the table; returns 1 if a method is not shown to work."""
    outcomes = Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", str(TESTS)], plugins=[outcomes])
    table = Table("method", *CLASSES, "shown by")
    proven = 0
    for method in METHODS:
        cells = []
        for policy_class in CLASSES:
            outcome = outcomes.by_name.get(f"test_{method}[{policy_class}]", "no test")
            works = outcome == "passed" and hasattr(Policy, method)
            proven += works
            cells.append("works" if works else outcome)
        table.add_row(method, *cells, f"tests/{TESTS.name}::test_{method}")
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)
    total = len(METHODS) * len(CLASSES)
    console.print(f"{proven} of {total} work.")
    return 0 if proven == total else 1


if __name__ == "__main__":
    sys.exit(main())
