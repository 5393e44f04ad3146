"""Makes `benchmarks` importable, and a Ray cluster for those who ask for one."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"

if "benchmarks" not in sys.modules:
    found = importlib.util.spec_from_file_location(
        "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["benchmarks"] = module
    found.loader.exec_module(module)


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray cluster on this computer, for all tests that need one."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    yield ray
    ray.shutdown()
