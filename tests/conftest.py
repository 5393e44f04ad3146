"""Makes `benchmarks` importable and nothing else: the package is the installed one."""

import importlib.util
import sys
from pathlib import Path

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
