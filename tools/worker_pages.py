"""Prints every method and argument of three pages with the test that proves it.

    python -m tools.worker_pages

The pages are RolloutWorker, RolloutWorker.add_policy and AlgorithmConfig.multi_agent.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tfpolicies import AlgorithmConfig, RolloutWorker
from tools.policy_page import Outcomes

TESTS = Path(__file__).resolve().parents[1] / "tests" / "rollout" / "test_worker_pages.py"

ARGUMENTS = [
    "env_creator",
    "validate_env",
    "config",
    "worker_index",
    "num_workers",
    "recreated_worker",
    "log_dir",
    "spaces",
    "default_policy_class",
    "dataset_shards",
    "tf_session_creator",
]
METHODS = [
    "add_policy",
    "apply",
    "apply_gradients",
    "compute_gradients",
    "creation_args",
    "find_free_port",
    "for_policy",
    "foreach_env",
    "foreach_env_with_context",
    "foreach_policy",
    "foreach_policy_to_train",
    "get_filters",
    "get_global_vars",
    "get_host",
    "get_metrics",
    "get_node_ip",
    "get_policies_to_train",
    "get_policy",
    "get_weights",
    "learn_on_batch",
    "lock",
    "par_iter_init",
    "par_iter_next",
    "par_iter_next_batch",
    "par_iter_slice",
    "par_iter_slice_batch",
    "ping",
    "remove_policy",
    "sample",
    "sample_and_learn",
    "sample_with_count",
    "set_global_vars",
    "set_is_policy_to_train",
    "set_policy_mapping_fn",
    "set_weights",
    "setup_torch_data_parallel",
    "stop",
    "sync_filters",
    "unlock",
]
ADD_POLICY = [
    "policy_id",
    "policy_cls",
    "policy",
    "observation_space",
    "action_space",
    "config",
    "policy_state",
    "policy_mapping_fn",
    "policies_to_train",
    "module_spec",
]
MULTI_AGENT = [
    "policies",
    "policy_map_capacity",
    "policy_mapping_fn",
    "policies_to_train",
    "policy_states_are_swappable",
    "observation_fn",
    "count_steps_by",
]
DEPRECATED = ["algorithm_config_overrides_per_module", "replay_mode", "policy_map_cache"]


def rows() -> list[tuple[str, str, str, bool]]:
    """Returns page, item, name of the test, and whether the item is there."""

    def takes(function: object, name: str) -> bool:
        return name in inspect.signature(function).parameters  # type: ignore[arg-type]

    worker, multi_agent = "RolloutWorker", "AlgorithmConfig.multi_agent"
    return [
        *((worker, f"({x}=)", f"test_init_{x}", takes(RolloutWorker, x)) for x in ARGUMENTS),
        *((worker, f"{x}()", f"test_method_{x}", hasattr(RolloutWorker, x)) for x in METHODS),
        *(
            (f"{worker}.add_policy", x, f"test_add_policy_{x}", takes(RolloutWorker.add_policy, x))
            for x in ADD_POLICY
        ),
        *(
            (multi_agent, x, f"test_multi_agent_{x}", takes(AlgorithmConfig.multi_agent, x))
            for x in MULTI_AGENT
        ),
        *(
            (
                multi_agent,
                x,
                f"test_multi_agent_deprecated[{x}]",
                takes(AlgorithmConfig.multi_agent, x),
            )
            for x in DEPRECATED
        ),
    ]


def main() -> int:
    """Runs the tests and prints the table; returns 1 if something is not shown to work."""
    outcomes = Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", str(TESTS)], plugins=[outcomes])
    table = Table("page", "method or argument", "outcome", "shown by")
    result, proven = rows(), 0
    for page, item, test, is_there in result:
        outcome = outcomes.by_name.get(test, "no test")
        works = outcome == "passed" and is_there
        proven += works
        table.add_row(page, item, "works" if works else outcome, f"tests/{TESTS.name}::{test}")
    console = Console()
    console.width = max(console.width, 160)
    console.print(table)
    console.print(f"{proven} of {len(result)} work.")
    return 0 if proven == len(result) else 1


if __name__ == "__main__":
    sys.exit(main())
